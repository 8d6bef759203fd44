"""The loss of a language model without the logits of a whole batch in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:  # there is no Triton for this platform
    triton = None

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK, WARPS = 16384, 16
"""Logits that a program loads at a time, and its warps."""


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    """`F.cross_entropy(hidden @ weight.T, targets)` up to rounding, with the logits of `rows` rows at a time."""
    if torch.is_grad_enabled():
        loss: Tensor = _CrossEntropy.apply(hidden, weight, targets, rows)
        return loss
    parts = _split_rows(hidden, targets, rows)
    return torch.stack([_losses(F.linear(x, weight), y, None)[0] for x, y in parts]).sum() / len(targets)


class _CrossEntropy(torch.autograd.Function):
    """Computes the gradient with the loss, while the logits of a part exist: backward need not compute them again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        losses, hidden_grads, weight_grad = [], [], _float(torch.zeros_like(weight))
        for x, y in _split_rows(hidden, targets, rows):
            loss, grad = _losses(F.linear(x, weight), y, 1 / len(targets))
            losses.append(loss)
            hidden_grads.append((grad @ weight).to(hidden.dtype))
            weight_grad += grad.T @ x
        ctx.save_for_backward(torch.cat(hidden_grads), weight_grad.to(weight.dtype))
        return torch.stack(losses).sum() / len(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grad.to(hidden_grad.dtype), weight_grad * grad.to(weight_grad.dtype), None, None


def _split_rows(hidden: Tensor, targets: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, len(targets), rows):
        yield hidden[first : first + rows], targets[first : first + rows]


def _losses(logits: Tensor, targets: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """The sum of the losses and, with a `scale`, the gradient of `scale` times it. `logits` may be overwritten."""
    if triton is not None and logits.is_cuda and logits.dtype in DTYPES:
        losses = softmax_losses_(logits, targets.contiguous(), scale or 0.0, scale is not None)
        return losses.sum(), logits
    logs = _float(logits).log_softmax(1)
    losses = -logs.gather(1, targets[:, None])
    if scale is None:
        return losses.sum(), logits
    # A comparison instead of a scatter, whose deterministic form is slow; this one fuses.
    is_target = targets[:, None] == torch.arange(logits.shape[1], device=logits.device)
    return losses.sum(), ((logs.exp() - is_target.to(logs.dtype)) * scale).to(logits.dtype)


def _float(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


if triton is not None:

    @triton.jit
    def _row(logits, targets, losses, classes, scale, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
        """One program a row, which it reads twice: the second time from the cache, so that memory sees each logit read
        once and written once. Compiled from the formula, it is read twice and written elsewhere.
        """
        LOG2_E: tl.constexpr = 1.4426950408889634  # the hardware's exponential is to base 2
        row = tl.program_id(0).to(tl.int64)
        at, lanes = logits + row * classes, tl.arange(0, BLOCK)
        target = tl.load(targets + row)
        # Read before the gradient overwrites it. An invalid target gives a loss of NaN instead of a read out of bounds.
        is_class = (target >= 0) & (target < classes)
        target_logit = tl.load(at + target, mask=is_class, other=float("nan")).to(tl.float32)
        top, total = -float("inf"), 0.0
        for first in range(0, classes, BLOCK):
            x = tl.load(at + first + lanes, mask=first + lanes < classes, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp2((top - higher) * LOG2_E) + tl.sum(tl.exp2((x - higher) * LOG2_E), 0)
            top = higher
        tl.store(losses + row, top - target_logit + tl.log(total))
        if GRADIENT:
            factor = tl.log2(scale / total)
            for first in range(0, classes, BLOCK):
                mask = first + lanes < classes
                x = tl.load(at + first + lanes, mask=mask, other=-float("inf")).to(tl.float32)
                grad = tl.exp2(tl.fma(x - top, LOG2_E, factor))
                tl.store(at + first + lanes, grad.to(logits.dtype.element_ty), mask=mask)
            tl.debug_barrier()  # the store at the target comes after that of any other thread
            target_grad = tl.exp2(tl.fma(target_logit - top, LOG2_E, factor)) - scale
            tl.store(at + target, target_grad.to(logits.dtype.element_ty), mask=is_class)


@torch.library.custom_op("mvngrad::softmax_losses_", mutates_args=["logits"])
def softmax_losses_(logits: Tensor, targets: Tensor, scale: float, gradient: bool) -> Tensor:
    """The cross-entropy of each row; with `gradient`, `logits` become the gradient of `scale` > 0 times their sum."""
    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        _row[rows,](logits, targets, losses, classes, scale, gradient, BLOCK, num_warps=WARPS)
    return losses


@softmax_losses_.register_fake
def _(logits: Tensor, targets: Tensor, scale: float, gradient: bool) -> Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)
