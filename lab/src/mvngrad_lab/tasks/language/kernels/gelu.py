"""GELU of a linear layer, with the gradient of its bias from the pass that makes the gradient of its output."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

try:
    from mvngrad_lab.tasks.language.kernels import gelu_kernel as kernel
except ImportError:  # there is no Triton for this platform
    kernel = None  # type: ignore[assignment]


def gelu(layer: nn.Linear, x: Tensor) -> Tensor:
    """`F.gelu(layer(x), approximate="tanh")` to rounding."""
    fused = kernel is not None and torch.compiler.is_compiling() and x.is_cuda and x.dtype in kernel.DTYPES
    if not fused or layer.bias is None:
        return F.gelu(layer(x), approximate="tanh")
    activated: Tensor = _Gelu.apply(F.linear(x, layer.weight, layer.bias.detach()), layer.bias)  # type: ignore[no-untyped-call]
    return activated


class _Gelu(torch.autograd.Function):
    """By the logistic function, the same in fewer instructions. `x` has the bias, which is here for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.dtype = bias.dtype
        return x * torch.sigmoid(kernel.SLOPE * x * (1 + kernel.CUBE * x * x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        out, sums = kernel.gelu_backward(x, grad)
        return out, sums.sum(0).to(ctx.dtype)
