"""Choose device and precision, check the memory, and connect the processes of
torchrun."""

import contextlib
import dataclasses
import os
import re
import sys

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from tools.flags import UserError, plain


def pick_device(name: str = "auto") -> str:
    """Return the device to use; "auto" is the first available of cuda, mps, cpu.

    Under torchrun, "cuda" is the GPU of this process. Raises UserError for an unavailable
    device.
    """
    found = []
    if torch.cuda.device_count() > 0:
        found.append("cuda")
    for i in range(torch.cuda.device_count()):
        found.append(f"cuda:{i}")
    if torch.backends.mps.is_available():
        found.append("mps")
    found.append("cpu")
    if name == "auto":
        name = found[0]
    if name not in found:
        raise UserError(f"--device {name}: not available; choose from {', '.join(found)}")
    if name == "cuda" and rank_and_world()[1] > 1:
        return f"cuda:{torch.cuda.current_device()}"
    return name


def all_devices(device: str, number: int | None) -> list[str]:
    """The device of every worker. number: None is one per GPU, or one per CPU core."""
    if device == "cuda":
        n_gpus = torch.cuda.device_count()
        return [f"cuda:{i % n_gpus}" for i in range(number or n_gpus)]
    if device == "cpu":
        return [device] * (number or torch.get_num_threads())
    return [device] * (number or 1)


def pick_dtype(cfg, device: str) -> str:
    """The dtype of matrix products for "auto": bfloat16 if it is faster on this device."""
    if device.startswith("cuda"):
        faster = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device == "cpu":
        # 1.4x at width 128, 1.2x at 64, nothing below or for small experts
        has_instructions = torch.cpu.get_capabilities().get("avx512_bf16")
        faster = has_instructions and cfg.n_embd >= 64 and not cfg.n_expert
    else:
        faster = False
    return "bfloat16" if faster else "float32"


def resolve_device(cfg):
    """Replace every "auto" by its meaning here. Raises UserError if cfg cannot train here."""
    # 1. The device, and whether all processes get the same share of a batch
    device = pick_device(cfg.device)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    _, world = rank_and_world()
    if cfg.batch_size % world:
        raise UserError(
            f"--batch_size {cfg.batch_size}: must be a multiple of {world} processes"
        )

    # 2. What depends on the device
    dtype = cfg.dtype
    if dtype == "auto":
        dtype = pick_dtype(cfg, device)
    compile = cfg.compile
    if compile is None:  # compiling takes half a minute
        compile = device.startswith("cuda") and cfg.n_embd >= 256
    return dataclasses.replace(cfg, device=device, dtype=dtype, compile=compile)


def check_memory(cfg, n_params: int) -> None:
    """Raise UserError if weights, gradients and AdamW's moments alone exceed the memory."""
    if cfg.device.startswith("cuda"):
        have = torch.cuda.get_device_properties(cfg.device).total_memory
    else:
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    need = 16 * n_params  # bytes, of four float32 numbers for each
    if need > have:
        sizes = f"{need / 2**30:,.0f} GiB, {cfg.device} has {have / 2**30:,.0f}"
        raise UserError(f"--n_embd {cfg.n_embd}: needs {sizes}; choose a smaller model")


def mixed_precision(cfg):
    """In this context, multiply matrices in cfg.dtype. Parameters stay in float32."""
    kind = torch.device(cfg.device).type
    return torch.autocast(kind, torch.bfloat16, enabled=cfg.dtype == "bfloat16")


def matmul_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a linear layer would compute with x."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def is_hopper(x: torch.Tensor) -> bool:
    """Is x on an H100, an H200 or another GPU of their generation?"""
    return x.is_cuda and torch.cuda.get_device_properties(x.device).major == 9


def to_device(array: np.ndarray, device: str) -> torch.Tensor:
    """Copy to the device, and to a GPU without waiting for it."""
    tensor = torch.from_numpy(array)
    if device.startswith("cuda"):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


PEAK_FLOPS = {  # name of a GPU -> bfloat16 FLOP/s without sparsity, from its datasheet
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
}


# -- Processes, which torchrun starts, and stops if one of them fails --------------------


def join(device: str) -> None:
    """Meet the other processes, if torchrun started us. Raises UserError if we cannot."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return
    backend = "gloo"
    if pick_device(device).startswith("cuda"):
        gpu = os.environ.get("LOCAL_RANK", 0)  # number of this process on this machine
        torch.cuda.set_device(pick_device(f"cuda:{gpu}"))
        backend = "cpu:gloo,cuda:nccl"
    try:
        if int(os.environ.get("RANK", 0)) >= int(os.environ["WORLD_SIZE"]):
            raise ValueError("RANK must be below WORLD_SIZE")  # it would wait for ever
        dist.init_process_group(backend)
    except (ValueError, dist.DistError) as error:  # half an environment of torchrun
        reason = str(error).splitlines()[0]
        raise UserError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: cannot meet the other processes "
            f"({reason}); start them with torchrun, or unset WORLD_SIZE"
        ) from None
    any_process(False)  # if rank 0 left before all have met, some would wait forever


def rank_and_world() -> tuple[int, int]:
    """Rank of this process and number of processes; (0, 1) without torchrun."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def all_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all processes, in place. All of them must call this together."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def any_process(flag: bool) -> bool:
    """Is the flag set in any process? All of them must call this together."""
    return bool(all_sum(torch.tensor(int(flag))))


def share(run, parts: list, title: str) -> list:
    """Return [run(part), ...] for all parts. Part i is the work of process i % world."""
    rank, world = rank_and_world()
    mine = []
    for part in tqdm(parts[rank::world], title, leave=False, disable=None):
        mine.append(run(part))
    if world == 1:
        return mine
    results_of = [None] * world
    dist.all_gather_object(results_of, mine)
    return [results_of[i % world][i // world] for i in range(len(parts))]


@contextlib.contextmanager
def rank_0_first():
    """Run the body on rank 0, which may have a corpus to prepare, and then on the other ranks."""
    rank, _ = rank_and_world()
    if rank > 0:
        try:
            any_process(False)  # waits for rank 0
        except RuntimeError:
            leave(2)  # rank 0 failed and printed the reason
    yield
    if rank == 0:
        any_process(False)


# What gloo and NCCL say if another process has ended. Their other errors are bugs.
LOST_CONNECTION = (
    "Connection (closed|reset) by peer|Broken pipe|timeout caused pair closure|"
    "Timed out waiting|remote process exited"
)


def reason_of(error: Exception) -> str | None:
    """Explain a failure of training that is not a bug. Returns None for a bug."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        return "out of memory; try a smaller --micro_batch_size or --recompute"
    if isinstance(error, OSError):  # such as a full disk
        return plain(error)
    if re.search(r"No working C\+\+ compiler|Failed to find C compiler", text):
        return "--compile: no working C++ compiler; install one, or use --no-compile"
    if dist.is_initialized() and re.search(LOST_CONNECTION, text):
        return "lost the other processes; one of them failed"
    return None


def leave(status: int) -> None:
    """Exit. With other processes at once, because an orderly exit would wait for them."""
    if dist.is_initialized():
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
