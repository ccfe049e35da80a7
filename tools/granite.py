"""Granite, the format of IBM's released models (PowerLM-3B, PowerMoE-3B), which
transformers opens.

Here a model is a dict of GPTConfig's fields and a dict of tensors under our names.
"""

import json
import os
import shutil
from pathlib import Path

import safetensors.torch
from torch import Tensor

from tools.flags import UserError

# Our names -> theirs. First the weights, by the last part of the name, within a layer or
# the model.
NAMES = {
    "embed":       "embed_tokens",
    "attn_norm":   "input_layernorm",
    "q":           "self_attn.q_proj",
    "k":           "self_attn.k_proj",
    "v":           "self_attn.v_proj",
    "out":         "self_attn.o_proj",
    "mlp_norm":    "post_attention_layernorm",
    "gate":        "mlp.gate_proj",
    "up":          "mlp.up_proj",
    "down":        "mlp.down_proj",
    "router":      "block_sparse_moe.router.layer",
    "experts_in":  "block_sparse_moe.input_linear",
    "experts_out": "block_sparse_moe.output_linear",
    "norm":        "norm",
}  # fmt: skip
FIELDS = {  # then the fields of GPTConfig
    "n_layer":              "num_hidden_layers",
    "n_embd":               "hidden_size",
    "n_head":               "num_attention_heads",
    "n_ffn":                "intermediate_size",
    "vocab_size":           "vocab_size",
    "n_kv_head":            "num_key_value_heads",
    "seq_len":              "max_position_embeddings",
    "n_expert":             "num_local_experts",
    "n_expert_active":      "num_experts_per_tok",
    "m_emb":                "embedding_multiplier",
    "m_res":                "residual_multiplier",
    "attention_multiplier": "attention_multiplier",
    "logits_scaling":       "logits_scaling",
    "init_std":             "initializer_range",
    "norm_eps":             "rms_norm_eps",
    "rope_theta":           "rope_theta",
    "tie_embeddings":       "tie_word_embeddings",
}  # fmt: skip

# Defaults of transformers, for files without experts or without rotary settings
DEFAULTS = {
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "rope_theta": 10000.0,
    "rope_type": "default",
    "hidden_act": "silu",
}
# The values under which their model is ours
SUPPORTED = {
    "model_type": ["granite", "granitemoe"],
    "rope_type": ["default"],
    "hidden_act": ["silu"],
}


def granite_name(name: str) -> str:
    """'blocks.3.attn.q.weight' -> 'model.layers.3.self_attn.q_proj.weight'."""
    parts = name.removesuffix(".weight").split(".")
    if parts[-1] == "head":
        return "lm_head.weight"
    if parts[-1] not in NAMES:
        raise UserError(
            f"{name}: Granite has no such weight, so this model has no such form"
        )
    theirs = NAMES[parts[-1]]
    if parts[0] == "blocks":
        return f"model.layers.{parts[1]}.{theirs}.weight"
    return f"model.{theirs}.weight"


def is_granite(path: Path) -> bool:
    """Is this a folder with a config.json of transformers (and not a run folder)?"""
    file = path / "config.json"
    if not file.is_file():
        return False
    return '"model_type"' in file.read_text(encoding="utf-8", errors="replace")


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

    # 1. The rotary settings are in an object of their own, whose name depends on the
    # version, or among the other fields
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    config |= rotary
    if "type" in config:  # what older files call rope_type
        config["rope_type"] = config["type"]

    # 2. Refuse what we cannot compute
    for name, known in SUPPORTED.items():
        value = config.get(name)
        if value not in known:
            raise UserError(
                f"{file}: {name} is {value!r}; we support only {', '.join(known)}"
            )
    missing = set(FIELDS.values()) - set(config)
    if missing:
        raise UserError(
            f"{file}: lacks {', '.join(sorted(missing))}; is the download complete?"
        )

    # 3. Translate
    fields = {ours: config[theirs] for ours, theirs in FIELDS.items()}
    fields["m_width"] = fields["logits_scaling"]
    return fields


def read_weights(path: Path, names) -> dict[str, Tensor]:
    """The weights of a folder under our names, mapped from the files and not yet read.

    names: all our parameters. A tensor that is none of them keeps its name.
    Raises OSError if a file is missing, UserError if it is damaged.
    """
    # 1. A large model is divided among several files, which an index lists
    files = {path / "model.safetensors"}
    index = path / "model.safetensors.index.json"
    if index.exists():
        file_of_weight = read_json(index).get("weight_map", {})
        files = {path / name for name in file_of_weight.values()}

    # 2. Read them
    our_name = {granite_name(name): name for name in names}
    weights = {}
    for file in files:
        try:
            loaded = safetensors.torch.load_file(file)
        except safetensors.SafetensorError as error:
            raise UserError(
                f"{file}: damaged ({error}); is the download complete?"
            ) from None
        for name, tensor in loaded.items():
            weights[our_name.get(name, name)] = tensor
    if "head.weight" not in names:
        weights.pop("lm_head.weight", None)  # tied, so it is the embedding once more
    return weights


def write_folder(
    to: Path, fields: dict, weights: dict, eot: int, texts: dict[str, str]
) -> None:
    """Write a folder that transformers opens. It appears at the end, by rename, or not at all.

    eot: id of end-of-text. texts: name -> content of further files, such as a tokenizer.
    Raises OSError if `to` is not empty or cannot be written.
    """
    # 1. config.json
    kind = "GraniteMoe" if fields["n_expert"] else "Granite"
    first_weight = next(iter(weights.values()))
    config = {theirs: fields[ours] for ours, theirs in FIELDS.items()}
    config["architectures"] = [f"{kind}ForCausalLM"]
    config["model_type"] = kind.lower()
    config["hidden_act"] = "silu"
    config["torch_dtype"] = str(first_weight.dtype).removeprefix("torch.")
    config["bos_token_id"] = eot
    config["eos_token_id"] = eot
    config["pad_token_id"] = eot
    texts = {"config.json": json.dumps(config, indent=1) + "\n", **texts}

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
        os.rename(building, to)
    except (OSError, safetensors.SafetensorError) as error:
        raise OSError(f"--to {to}: cannot be written ({error})") from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
