"""GELU of a linear layer. Its backward pass also sums the gradient over rows, which is the gradient of the bias.

A compiler makes two passes of that: one writes the gradient, the other reads it again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:  # there is no Triton for this platform
    triton = None

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLOPE, CUBE = math.sqrt(8 / math.pi), 0.044715
ROWS, TILE, COLUMNS, WARPS = 128, 4, 512, 4
"""Rows and columns of a program, rows of one tile, and warps."""


def gelu(layer: nn.Linear, x: Tensor) -> Tensor:
    """`F.gelu(layer(x), approximate="tanh")` up to rounding."""
    fused = triton is not None and torch.compiler.is_compiling() and x.is_cuda and x.dtype in DTYPES
    if not fused or layer.bias is None:
        return F.gelu(layer(x), approximate="tanh")
    activated: Tensor = _Gelu.apply(F.linear(x, layer.weight, layer.bias.detach()), layer.bias)
    return activated


class _Gelu(torch.autograd.Function):
    """x sigmoid(...) equals the tanh form in fewer instructions. `x` includes the bias, given for its gradient only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.dtype = bias.dtype
        return x * torch.sigmoid(SLOPE * x * (1 + CUBE * x * x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        out, sums = gelu_backward(x, grad)
        return out, sums.sum(0).to(ctx.dtype)


if triton is not None:

    @triton.jit
    def _backward_tiles(
        inputs, grads, out, sums, rows, columns,
        SLOPE: tl.constexpr, CUBE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        lanes = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([TILE, COLUMNS], tl.float32)
        for first in range(0, ROWS, TILE):
            row = tl.program_id(0).to(tl.int64) * ROWS + first + tl.arange(0, TILE)
            at, mask = row[:, None] * columns + lanes[None, :], (row < rows)[:, None] & (lanes < columns)[None, :]
            x = tl.load(inputs + at, mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(grads + at, mask=mask, other=0.0).to(tl.float32)
            gate = tl.sigmoid(SLOPE * x * (1 + CUBE * x * x))
            grad *= gate + x * gate * (1 - gate) * SLOPE * (1 + 3 * CUBE * x * x)
            tl.store(out + at, grad.to(out.dtype.element_ty), mask=mask)
            total += grad
        tl.store(sums + tl.program_id(0) * columns + lanes, tl.sum(total, 0), mask=lanes < columns)


@torch.library.custom_op("mvngrad::gelu_backward", mutates_args=[])
def gelu_backward(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient with respect to `x` [..., columns], and partial sums [parts, columns] of it over rows."""
    x, grad = x.contiguous(), grad.contiguous()
    out, sums = _empty(x, grad)
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    with torch.cuda.device_of(x):
        grid = len(sums), triton.cdiv(columns, COLUMNS)
        _backward_tiles[grid](x, grad, out, sums, rows, columns, SLOPE, CUBE, ROWS, TILE, COLUMNS, num_warps=WARPS)
    return out, sums


@gelu_backward.register_fake
def _empty(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    parts = -(-x.numel() // x.shape[-1] // ROWS)
    return x.new_empty(x.shape), torch.empty(parts, x.shape[-1], dtype=torch.float32, device=x.device)
