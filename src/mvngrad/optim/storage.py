"""Between the state as it is kept (float32, bfloat16 or 8-bit blocks) and the floats that the rule computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mvngrad.optim import blocks
from mvngrad.optim.gather import local
from mvngrad.optim.rounding import Noise, to_bfloat16
from mvngrad.optim.state import real

SQUARES = "vs"
NAMES = frozenset(slot + kind for slot in "msuv" for kind in ("", "_scale"))
"""Of all that any cell keeps for a parameter beside its step count."""
HALF = 2**15
"""Noise of 16 bits that rounds to the nearest."""


def names(slots: Sequence[str], kind: Any) -> tuple[str, ...]:
    """What is kept for a parameter beside its step count: the slots and, for 8 bits, their scales."""
    return (*slots, *(f"{slot}_scale" for slot in slots)) if kind == "int8" else tuple(slots)


def empty(slots: Sequence[str], param: Tensor, kind: Any) -> dict[str, Tensor]:
    """The state of a parameter before its first step: zeros, lying in memory as the parameter does."""
    if kind != "int8":
        like = param if kind.is_complex else real(param.detach())
        return {slot: torch.zeros_like(like, dtype=kind, memory_format=torch.preserve_format) for slot in slots}
    like = real(local(param).detach())  # a sharded parameter has blocks of its own in every process
    count = -(-like.numel() // blocks.BLOCK)
    kept = {}
    for slot in slots:
        kept[slot] = torch.zeros_like(like, dtype=torch.uint8, memory_format=torch.preserve_format)
        shape, dtype = ((2, count), torch.int32) if slot in SQUARES else ((count,), torch.float32)
        kept[f"{slot}_scale"] = torch.zeros(shape, dtype=dtype, device=param.device)
    return {name: kept[name] for name in names(slots, kind)}


def opened(slots: Sequence[str], kept: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The state as real numbers of a dtype: the kept tensors themselves where that is what they are."""
    if f"{slots[0]}_scale" not in kept:
        return {slot: real(kept[slot]).to(dtype) for slot in slots}
    values = {}
    for slot in slots:
        codes, scale = kept[slot], kept[f"{slot}_scale"][..., None]
        rows = _rows(_row(codes).to(torch.int32))
        value = blocks.squares(rows, *scale) if slot in SQUARES else blocks.signed(rows, scale)
        values[slot] = _laid(value.view(-1)[: codes.numel()], codes).to(dtype)
    return values


def close(kept: Mapping[str, Tensor], new: Mapping[str, Tensor], noise: Noise | None = None) -> None:
    """Keep new values, rounded at random where `noise` is given and to the nearest otherwise."""
    for slot, value in new.items():
        target = real(kept[slot])
        if f"{slot}_scale" in kept:
            bits = _rows(noise[slot]) if noise else HALF
            encode = blocks.to_squares if slot in SQUARES else blocks.to_signed
            codes, *scale = encode(_rows(_row(value).to(torch.float32)), bits)
            target.copy_(_laid(codes.view(-1)[: target.numel()], target))
            kept[f"{slot}_scale"].copy_(torch.cat(scale, -1).mT.squeeze(0))
        else:
            write(target, value, noise[slot] if noise else None)


def write(target: Tensor, value: Tensor, noise: Tensor | None) -> None:
    """Copy a value into a tensor of any float dtype, rounded at random to bfloat16 where `noise` is given."""
    if noise is not None and target.dtype == torch.bfloat16:
        target.copy_(to_bfloat16(value, _laid(noise, value)))
    elif value is not target:
        target.copy_(value)


def _row(tensor: Tensor) -> Tensor:
    """A dense tensor as one row, as it lies in memory."""
    return tensor if tensor.dim() == 1 else tensor.as_strided((tensor.numel(),), (1,))


def _laid(row: Tensor, like: Tensor) -> Tensor:
    """A row as a tensor that lies in memory as a dense one does."""
    if like.dim() == 1:
        return row
    laid = row.as_strided(like.shape, like.stride())
    return laid.clone() if torch.compiler.is_compiling() else laid  # a compiler takes no such view that is written to


def _rows(row: Tensor) -> Tensor:
    """A row cut into blocks, the last filled up with zeros."""
    return torch.nn.functional.pad(row, (0, -row.shape[0] % blocks.BLOCK)).view(-1, blocks.BLOCK)
