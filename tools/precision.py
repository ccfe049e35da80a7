"""In which dtype to compute, where autocast does not decide it."""

import torch
from torch import Tensor


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a linear layer would compute with x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def cpu_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """dtype, but at least float32 if x is on a CPU, where bfloat16 is slow in two places.

    Attention takes 4 times as long backwards, and every new group size builds a kernel.
    """
    return torch.promote_types(dtype, torch.float32) if x.device.type == "cpu" else dtype
