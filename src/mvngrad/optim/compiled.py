"""The rule itself under torch.compile: the CPU's fused path, which reads and writes every tensor once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mvngrad.optim import eager
from mvngrad.optim.eager import OutOfPlace, State, real
from mvngrad.rule import Hyper, Rule

LARGE = 2**20
NUMBERS = ("lr", "beta1", "beta2", "eps", "eps_s", "weight_decay", "beta_mean", "z_clip")


class Corrected(OutOfPlace):
    """Out of place, with the two bias corrections computed before and given as `t`."""

    def corrections(self, hyper: Hyper, t: Any) -> tuple[Any, Any]:
        return t[0], t[1]


CORRECTED = Corrected()


@cache
def compiled(
    rule: Rule, given: tuple[str, ...], decoupled: bool, maximize: bool, dtypes: tuple[torch.dtype, ...]
) -> Callable[..., None]:
    """`rule.update` for flat tensors of any size, with the `given` numbers as an input: one compilation serves all."""

    def update(param: Tensor, grad: Tensor, slots: list[Tensor], numbers: Tensor) -> None:
        c_m, c_v, *values = numbers.unbind()
        there: dict[str, Any] = dict(zip(given, values, strict=True))
        hyper = Hyper(lr=0.0, beta1=0.0, beta2=0.0, eps=0.0, decoupled=decoupled, maximize=maximize)._replace(**there)
        old = dict(zip(rule.slots, slots, strict=True))
        dtype = slots[0].dtype
        x, new = rule.update(param.to(dtype), grad.to(dtype), old, (c_m, c_v), hyper, CORRECTED)
        param.copy_(x)
        for slot, value in new.items():
            old[slot].copy_(value)

    update.__code__ = update.__code__.replace()  # recompilations are counted, and limited, for each code object
    compiled_update = torch.compile(update, dynamic=True, fullgraph=True)
    # The first size the compiler sees decides whether its loop runs on one thread or on all, for every size.
    param, grad, *slots = (torch.ones(LARGE, dtype=dtype) for dtype in dtypes)
    try:
        compiled_update(param, grad, slots, torch.ones(2 + len(given), dtype=torch.float64))
    except Exception as error:  # the compiler's own classes are slow to import
        if "InvalidCxxCompiler" not in str(error):
            raise
        remedy = "install g++ or clang++ (or name one in CXX), or use fused=False"
        raise RuntimeError(f"fused=True on the CPU needs a C++ compiler: {remedy}") from error
    return compiled_update


def step(
    rule: Rule,
    hyper: Hyper,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: State,
    steps: Sequence[Tensor],
) -> None:
    """As `mvngrad.optim.eager.step`, compiled; what no flat walk over memory reaches is left to that."""
    values = hyper._asdict()
    given = tuple(name for name in NUMBERS if values[name])
    numbers: dict[float, Tensor] = {}
    for i, (param, grad, count) in enumerate(zip(params, grads, steps, strict=True)):
        slots = [tensors[i] for tensors in state.values()]
        walk = [row for tensor in (param, grad, *slots) if (row := _flat(tensor, param)) is not None]
        if param.numel() < 2 or len(walk) < 2 + len(slots):  # the compiler sets sizes 0 and 1 apart
            one = {slot: [tensor] for slot, tensor in zip(rule.slots, slots, strict=True)}
            eager.step(rule, hyper, [param], [grad], one, [count])
            continue
        count += 1
        t = count.item()
        if t not in numbers:
            corrections = [1 - hyper.beta1**t, 1 - hyper.beta2**t]
            numbers[t] = torch.tensor([*corrections, *(values[name] for name in given)], dtype=torch.float64)
        dtypes = tuple(tensor.dtype for tensor in walk)
        compiled(rule, given, hyper.decoupled, hyper.maximize, dtypes)(walk[0], walk[1], walk[2:], numbers[t])
        torch.autograd.graph.increment_version(param)


def _flat(tensor: Tensor, param: Tensor) -> Tensor | None:
    """The tensor as one row, in the order in which the parameter lies in memory; None where there is no such row."""
    if tensor.stride() != param.stride() or not _dense(tensor):
        return None
    tensor = real(tensor.detach())
    # Not a view: the compiler would look at what it is a view of, and compile again for each number of dimensions.
    row = torch.empty(0, dtype=tensor.dtype)
    return row.set_(tensor.untyped_storage(), tensor.storage_offset(), (tensor.numel(),), (1,))


def _dense(tensor: Tensor) -> bool:
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.is_contiguous() or tensor.permute(order).is_contiguous()
