"""Granite, the format of IBM's released models (PowerLM-3B, PowerMoE-3B), which transformers opens.

Here a model is a dict of GPTConfig's fields and a dict of tensors under our names.
"""

import json
import os
import shutil
from pathlib import Path

import safetensors.torch
from torch import Tensor

NAMES = {  # last part of our parameter names -> theirs, within a layer or the model
    "embed": "embed_tokens", "norm": "norm",
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "out": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj", "router": "block_sparse_moe.router.layer",
    "experts_in": "block_sparse_moe.input_linear", "experts_out": "block_sparse_moe.output_linear",
}  # fmt: skip
NEWER_NAMES = {  # in the memory of transformers 5, and in some files -> on disk
    "experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight",
    "moe.router.weight": "moe.router.layer.weight",
}  # fmt: skip
FIELDS = {  # our field -> their name, and the default of transformers if a file lacks it
    "n_layer": ("num_hidden_layers",), "n_embd": ("hidden_size",),
    "n_head": ("num_attention_heads",), "n_ffn": ("intermediate_size",),
    "vocab_size": ("vocab_size",), "n_kv_head": ("num_key_value_heads", None),
    "seq_len": ("max_position_embeddings", 2048), "n_expert": ("num_local_experts", 0),
    "n_expert_active": ("num_experts_per_tok", 0), "m_emb": ("embedding_multiplier", 1.0),
    "m_res": ("residual_multiplier", 1.0), "attention_multiplier": ("attention_multiplier", 1.0),
    "logits_scaling": ("logits_scaling", 1.0), "init_std": ("initializer_range", 0.02),
    "norm_eps": ("rms_norm_eps", 1e-6), "tie_embeddings": ("tie_word_embeddings", False),
}  # fmt: skip
SUPPORTED = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}


def granite_name(name: str) -> str:
    """'blocks.3.attn.q.weight' -> 'model.layers.3.self_attn.q_proj.weight'."""
    *where, part = name.removesuffix(".weight").split(".")
    if part == "head":
        return "lm_head.weight"
    layer = f"layers.{where[1]}." if where else ""
    return f"model.{layer}{NAMES[part]}.weight"


def is_granite(path: Path) -> bool:
    """Is this a folder with a config.json of transformers (and not a run folder)?"""
    config = path / "config.json"
    return config.is_file() and '"model_type"' in config.read_text("utf-8", errors="replace")


def granite_config(path: Path) -> dict:
    """The fields of a GPTConfig that the folder's config.json describes.

    All multipliers come from the file. It does not store m_width; to continue training we use
    logits_scaling, which equals m_width in the released models. Raises ValueError for a damaged
    file or for a model that is not a Granite that we support.
    """
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        check_supported(config)
        fields = {ours: theirs_or_default(config, *name) for ours, name in FIELDS.items()}
        rope = config.get("rope_parameters") or {}
        fields["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        fields["logits_scaling"] = fields["m_width"] = float(fields["logits_scaling"])
        return fields
    except KeyError as missing:
        raise ValueError(f"{file}: lacks {missing}; is the download complete?") from None
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:  # ValueError: JSON
        raise ValueError(f"{file}: not a configuration that can be read ({error})") from None


def theirs_or_default(config: dict, name: str, *default):
    return config.get(name, *default) if default else config[name]


def check_supported(config: dict) -> None:
    """Raise ValueError for another architecture or for a part that our GPT does not have."""
    if config["model_type"] not in ("granite", "granitemoe"):
        raise ValueError(f"model_type {config['model_type']!r} is neither granite nor granitemoe")
    for name, value in SUPPORTED.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} is {config[name]!r}; only {value!r} is supported")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type {rope['rope_type']!r} is not supported")
    if config.get("head_dim") not in (None, config["hidden_size"] // config["num_attention_heads"]):
        raise ValueError(f"head_dim {config['head_dim']} is not hidden_size / num_attention_heads")


def weight_files(path: Path) -> list[Path]:
    """model.safetensors, or the shards that its index names. Raises if one does not exist."""
    index, files = path / "model.safetensors.index.json", [path / "model.safetensors"]
    if index.exists():
        try:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = sorted({path / shard for shard in shards})
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(f"{index}: damaged, no weight_map from tensor to file") from None
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; is the download complete?")
    return files


def read_granite(path: Path, shapes: dict) -> dict[str, Tensor]:
    """The weights of a folder under our names, mapped from the files and not yet read.

    shapes: our parameter name -> its shape, of a model of this granite_config.
    Raises FileNotFoundError or ValueError if files or tensors are missing, damaged, unknown or
    misshapen.
    """
    ours, weights = {granite_name(name): name for name in shapes}, {}
    for file in weight_files(path):
        try:
            loaded = safetensors.torch.load_file(file)
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{file}: not a safetensors file, or damaged ({error})") from None
        for theirs, tensor in loaded.items():
            for newer, older in NEWER_NAMES.items():
                theirs = theirs.replace(newer, older)
            if theirs == "lm_head.weight" and "head.weight" not in shapes:
                continue  # tied: the embedding once more
            if theirs not in ours:
                raise ValueError(f"{file}: tensor {theirs} does not belong in a model of its shape")
            name = ours[theirs]
            if tensor.shape != shapes[name]:
                sizes = f"is {list(tensor.shape)}, config.json says {list(shapes[name])}"
                raise ValueError(f"{file}: {theirs} {sizes}")
            weights[name] = tensor
    if missing := [theirs for theirs, name in ours.items() if name not in weights]:
        raise ValueError(f"{path}: {len(missing)} tensors are missing, the first is {missing[0]}")
    return weights


def describe(fields: dict, dtype: str, eot: int) -> dict:
    """The config.json of a model with these GPTConfig fields."""
    kind = "GraniteMoe" if fields["n_expert"] else "Granite"
    config = {name: fields[ours] for ours, (name, *_) in FIELDS.items()}
    if fields["n_expert"]:
        config["router_aux_loss_coef"] = 0.01
    else:
        del config["num_local_experts"], config["num_experts_per_tok"]
    return {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(),
            "torch_dtype": dtype, "rope_theta": fields["rope_theta"], **SUPPORTED, **config,
            "bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot}  # fmt: skip


def write_granite(to: Path, fields: dict, weights: dict, eot: int, texts: dict[str, str]) -> None:
    """Write a folder that transformers opens. It appears at the end, by rename, or not at all.

    eot: id of end-of-text. texts: further files, name -> content, such as the tokenizer's.
    Raises FileExistsError if `to` exists, OSError if it cannot be written.
    """
    if to.exists():
        raise FileExistsError(f"--to {to}: already exists; choose another folder or remove it")
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    config = json.dumps(describe(fields, dtype, eot), indent=1) + "\n"
    tensors = {granite_name(name): tensor.contiguous() for name, tensor in weights.items()}
    building = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        building.mkdir(parents=True)
        for name, content in {"config.json": config, **texts}.items():
            (building / name).write_text(content, encoding="utf-8")
        file = building / "model.safetensors"
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
        os.rename(building, to)
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"--to {to}: cannot be written ({reason})") from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
