"""The rule on lists of tensors, over `torch._foreach_*`: one kernel for each operation on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mvngrad.optim.formats import arithmetic_dtype, copy_rounded, find_format, load_state
from mvngrad.optim.inputs import StepInputs
from mvngrad.optim.tensors import log_beta
from mvngrad.rule import Arithmetic, Hyper

MAX_COORDINATES = 2**25
"""The most coordinates that are stepped at once: enough to fill a device."""


class Tensors:
    """A list of tensors with the operators that the rule uses. (torch.compile traces no subclass of list.)"""

    def __init__(self, items: Sequence[Tensor]) -> None:
        self.items = items if isinstance(items, list) else list(items)

    def __neg__(self) -> Tensors:
        return Tensors(torch._foreach_neg(self.items))

    def __abs__(self) -> Tensors:
        return Tensors(torch._foreach_abs(self.items))

    def __sub__(self, other: Any) -> Tensors:
        return Tensors(torch._foreach_sub(self.items, _items(other)))

    def __add__(self, number: float) -> Tensors:
        return Tensors(torch._foreach_add(self.items, number))

    def __mul__(self, other: Any) -> Tensors:
        return Tensors(torch._foreach_mul(self.items, _items(other)))

    __rmul__ = __mul__

    def __truediv__(self, number: float) -> Tensors:
        return Tensors(torch._foreach_div(self.items, number))

    def __rtruediv__(self, number: Any) -> Tensors:
        return Tensors(torch._foreach_mul(torch._foreach_reciprocal(self.items), number))

    def __pow__(self, exponent: float) -> Tensors:
        return Tensors(torch._foreach_pow(self.items, exponent))


class Foreach(Arithmetic):
    """The operations of torch.optim.Adam's foreach path. Factors are numbers or, when capturable, `Tensors` of 0-d."""

    def correction(self, beta: float, t: Any) -> Any:
        if not isinstance(t, Tensors):
            return super().correction(beta, t)
        c = torch._foreach_mul(t.items, log_beta(beta, t.items[0]))
        torch._foreach_expm1_(c)
        torch._foreach_neg_(c)
        return Tensors(c)

    def add(self, a: Tensors, b: Tensors, alpha: float = 1) -> Tensors:
        return Tensors(torch._foreach_add(a.items, b.items, alpha=alpha))

    def add_(self, a: Tensors, b: Any, alpha: Any = 1) -> Tensors:
        if not isinstance(alpha, (int, float)):
            torch._foreach_add_(a.items, torch._foreach_mul(b.items, _items(alpha)))
        elif isinstance(b, Tensors):
            torch._foreach_add_(a.items, b.items, alpha=alpha)
        else:
            torch._foreach_add_(a.items, b)
        return a

    def mul_(self, a: Tensors, b: Any) -> Tensors:
        torch._foreach_mul_(a.items, _items(b))
        return a

    def div_(self, a: Tensors, b: Any) -> Tensors:
        torch._foreach_div_(a.items, _repeat_number(b, a))
        return a

    def sqrt_into(self, buffer: Tensors, a: Tensors) -> Tensors:
        buffer.items.clear()  # there is no out= for lists: free the temporary before allocating another
        return _sqrt(a)

    def lerp_(self, a: Tensors, b: Tensors, weight: float) -> Tensors:
        torch._foreach_lerp_(a.items, b.items, weight)
        return a

    def addcmul_(self, a: Tensors, b: Tensors, c: Tensors, value: float) -> Tensors:
        torch._foreach_addcmul_(a.items, b.items, c.items, value)
        return a

    def addcdiv_(self, a: Tensors, b: Tensors, c: Tensors, value: Any) -> Tensors:
        if isinstance(value, (int, float)):
            torch._foreach_addcdiv_(a.items, b.items, c.items, _repeat_number(value, a))
        else:  # as torch: the divisor takes the factor, because a product would need memory
            torch._foreach_div_(c.items, _items(value))
            torch._foreach_addcdiv_(a.items, b.items, c.items)
        c.items.clear()
        return a


def _sqrt(a: Tensors) -> Tensors:
    return Tensors(torch._foreach_sqrt(a.items))


def _maximum_(a: Tensors, b: Tensors) -> Tensors:
    torch._foreach_maximum_(a.items, b.items)
    return a


def _items(a: Any) -> Any:
    return a.items if isinstance(a, Tensors) else a


def _repeat_number(factor: Any, a: Tensors) -> Any:
    """A number once for each tensor, as torch passes it: for a single number, CUDA's kernels round differently."""
    return [factor] * len(a.items) if isinstance(factor, (int, float)) else _items(factor)


FOREACH = Foreach(_sqrt, _maximum_)


def get_max_coordinates(inputs: StepInputs, hyper: Hyper) -> int:
    """The most coordinates to step at once: temporaries of full width stay within one model, as in torch's Adam."""
    own_gradients = hyper.maximize or (hyper.weight_decay != 0 and not hyper.decoupled)
    temporaries = 1 + own_gradients + inputs.rule.lean + (hyper.z_clip is not None)
    return min(MAX_COORDINATES, -(-sum(param.numel() for param in inputs.params) // temporaries) or 1)


def make_selections(inputs: StepInputs, hyper: Hyper) -> list[tuple[float | None, list[int]]]:
    """Lists of indices of parameters to step at once, each with the step count after the step; None on the device.

    The parameters of a list have one device, dtype, dtype of state and step count.
    """
    first_state = inputs.state[inputs.rule.state_names[0]]
    limit = get_max_coordinates(inputs, hyper)
    selections: list[tuple[float | None, list[int]]] = []
    last: dict[tuple[Any, ...], tuple[list[int], int]] = {}  # by key, the last one and its coordinates
    for i, (param, count) in enumerate(zip(inputs.params, inputs.steps, strict=True)):
        host_step = None if inputs.capturable or count.is_cuda else count.item() + 1
        key = param.device, param.dtype, first_state[i].dtype, host_step
        selection, size = last.get(key, ([], 0))
        if not selection or size + param.numel() > limit:
            selection, size = [], 0
            selections.append((host_step, selection))
        selection.append(i)
        last[key] = selection, size + param.numel()
    return selections


def step(inputs: StepInputs, hyper: Hyper) -> None:
    """As the eager step, for many parameters of one device, dtype, dtype of state and step count at a time."""
    for host_step, selection in make_selections(inputs, hyper):
        step_selection(inputs, hyper, selection, host_step)


def step_selection(inputs: StepInputs, hyper: Hyper, selection: list[int], host_step: float | None) -> None:
    """Step the parameters at the indices `selection`; `host_step` is their count after the step, None on the device."""
    rule, rounding = inputs.rule, inputs.rounding
    counts = [inputs.steps[i] for i in selection]
    on_device = host_step is None
    if on_device:
        torch._foreach_add_(counts, 1)
    params = [inputs.params[i] for i in selection]
    dtype = arithmetic_dtype(params[0])
    stored = [{name: tensors[i] for name, tensors in inputs.state.items()} for i in selection]
    narrow = stored[0][rule.state_names[0]].dtype != dtype
    loaded = [load_state(rule.state_names, each, dtype) for each in stored] if narrow else stored
    old = {name: Tensors([each[name] for each in loaded]) for name in rule.state_names}
    converted = dtype != params[0].dtype
    x = Tensors([param.to(dtype) for param in params] if converted else params)
    g = Tensors([inputs.grads[i].to(dtype) for i in selection])
    t = Tensors([count.to(dtype) for count in counts]) if on_device else host_step
    x, new = rule.update(x, g, old, t, hyper, FOREACH)
    if narrow or rounding.params:
        for j, i in enumerate(selection):
            param, state, count = params[j], stored[j], counts[j] if on_device else host_step
            noise = rounding.make_noise(inputs.indices[i], count, param, state[rule.state_names[0]])
            values = {name: value.items[j] for name, value in new.items()}
            find_format(rule.state_names, state).store(state, values, noise)
            copy_rounded(param, x.items[j], noise["x"] if noise and rounding.params else None)
    elif converted:
        torch._foreach_copy_(params, x.items)
    if not on_device:  # last, on the host, while the device computes; a number 1 would become a tensor for each count
        torch._foreach_add_(counts, torch.tensor(1.0, device="cpu"), alpha=1.0)
