"""Which device, in which precision, with how much memory; one process or many."""

import contextlib
import datetime
import math
import os
import re
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

# ---------------------------------------------------------------------------------------------
# Devices


def pick_device(name: str = "auto") -> str:
    """Return the device to use; "auto" is cuda if available, else mps, else cpu.

    Under torchrun, "cuda" is the GPU of this process. Raises ValueError for an unavailable device.
    """
    mps = torch.backends.mps.is_available()
    found = {"cuda": torch.cuda.device_count(), "mps": int(mps), "cpu": 1}
    if name == "auto":
        name = next(kind for kind in found if found[kind])
    form = re.fullmatch(r"(cpu|mps|cuda)(?::(\d+))?", name)
    if form is None or int(form[2] or 0) >= found[form[1]]:
        there = ", ".join(kind for kind in found if found[kind])
        raise ValueError(f"--device {name}: not available on this machine; choose from {there}")
    if name == "cuda" and rank_and_world()[1] > 1:
        return f"cuda:{torch.cuda.current_device()}"
    return name


def pick_dtype(device: str, width: int, n_expert: int) -> str:
    """The dtype of matrix products that "auto" stands for: bfloat16 if the device gains by it."""
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    can = torch.cpu.get_capabilities() if device == "cpu" else {}
    # 1.4x on a CPU at width 128, 1.2x at 64, nothing below or for small experts
    gains = (can.get("avx512_bf16") or can.get("amx_bf16")) and width >= 64 and not n_expert
    return "bfloat16" if gains else "float32"


def resolved(cfg) -> dict:
    """Fields of a config that depend on this machine. Raises ValueError if it cannot train cfg."""
    device, (_, world) = pick_device(cfg.device), rank_and_world()
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    if cfg.batch_size % world:
        raise ValueError(f"--batch_size {cfg.batch_size}: must be a multiple of {world} processes")
    check_memory(cfg, device)
    worth_compiling = device.startswith("cuda") and cfg.n_embd >= 256  # it takes half a minute
    return {
        "device": device,
        "dtype": pick_dtype(device, cfg.n_embd, cfg.n_expert) if cfg.dtype == "auto" else cfg.dtype,
        "compile": worth_compiling if cfg.compile is None else cfg.compile,
        "micro_batch_size": math.gcd(cfg.micro_batch_size, cfg.batch_size // world),
    }


def attention_priority(cfg):
    """On Hopper GPUs, try cuDNN's attention first: 1.7 to 2.3 times as fast by others' reports."""
    on_gpu = cfg.device.startswith("cuda")
    if not on_gpu or torch.cuda.get_device_capability(cfg.device) != (9, 0):
        return contextlib.nullcontext()
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *others], set_priority=True)


@contextlib.contextmanager
def mixed_precision(cfg):
    """Forward passes in here multiply matrices in cfg.dtype; parameters stay in float32."""
    bfloat16 = cfg.dtype == "bfloat16"
    with torch.autocast(cfg.device.split(":")[0], torch.bfloat16, enabled=bfloat16):
        with attention_priority(cfg):
            yield


def to_device(array: np.ndarray, device: str) -> torch.Tensor:
    """Copy to the device. To a GPU from pinned memory, so that the program need not wait for it."""
    tensor = torch.from_numpy(array)
    if device.startswith("cuda"):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


PEAK_FLOPS = {  # part of a GPU's name -> bfloat16 FLOP/s without sparsity, from the data sheets
    "H200 NVL": 835e12, "H200": 989e12, "GH200": 989e12,
    "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12,  # the last one is the SXM card
    "A100": 312e12, "L40S": 362e12, "4090": 165e12,
}  # fmt: skip


def peak_flops(device: str) -> float | None:
    """bfloat16 FLOP/s of this device according to its data sheet; None if we do not know it."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)


def memory_of(device: str) -> float:
    """Bytes of memory that the device has; infinity if the system does not say."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return math.inf


def check_memory(cfg, device: str) -> None:
    """Raise ValueError if weights, gradients and AdamW's moments alone exceed the memory."""
    mlp = 3 * cfg.n_embd * cfg.n_ffn * max(1, cfg.n_expert)
    attention = 2 * cfg.n_embd * (cfg.n_embd + cfg.n_kv_head * cfg.d_head)
    n_params = cfg.vocab_size * cfg.n_embd + cfg.n_layer * (attention + mlp)
    need, have = 16 * n_params, memory_of(device)  # four float32 numbers each
    if need > have:
        raise ValueError(
            f"--n_embd {cfg.n_embd} --n_layer {cfg.n_layer}: {n_params:.3g} parameters need "
            f"{need / 2**30:,.0f} GiB, {device} has {have / 2**30:,.0f}; choose a smaller model"
        )


# ---------------------------------------------------------------------------------------------
# Processes. torchrun starts one for each GPU (or CPU core), and stops all if one of them fails.


def rank_and_world() -> tuple[int, int]:
    """Rank of this process and number of processes; (0, 1) without torchrun."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def total(x: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all processes, in place. All of them must call this together."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def any_process(flag: bool) -> bool:
    """Is the flag set in any process? All of them must call this together."""
    return bool(total(torch.tensor(int(flag))))


def share(run, parts: list, title: str) -> list:
    """[run(part), ...] for all parts, which the processes of torchrun take by turns."""
    (rank, world), mine = rank_and_world(), {}
    for i in tqdm(range(rank, len(parts), world), title, leave=False, disable=None):
        mine[i] = run(parts[i])
    everyone = [mine] * world
    if world > 1:
        dist.all_gather_object(everyone, mine)
    results = {i: result for some in everyone for i, result in some.items()}
    return [results[i] for i in range(len(parts))]


def join(device: str) -> None:
    """Meet the other processes, if torchrun started us. Raises ValueError if they do not come."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return
    on_gpus = pick_device(device).startswith("cuda")
    if on_gpus:
        torch.cuda.set_device(pick_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}"))
    wait = datetime.timedelta(seconds=60)  # for the others to come; NCCL's own limit comes after it
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=wait))
        store.set_timeout(wait)
        backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    except (ValueError, RuntimeError) as error:
        promised, reason = os.environ["WORLD_SIZE"], str(error).splitlines()[0]
        raise ValueError(f"WORLD_SIZE={promised}: cannot meet the others ({reason})") from None


@contextlib.contextmanager
def rank_0_first():
    """Run the body on rank 0, which may have a corpus to prepare, and then on all the others.

    Yields a dict that rank 0 fills for the others. If rank 0 fails, they end without a word.
    """
    rank, world = rank_and_world()
    told = [{}]
    if rank > 0:
        dist.broadcast_object_list(told)
        if told[0] is None:
            os._exit(2)
    try:
        yield told[0]
    except BaseException:
        told = [None]
        raise
    finally:
        if rank == 0 and world > 1:
            dist.broadcast_object_list(told)


def reason_of(error: Exception) -> str | None:
    """Why training cannot continue, for a failure that is not a bug; None for a bug."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        return ("out of memory; a smaller --micro_batch_size or --recompute needs less, "
                "python bench.py --dry_run estimates how much")  # fmt: skip
    if isinstance(error, OSError):  # a full disk, a folder that vanished
        return f"{error}; the saved checkpoints are whole, --resume starts from the newest"
    if isinstance(error, RuntimeError) and re.search("gloo|nccl|Connection", text, re.IGNORECASE):
        return f"rank {rank_and_world()[0]}: lost the other processes; one of them failed"
    return None


def leave(status: int) -> None:
    """Exit. With other processes at once: an orderly exit would wait for them."""
    if dist.is_initialized():
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
