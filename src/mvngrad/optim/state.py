"""Where and how the state of a parameter is kept, and who may step it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]

OPTIONS = {"eps_s": 1e-16, "beta_mean": None, "z_clip": None}
"""Hyper-parameters that not every cell has, with their defaults in those that do."""

TRITON = find_spec("triton") is not None
KERNEL_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.complex64}


def state_dtype(param: Tensor) -> torch.dtype:
    """Moments are kept in float32 for 16-bit parameters and in the parameter's own dtype otherwise."""
    return torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype


def step_count(steps: float, param: Tensor, group: Group) -> Tensor:
    """A step count, on the host unless a graph must capture it or a kernel reads it."""
    on_device = group["capturable"] or (fusable(group) and kernel_takes(param))
    wide = torch.get_default_dtype() == torch.float64 and not on_device
    dtype = torch.float64 if wide else torch.float32
    return torch.tensor(float(steps), dtype=dtype, device=param.device if on_device else "cpu")


def fusable(group: Group) -> bool:
    """Whether nothing in the group's options stands against a fused step. A foreach that is set asks for its own."""
    asked = group["fused"] if group["fused"] is not None else group["foreach"] is None
    return bool(asked) and not (group["differentiable"] or torch.compiler.is_compiling())


def kernel_takes(param: Tensor) -> bool:
    return param.is_cuda and param.dtype in KERNEL_DTYPES and TRITON
