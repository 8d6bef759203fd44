"""The rule tensor by tensor: in place for training, out of place when a step must be differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mvngrad.optim import storage
from mvngrad.optim.rounding import DEFAULT, Rounding
from mvngrad.optim.state import State, arithmetic_dtype, real
from mvngrad.rule import Arithmetic, Hyper, Rule


class OutOfPlace(Arithmetic):
    """Plain operators on tensors, with the step count as a number or, under graph capture, as a 0-d tensor."""

    def __init__(self) -> None:
        super().__init__(torch.sqrt, torch.maximum)

    def correction(self, beta: float, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return super().correction(beta, t)
        return -torch.expm1(t * log(beta, t))  # 1 - beta**t in float32 would keep 3 digits of 1 - 0.9999


class InPlace(OutOfPlace):
    """The operations of torch.optim.Adam's own per-tensor path, so that our Adam is equal to it bit for bit."""

    def add(self, a: Tensor, b: Tensor, alpha: float = 1) -> Tensor:
        return a.add(b, alpha=alpha)

    def add_(self, a: Tensor, b: Any, alpha: Any = 1) -> Tensor:
        return a.add_(b * alpha) if isinstance(alpha, Tensor) else a.add_(b, alpha=alpha)

    def mul_(self, a: Tensor, b: Any) -> Tensor:
        return a.mul_(b)

    def div_(self, a: Tensor, b: Any) -> Tensor:
        return a.div_(b)

    def sqrt_(self, spare: Tensor | None, a: Tensor) -> Tensor:
        return torch.sqrt(a, out=spare)

    def lerp_(self, a: Tensor, b: Tensor, weight: float) -> Tensor:
        return a.lerp_(b, weight)

    def addcmul_(self, a: Tensor, b: Tensor, c: Tensor, value: float) -> Tensor:
        return a.addcmul_(b, c, value=value)

    def addcdiv_(self, a: Tensor, b: Tensor, c: Tensor, value: Any) -> Tensor:
        return a.addcdiv_(b * value, c) if isinstance(value, Tensor) else a.addcdiv_(b, c, value=value)


OUT_OF_PLACE = OutOfPlace()
IN_PLACE = InPlace()
LOG_OF_ZERO = -1e30
"""Close enough, and its product with 0 steps is 0."""


def step(
    rule: Rule,
    hyper: Hyper,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: State,
    steps: Sequence[Tensor],
    *,
    rounding: Rounding = DEFAULT,
    first: int = 0,
    capturable: bool = False,
    differentiable: bool = False,
) -> None:
    """One step of `rule` on each parameter: `params`, `state` and `steps` change, `grads` do not.

    A step for 16-bit parameters computes in float32 and rounds them once, at the end. State in fewer bits is rounded at
    random, and so are parameters where `rounding` says so; `first` is the place of params[0] in the group. With
    `capturable`, or counts on a device, no value is read back from it.
    """
    ops = OUT_OF_PLACE if differentiable else IN_PLACE
    for i, param in enumerate(params):
        count, x, g = steps[i], real(param), real(grads[i])
        dtype = arithmetic_dtype(x)
        kept = {name: tensors[i] for name, tensors in state.items()}
        old = storage.opened(rule.state_names, kept, dtype)
        if differentiable:  # autograd keeps what it saw, and parameter and state are about to be overwritten
            x, old = x.clone(), {slot: value.clone() for slot, value in old.items()}
        if x.dtype != dtype:
            x = x.to(dtype)
        if g.dtype != dtype:
            g = g.to(dtype)
        count += 1
        t = count.to(dtype) if capturable or count.is_cuda else count.item()
        x, new = rule.update(x, g, old, t, hyper, ops)
        noise = rounding.noise(first + i, t, param, kept[rule.state_names[0]])
        storage.close(kept, new, noise)
        if differentiable or param.dtype != x.dtype:
            storage.write(real(param), x, noise["x"] if noise and rounding.params else None)


def log(beta: float, like: Tensor) -> Tensor:
    """log(beta) as a 0-d tensor: torch.compile would make a constant of math.log's argument."""
    return torch.log1p(torch.full_like(like, beta - 1)).clamp(min=LOG_OF_ZERO)
