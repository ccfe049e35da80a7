"""Granite, the format of IBM's released models (PowerLM-3B, PowerMoE-3B), which
transformers opens.

Here a model is a dict of GPTConfig's fields and a dict of tensors under our names.
"""

import functools
import importlib.util
import json
import os
import re
import shutil
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from tools.flags import UserError
from tools.tokenizers import tokenizer_files

# Our names -> theirs. First the weights, of the model and of a block
MODEL_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm.weight":  "input_layernorm.weight",
    "attn.q.weight":     "self_attn.q_proj.weight",
    "attn.k.weight":     "self_attn.k_proj.weight",
    "attn.v.weight":     "self_attn.v_proj.weight",
    "attn.out.weight":   "self_attn.o_proj.weight",
    "mlp_norm.weight":   "post_attention_layernorm.weight",
    "mlp.gate.weight":   "mlp.gate_proj.weight",
    "mlp.up.weight":     "mlp.up_proj.weight",
    "mlp.down.weight":   "mlp.down_proj.weight",
    "mlp.router.weight": "block_sparse_moe.router.layer.weight",
    "mlp.experts_in":    "block_sparse_moe.input_linear.weight",
    "mlp.experts_out":   "block_sparse_moe.output_linear.weight",
}  # fmt: skip
OUR_MODEL_NAMES = {theirs: ours for ours, theirs in MODEL_NAMES.items()}
OUR_BLOCK_NAMES = {theirs: ours for ours, theirs in BLOCK_NAMES.items()}
# then the fields of GPTConfig, with their types
FIELDS = {
    "n_layer":              ("num_hidden_layers", int),
    "n_embd":               ("hidden_size", int),
    "n_head":               ("num_attention_heads", int),
    "n_ffn":                ("intermediate_size", int),
    "vocab_size":           ("vocab_size", int),
    "n_kv_head":            ("num_key_value_heads", int),
    "seq_len":              ("max_position_embeddings", int),
    "n_expert":             ("num_local_experts", int),
    "n_expert_active":      ("num_experts_per_tok", int),
    "m_emb":                ("embedding_multiplier", float),
    "m_res":                ("residual_multiplier", float),
    "attention_multiplier": ("attention_multiplier", float),
    "logits_scaling":       ("logits_scaling", float),
    "init_std":             ("initializer_range", float),
    "norm_eps":             ("rms_norm_eps", float),
    "rope_theta":           ("rope_theta", float),
    "tie_embeddings":       ("tie_word_embeddings", bool),
}  # fmt: skip

# Defaults of transformers, for files without experts or without rotary settings
DEFAULTS = {
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "rope_theta": 10000.0,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The values under which their model is ours. The first is their default
SUPPORTED = {
    "model_type": (None, "granite", "granitemoe"),
    "hidden_act": ("silu",),
    "rope_type": ("default", None),
    "partial_rotary_factor": (1.0, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
}


def is_granite(path: Path) -> bool:
    """Is this a folder with a config.json of transformers (and not a run folder)?"""
    file = path / "config.json"
    if not file.is_file():
        return False
    return '"model_type"' in file.read_text(encoding="utf-8", errors="replace")


def read_folder(path: Path) -> dict:
    """A released model as the "config" (only shape and tokenizer) and "model" of a checkpoint.

    The weights are mapped from the files and not yet read. Raises UserError if a file is
    damaged or the architecture is not ours, OSError if a file is missing.
    """
    config = read_config(path)
    weights = read_weights(path)
    if config["tie_embeddings"] and "head.weight" in weights:
        # the embedding once more
        if not torch.equal(weights.pop("head.weight"), weights["embed.weight"]):
            raise UserError(
                f"{path}: lm_head differs from the embedding, but config.json has "
                "tie_word_embeddings true; change it to false to keep both"
            )
    config["tokenizer"] = str(path.resolve() / "tokenizer.json")
    return {"config": config, "model": weights}


# -- Reading -----------------------------------------------------------------------------


def read_json(file: Path) -> dict:
    """The object in a file of a Granite folder. Raises UserError if it is damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise UserError("not a JSON object")
    except ValueError as error:
        raise UserError(f"{file}: damaged ({error}); is the download complete?") from None
    return content


def read_config(path: Path) -> dict:
    """The fields of a GPTConfig, from config.json.

    It lacks m_width, which training needs. In the released models m_width is
    logits_scaling. Raises UserError for a damaged file or an architecture different from
    ours.
    """
    file = path / "config.json"
    config = DEFAULTS | read_json(file)

    # 1. The rotary settings are among the other fields, or in one or two objects, whose
    # names depend on the version
    for name in ("rope_scaling", "rope_parameters"):
        rotary = config.get(name) or {}
        if not isinstance(rotary, dict):
            raise UserError(f"{file}: {name} is {rotary!r}, not an object")
        check_supported(file, rotary)
        config |= rotary

    # 2. Refuse what we cannot compute
    if config.get("model_type") is None:
        raise UserError(f"{file}: has no model_type")
    check_supported(file, config)

    # 3. Translate
    fields = {}
    for ours, (theirs, kind) in FIELDS.items():
        if theirs not in config:
            raise UserError(f"{file}: lacks {theirs}; is the download complete?")
        value = config[theirs]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UserError(f"{file}: {theirs} is {value!r}, not of type {kind.__name__}")
        fields[ours] = value
    d_head = fields["n_embd"] // max(1, fields["n_head"])
    if config.get("head_dim") not in (None, d_head):
        raise UserError(
            f"{file}: head_dim is {config['head_dim']}; we support only {d_head}"
        )
    fields["m_width"] = fields["logits_scaling"]
    return fields


def check_supported(file: Path, config: dict) -> None:
    if "type" in config:  # what older files call rope_type
        config = {"rope_type": config["type"]} | config
    for name, known in SUPPORTED.items():
        value = config.get(name, known[0])
        if value not in known:
            supported = " or ".join(str(each) for each in known if each is not None)
            raise UserError(
                f"{file}: {name} is {value!r}; we support only {supported or 'none'}"
            )


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a folder under our names. A tensor that is none of them keeps its name.

    If they have several dtypes, all get the widest.
    """
    # 1. A large model is divided among several files, which an index lists
    files = {path / "model.safetensors"}
    index = path / "model.safetensors.index.json"
    if index.exists():
        file_of_weight = read_json(index).get("weight_map")
        if not isinstance(file_of_weight, dict):
            raise UserError(f"{index}: has no weight_map; is the download complete?")
        files = {path / str(name) for name in file_of_weight.values()}

    # 2. Read them
    weights = {}
    for file in sorted(files):
        try:
            loaded = safetensors.torch.load_file(file)
        except safetensors.SafetensorError as error:
            raise UserError(
                f"{file}: damaged ({error}); is the download complete?"
            ) from None
        for name, tensor in loaded.items():
            if tensor.dtype not in DTYPES:
                raise UserError(
                    f"{file}: {name} has dtype {tensor.dtype}; is it quantized?"
                )
            weights[our_name(name)] = tensor

    # 3. One dtype for all
    dtypes = [tensor.dtype for tensor in weights.values()]
    if dtypes:
        dtype = functools.reduce(torch.promote_types, dtypes)
        weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    return weights


def our_name(name: str) -> str:
    """'model.layers.3.self_attn.q_proj.weight' -> 'blocks.3.attn.q.weight'."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    if layer and layer[2] in OUR_BLOCK_NAMES:
        return f"blocks.{layer[1]}.{OUR_BLOCK_NAMES[layer[2]]}"
    return OUR_MODEL_NAMES.get(name, name)


# -- Writing -----------------------------------------------------------------------------


def granite_name(name: str) -> str:
    """'blocks.3.attn.q.weight' -> 'model.layers.3.self_attn.q_proj.weight'."""
    if name in MODEL_NAMES:
        return MODEL_NAMES[name]
    block = re.fullmatch(r"blocks\.(\d+)\.(.*)", name)
    if block and block[2] in BLOCK_NAMES:
        return f"model.layers.{block[1]}.{BLOCK_NAMES[block[2]]}"
    raise UserError(f"{name}: Granite has no such weight, so this model has no such form")


def write_folder(
    to: Path, fields: dict, weights: dict, tokenizer, example: tuple
) -> bool:
    """Write a folder that transformers opens. It appears at the end, by rename, or not at all.

    example: token ids [1, T] and their logits [1, T, V], to compare with transformers.
    Returns whether it is installed. Raises UserError if its logits differ, OSError if
    `to` is not empty or cannot be written.
    """
    # 1. config.json
    kind = "GraniteMoe" if fields["n_expert"] else "Granite"
    first_weight = next(iter(weights.values()))
    config = {theirs: fields[ours] for ours, (theirs, _) in FIELDS.items()}
    config["architectures"] = [f"{kind}ForCausalLM"]
    config["model_type"] = kind.lower()
    config["hidden_act"] = "silu"
    config["torch_dtype"] = str(first_weight.dtype).removeprefix("torch.")
    config["bos_token_id"] = tokenizer.eot_token
    config["eos_token_id"] = tokenizer.eot_token
    config["pad_token_id"] = tokenizer.eot_token
    texts = tokenizer_files(tokenizer)
    texts["config.json"] = json.dumps(config, indent=1) + "\n"

    # 2. The weights, under their names
    tensors = {}
    for name, tensor in weights.items():
        tensors[granite_name(name)] = tensor.contiguous()

    # 3. Write everything into a hidden folder beside `to`, and rename it
    building = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        building.mkdir(parents=True)
        for name, content in texts.items():
            (building / name).write_text(content, encoding="utf-8")
        file = building / "model.safetensors"
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
        compared = compare(building, *example)
        os.rename(building, to)
    except (OSError, safetensors.SafetensorError) as error:
        raise OSError(f"--to {to}: cannot be written ({error})") from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return compared


def compare(folder: Path, idx: Tensor, logits: Tensor) -> bool:
    """Does transformers compute these logits, too? False if it is not installed.

    Raises UserError if its logits differ. The format holds weights and numbers, but no
    code, so a model with a different activation would come out as one with silu.
    """
    if importlib.util.find_spec("transformers") is None:
        return False
    import transformers

    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        theirs = model.eval()(idx).logits
    largest = logits.abs().max().item()
    error = (theirs - logits).abs().max().item()
    tolerance = 1e-3 if logits.dtype == torch.float32 else 0.05
    if not error <= tolerance * largest:
        raise UserError(
            f"transformers computes logits that differ by {error:.2g} (the largest is "
            f"{largest:.2g}); is this model a Granite, with silu and rotary positions?"
        )
    return True
