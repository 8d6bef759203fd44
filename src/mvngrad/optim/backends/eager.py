"""The rule tensor by tensor: in place for training, out of place when a step must be differentiated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mvngrad.optim.formats import ARITHMETIC_DTYPES, copy_rounded, find_format, join_master, load_state, split_master
from mvngrad.optim.inputs import StepInputs
from mvngrad.optim.tensors import log_beta
from mvngrad.rule import Arithmetic, Hyper


class OutOfPlace(Arithmetic):
    """Plain operators on tensors, with the step count as a number or, under graph capture, as a 0-d tensor."""

    def correction(self, beta: float, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return super().correction(beta, t)
        return -torch.expm1(t * log_beta(beta, t))  # 1 - beta**t in float32 would keep 3 digits of 1 - 0.9999


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

    def sqrt_into(self, buffer: Tensor, a: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # dynamo ends the graph at an out= that is not contiguous
            return torch.sqrt(a)
        return torch.sqrt(a, out=buffer)

    def lerp_(self, a: Tensor, b: Tensor, weight: float) -> Tensor:
        return a.lerp_(b, weight)

    def addcmul_(self, a: Tensor, b: Tensor, c: Tensor, value: float) -> Tensor:
        return a.addcmul_(b, c, value=value)

    def addcdiv_(self, a: Tensor, b: Tensor, c: Tensor, value: Any) -> Tensor:
        return a.addcdiv_(b * value, c) if isinstance(value, Tensor) else a.addcdiv_(b, c, value=value)


OUT_OF_PLACE = OutOfPlace(torch.sqrt, torch.maximum)
IN_PLACE = InPlace(torch.sqrt, torch.maximum)


def step(inputs: StepInputs, hyper: Hyper) -> None:
    """One step on each parameter: parameters, state and step counts change, gradients do not.

    16-bit parameters are computed in float32 and rounded once, at the end. Narrow state is rounded at random, and so
    are bfloat16 parameters or 24-bit masters, if `inputs.rounding` says so. With `capturable`, or step counts on a
    device, no value is read back from it.
    """
    rule, rounding, differentiable = inputs.rule, inputs.rounding, inputs.differentiable
    ops = OUT_OF_PLACE if differentiable else IN_PLACE
    for i, (param, grad, count) in enumerate(zip(inputs.params, inputs.grads, inputs.steps, strict=True)):
        dtype = ARITHMETIC_DTYPES.get(param.dtype, param.dtype)
        stored = {name: tensors[i] for name, tensors in inputs.state.items()}
        first_state = stored[rule.state_names[0]]
        narrow = first_state.dtype != dtype
        old = load_state(rule.state_names, stored, dtype) if narrow else stored
        x, g = param, grad
        if differentiable:  # autograd saves these tensors, and the originals are overwritten below
            x, old = x.clone(), {name: value.clone() for name, value in old.items()}
        low = stored.get("low")
        if low is not None:
            x = join_master(x, low)
        elif x.dtype != dtype:
            x = x.to(dtype)
        if g.dtype != dtype:
            g = g.to(dtype)
        count += 1
        t = count.to(dtype) if inputs.capturable or count.is_cuda else count.item()
        x, new = rule.update(x, g, old, t, hyper, ops)
        noise = rounding.make_noise(inputs.indices[i], t, param, first_state) if narrow or rounding.params else None
        if narrow or differentiable:
            find_format(rule.state_names, stored).store(stored, new, noise)
        if low is not None:
            split_master(x, param, low, noise["x"] if noise else None)
        elif differentiable or x.dtype != param.dtype:
            copy_rounded(param, x, noise["x"] if noise and rounding.params else None)
