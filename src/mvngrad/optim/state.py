"""Where and how the state of a parameter is kept, and who may step it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]

State = Mapping[str, Sequence[Tensor]]
"""For each name under which state is kept, one tensor a parameter."""

OPTIONS = {"eps_s": 1e-16, "beta_mean": None, "lean": False, "z_clip": None}
"""Arguments that not every cell has, with their defaults in those that do."""

TRITON = find_spec("triton") is not None
KERNEL_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.complex64}


KINDS = (None, torch.float32, torch.bfloat16, "int8")
"""What `state_dtype` may be."""
NAMED = {"float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
"""By which names, too."""


def asked_kind(given: Any) -> Any:
    """A `state_dtype` that may be named, as groups have it."""
    return NAMED.get(given, given) if isinstance(given, str) else given


def no_kind(given: Any) -> str:
    """What to say of a `state_dtype` that is none."""
    return f"state_dtype={given!r} is invalid; it must be one of {', '.join(map(repr, (*KINDS, *NAMED)))}"


def arithmetic_dtype(param: Tensor) -> torch.dtype:
    """The dtype a step computes in: the parameter's, but float32 for 16-bit parameters."""
    return torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype


def state_kind(param: Tensor, group: Group) -> torch.dtype | str:
    """How the state of a parameter is kept; where nothing is asked, in the dtype of the arithmetic."""
    kind: torch.dtype | str | None = group["state_dtype"]
    return arithmetic_dtype(param) if kind is None else kind


def is_kind(kind: Any, dtype: torch.dtype) -> bool:
    """Whether state of a dtype is what a `state_dtype` asks for; None asks for that of any arithmetic."""
    if kind is None:
        return dtype.itemsize > 2
    return dtype == (torch.uint8 if kind == "int8" else kind)


def real(tensor: Tensor) -> Tensor:
    """Complex coordinates as pairs of real ones, as torch.optim has them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


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
