"""What a step asks of a tensor: the local part of a sharded one, complex numbers as pairs of floats, its own memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mvngrad.rule import LOG_OF_ZERO


def view_as_real(tensor: Tensor) -> Tensor:
    """Complex coordinates as pairs of real ones, as in torch.optim; a real tensor itself."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor, distributed over processes."""
    return hasattr(tensor, "_local_tensor")


def is_flat_shard(tensor: Tensor) -> bool:
    """Whether the tensor is a parameter of FullyShardedDataParallel (FSDP1), which differs in each process."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def get_local(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, sharing its memory; any other tensor itself."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def trace_local(tensor: Any) -> Tensor:
    """As `get_local`, for torch.compile: it traces the method, and would make a constant of the attribute."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def get_local_like(tensor: Any, param: Any) -> Tensor:
    """The local part of a gradient or state tensor, placed as its parameter is. May communicate.

    Raises a ValueError if one of the two is a DTensor and the other is not.
    """
    if is_sharded(tensor) != is_sharded(param):
        kinds = ["DTensor" if is_sharded(each) else "plain tensor" for each in (param, tensor)]
        raise ValueError(
            f"a {kinds[0]} of {tuple(param.shape)} has a {kinds[1]} as its gradient; both must be DTensors, or neither"
        )
    if is_sharded(param) and tensor.placements != param.placements:
        tensor = tensor.redistribute(param.device_mesh, param.placements)
    part = trace_local(tensor) if torch.compiler.is_compiling() else get_local(tensor)
    ready: Tensor = part.wait() if hasattr(part, "wait") else part  # an asynchronous collective may still run
    return ready


def is_wrapper(tensor: Tensor) -> bool:
    """Whether the tensor is of a subclass that computes in `__torch_dispatch__`: it may have no memory of its own."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def owns_memory(tensor: Tensor) -> bool:
    """Whether a kernel may read the values at `data_ptr()` as they are: not if they are negated or conjugated."""
    return not (is_wrapper(tensor) or tensor.is_neg() or tensor.is_conj())


def log_beta(beta: float, like: Tensor) -> Tensor:
    """log(beta) in the dtype of `like`: torch.compile would make a constant of math.log's argument."""
    return torch.log1p(torch.full_like(like, beta - 1)).clamp(min=LOG_OF_ZERO)


def resolve_bits(tensor: Tensor) -> Tensor:
    """The tensor, copied if it is a view that is only marked as negated or conjugated."""
    return tensor.resolve_conj().resolve_neg()
