"""The losses of rows of logits and, in their place, their gradient: one Triton program a row, which is read twice.

The second time it should come from the cache, so that memory sees each logit read once and written once. Compiled from
the formula, it is read twice and written elsewhere, in more instructions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK, WARPS = 16384, 16
"""Logits that a program has at a time, and its warps."""


@triton.jit
def _row(logits, targets, losses, classes, scale, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    LOG2_E: tl.constexpr = 1.4426950408889634  # exponentials to base 2, of which the machine's own has fewer steps
    row = tl.program_id(0).to(tl.int64)
    at, lanes = logits + row * classes, tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    # Read first: the gradient will lie here. A target that is no class makes the loss NaN and not a read of anything.
    is_class = (target >= 0) & (target < classes)
    right = tl.load(at + target, mask=is_class, other=float("nan")).to(tl.float32)
    top, total = -float("inf"), 0.0
    for first in range(0, classes, BLOCK):
        x = tl.load(at + first + lanes, mask=first + lanes < classes, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp2((top - higher) * LOG2_E) + tl.sum(tl.exp2((x - higher) * LOG2_E), 0)
        top = higher
    tl.store(losses + row, top - right + tl.log(total))
    if GRADIENT:
        factor = tl.log2(scale / total)
        for first in range(0, classes, BLOCK):
            mask = first + lanes < classes
            x = tl.load(at + first + lanes, mask=mask, other=-float("inf")).to(tl.float32)
            tl.store(
                at + first + lanes, tl.exp2(tl.fma(x - top, LOG2_E, factor)).to(logits.dtype.element_ty), mask=mask
            )
        tl.debug_barrier()  # then what some thread has stored at the target may be stored over
        corrected = tl.exp2(tl.fma(right - top, LOG2_E, factor)) - scale
        tl.store(at + target, corrected.to(logits.dtype.element_ty), mask=is_class)


@torch.library.custom_op("mvngrad::softmax_losses_", mutates_args=["logits"])
def softmax_losses_(logits: Tensor, targets: Tensor, scale: float, gradient: bool) -> Tensor:
    """The cross-entropy of each row; with `gradient`, `logits` become that of `scale` > 0 times their sum."""
    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        _row[rows,](logits, targets, losses, classes, scale, gradient, BLOCK, num_warps=WARPS)
    return losses


@softmax_losses_.register_fake
def _(logits: Tensor, targets: Tensor, scale: float, gradient: bool) -> Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)
