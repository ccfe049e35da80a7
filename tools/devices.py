"""Which device, how many processes, and in which precision."""

import contextlib
import datetime
import os
import re
import sys
import traceback

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm
from torch.nn.attention import SDPBackend, sdpa_kernel


def pick_device(name: str = "auto") -> str:
    """"auto" is cuda where there is one, else mps, else cpu. Raises ValueError for a device that is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(kind for kind in there if there[kind])
    form = re.fullmatch(r"(cpu|mps|cuda)(?::(\d+))?", name)
    if form is None or not there[form[1]] or (form[2] and int(form[2]) >= (torch.cuda.device_count() if form[1] == "cuda" else 1)):
        raise ValueError(f"--device {name}: not on this machine, it has {', '.join(k for k in there if there[k])}")
    return name


def rank_and_world() -> tuple[int, int]:
    """Which of how many processes this is; (0, 1) where there is only one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over all processes of a tensor, in place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def join(device: str) -> None:
    """Meet the other processes, if torchrun started us. Raises ValueError where they do not come."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        return
    on_gpus, local_rank = pick_device(device).startswith("cuda"), int(os.environ.get("LOCAL_RANK", 0))
    if on_gpus and local_rank >= torch.cuda.device_count():
        raise ValueError(f"torchrun: process {local_rank} of this machine has no GPU, there are {torch.cuda.device_count()}")
    if on_gpus:
        torch.cuda.set_device(local_rank)
    try:
        timeout = datetime.timedelta(seconds=60)
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo", store=store, rank=rank, world_size=world)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"cannot meet the other {world - 1} processes that WORLD_SIZE={world} promises: {reason}") from None


def first_error(mistake: str | None) -> str | None:
    """Of all processes. Each asks, in the same places: one that went on alone would wait for ever."""
    _, world = rank_and_world()
    if world == 1:
        return mistake
    mistakes = [None] * world
    dist.all_gather_object(mistakes, mistake)
    return next((f"rank {rank}: {m}" if rank else m for rank, m in enumerate(mistakes) if m), None)


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


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def failed(error: Exception, rank: int) -> int:
    """Say in one line why this process cannot go on. The others notice that it is gone, and end too."""
    if is_out_of_memory(error):
        reason = "out of memory; a smaller --micro_batch_size or --recompute needs less, --dry_run says how much"
    elif isinstance(error, RuntimeError) and re.search("gloo|nccl|Connection", str(error), re.IGNORECASE):
        reason = "lost the other processes, one of them has failed"
    else:
        traceback.print_exception(error)
        reason = f"{type(error).__name__}: {error}"
    print(f"train.py: rank {rank}: {reason}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        os._exit(2)  # an orderly exit would wait for the others
    return 2


def any_process(flag: bool) -> bool:
    return bool(total(torch.tensor(int(flag))))


PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # bf16, dense, datasheets


@contextlib.contextmanager
def mixed_precision(cfg):
    """Matrix products in bfloat16 where the run asks for it; parameters stay in float32.

    On Hopper GPUs cuDNN's attention comes first: 1.7 to 2.3 times as fast there as the default, by
    others' reports, and slower elsewhere.
    """
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    hopper = cfg.device.startswith("cuda") and torch.cuda.get_device_capability(cfg.device) == (9, 0)
    with torch.autocast(cfg.device.split(":")[0], torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
        with sdpa_kernel(order, set_priority=True) if hopper else contextlib.nullcontext():
            yield


def to_device(array: np.ndarray, device: str) -> torch.Tensor:
    """Copy to the device; from pinned memory to a GPU, so that the program need not wait for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.startswith("cuda") else tensor.to(device)


def peak_flops(cfg) -> float | None:
    """The GPU's bf16 peak by its datasheet, None where we do not know it."""
    if not cfg.device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(cfg.device)
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)
