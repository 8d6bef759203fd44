"""The loss of a language model without the logits of a whole batch in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    from mvngrad_lab.tasks.language.kernels import softmax_kernel as kernel
except ImportError:  # there is no Triton for this platform
    kernel = None  # type: ignore[assignment]


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    """`F.cross_entropy(hidden @ weight.T, targets)` to rounding, with the logits of `rows` rows at a time."""
    if torch.is_grad_enabled():
        loss: Tensor = _CrossEntropy.apply(hidden, weight, targets, rows)  # type: ignore[no-untyped-call]
        return loss
    parts = _parts(hidden, targets, rows)
    return torch.stack([_losses(F.linear(x, weight), y, None)[0] for x, y in parts]).sum() / len(targets)


class _CrossEntropy(torch.autograd.Function):
    """The loss and, while the logits of a part are at hand, its gradient: backward has no logits to compute again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        losses, hidden_grads, weight_grad = [], [], _float(torch.zeros_like(weight))
        for x, y in _parts(hidden, targets, rows):
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


def _parts(hidden: Tensor, targets: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, len(targets), rows):
        yield hidden[first : first + rows], targets[first : first + rows]


def _losses(logits: Tensor, targets: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """The sum of the losses and, with a `scale`, the gradient of that times it; `logits` are not to be used again."""
    if kernel is not None and logits.is_cuda and logits.dtype in kernel.DTYPES:
        losses = kernel.softmax_losses_(logits, targets.contiguous(), scale or 0.0, scale is not None)
        return losses.sum(), logits
    logs = _float(logits).log_softmax(1)
    losses = -logs.gather(1, targets[:, None])
    if scale is None:
        return losses.sum(), logits
    # A comparison and not a scatter: the deterministic form of that is slow, and this one fuses.
    right = targets[:, None] == torch.arange(logits.shape[1], device=logits.device)
    return losses.sum(), ((logs.exp() - right.to(logs.dtype)) * scale).to(logits.dtype)


def _float(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
