"""The rule on lists of tensors, one kernel an operation for all of them: the same lines, over `torch._foreach_*`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mvngrad.optim import storage
from mvngrad.optim.eager import log
from mvngrad.optim.rounding import DEFAULT, Rounding
from mvngrad.optim.state import State, arithmetic_dtype, real
from mvngrad.rule import Arithmetic, Hyper, Rule

BATCH = 2**25
"""Parameters stepped at once: enough to fill a device, so that temporaries need not be as large as the model."""


class Tensors:
    """Tensors that compute as one: what the rule writes with operators. (torch.compile traces no subclass of list.)"""

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

    def __init__(self) -> None:
        super().__init__(lambda a: Tensors(torch._foreach_sqrt(a.items)), _maximum_)

    def correction(self, beta: float, t: Any) -> Any:
        if not isinstance(t, Tensors):
            return super().correction(beta, t)
        c = torch._foreach_mul(t.items, log(beta, t.items[0]))
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
        torch._foreach_div_(a.items, _each(b, a))
        return a

    def sqrt_(self, spare: Tensors | None, a: Tensors) -> Tensors:
        if spare is not None:
            spare.items.clear()  # room for the root, which is as large
        root: Tensors = self.sqrt(a)
        return root

    def lerp_(self, a: Tensors, b: Tensors, weight: float) -> Tensors:
        torch._foreach_lerp_(a.items, b.items, weight)
        return a

    def addcmul_(self, a: Tensors, b: Tensors, c: Tensors, value: float) -> Tensors:
        torch._foreach_addcmul_(a.items, b.items, c.items, value)
        return a

    def addcdiv_(self, a: Tensors, b: Tensors, c: Tensors, value: Any) -> Tensors:
        if isinstance(value, (int, float)):
            torch._foreach_addcdiv_(a.items, b.items, c.items, _each(value, a))
        else:
            torch._foreach_addcdiv_(a.items, torch._foreach_mul(b.items, _items(value)), c.items)
        return a


def _maximum_(a: Tensors, b: Tensors) -> Tensors:
    torch._foreach_maximum_(a.items, b.items)
    return a


def _items(a: Any) -> Any:
    return a.items if isinstance(a, Tensors) else a


def _each(factor: Any, a: Tensors) -> Any:
    """A number once for each tensor, as torch passes it: CUDA's kernels round otherwise for a single number."""
    return [factor] * len(a.items) if isinstance(factor, (int, float)) else _items(factor)


FOREACH = Foreach()


def step(
    rule: Rule,
    hyper: Hyper,
    params: list[Tensor],
    grads: list[Tensor],
    state: State,
    steps: list[Tensor],
    *,
    rounding: Rounding = DEFAULT,
    capturable: bool = False,
) -> None:
    """As `mvngrad.optim.eager.step`, for many parameters of one device, dtype and step count at a time."""
    batches: dict[tuple[Any, ...], list[int]] = {}
    filled: dict[tuple[Any, ...], int] = {}
    for i, (param, count) in enumerate(zip(params, steps, strict=True)):
        age = None if capturable or count.is_cuda else count.item() + 1
        kind = param.device, param.dtype, age
        filled[kind] = filled.get(kind, 0) + param.numel()
        batches.setdefault((*kind, filled[kind] // BATCH), []).append(i)
    for (_, _, age, _), batch in batches.items():
        counts = [steps[i] for i in batch]
        on_device = age is None
        if on_device:
            torch._foreach_add_(counts, 1)
        targets = [real(params[i]) for i in batch]
        dtype = arithmetic_dtype(targets[0])
        kept = [{name: tensors[i] for name, tensors in state.items()} for i in batch]
        each = [storage.opened(rule.state_names, one, dtype) for one in kept]
        old = {slot: Tensors([one[slot] for one in each]) for slot in rule.state_names}
        wide = dtype != targets[0].dtype
        x = Tensors([param.to(dtype) for param in targets] if wide else targets)
        g = Tensors([real(grads[i]).to(dtype) for i in batch])
        t = Tensors([count.to(dtype) for count in counts]) if on_device else age
        x, new = rule.update(x, g, old, t, hyper, FOREACH)
        if each[0][rule.state_names[0]] is not kept[0][rule.state_names[0]] or rounding.params:
            for j, (i, param, one) in enumerate(zip(batch, targets, kept, strict=True)):
                noise = rounding.noise(i, steps[i] if on_device else age, param, one[rule.state_names[0]])
                storage.close(one, {slot: value.items[j] for slot, value in new.items()}, noise)
                storage.write(param, x.items[j], noise["x"] if noise and rounding.params else None)
        elif wide:
            torch._foreach_copy_(targets, x.items)
        if not on_device:  # on the host, while the device is at work
            torch._foreach_add_(counts, torch.tensor(1.0, device="cpu"), alpha=1.0)
