"""The rule itself, compiled: the CPU's fused path, which reads and writes every tensor once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mvngrad.optim import eager, storage
from mvngrad.optim.eager import OutOfPlace
from mvngrad.optim.rounding import DEFAULT, Noise, Rounding
from mvngrad.optim.state import State, arithmetic_dtype, real
from mvngrad.rule import Hyper, Rule

LARGE = 2**20
NUMBERS = ("lr", "beta1", "beta2", "eps", "eps_s", "weight_decay", "beta_mean", "z_clip")


class Corrected(OutOfPlace):
    """Out of place, with the bias corrections computed before and given as `t`."""

    def corrections(self, hyper: Hyper, t: Any) -> tuple[Any, Any]:
        return t[0], t[1]

    def previous_correction(self, hyper: Hyper, t: Any) -> Any:
        return t[2]


CORRECTED = Corrected()
NO_KEY = torch.zeros((), dtype=torch.int32, device="cpu")


@cache
def compiled(
    rule: Rule,
    given: tuple[str, ...],
    decoupled: bool,
    maximize: bool,
    rounding: tuple[bool, bool],
    names: tuple[str, ...],
    dtypes: tuple[torch.dtype, ...],
) -> Callable[..., Any]:
    """`rule.update` for rows of any size, with the `given` numbers as an input: one compilation serves all.

    `rounding` is whether state, and whether parameters are rounded at random.
    """
    fixed = Hyper(lr=0.0, beta1=0.0, beta2=0.0, eps=0.0, decoupled=decoupled, maximize=maximize)

    def update(numbers: Tensor, key: Tensor, param: Tensor, grad: Tensor, *rows: Tensor) -> tuple[()]:
        values = numbers.unbind()
        hyper = fixed._replace(**dict(zip(given, values[3:], strict=True)))  # type: ignore[arg-type]
        kept = dict(zip(names, rows, strict=True))
        dtype = arithmetic_dtype(param)
        old = storage.opened(rule.state_names, kept, dtype)
        x, new = rule.update(param.to(dtype), grad.to(dtype), old, values[:3], hyper, CORRECTED)
        noise = Noise(key, param.numel(), param.device) if any(rounding) else None
        storage.close(kept, new, noise if rounding[0] else None)
        storage.write(param, x, noise["x"] if noise and rounding[1] else None)
        return ()

    from torch._inductor import standalone_compile
    from torch.fx.experimental.proxy_tensor import make_fx

    # Not torch.compile: its checks at every call take longer than the step of a small tensor. The first size that the
    # compiler sees decides whether its loop runs on one thread or on all, for every size.
    param, grad, *slots = (
        torch.ones(LARGE, dtype=dtype, device="cpu") for dtype in dtypes[: 2 + len(rule.state_names)]
    )
    scales = [storage.empty([slot], param, "int8")[f"{slot}_scale"] for slot in rule.state_names][
        : len(names) - len(slots)
    ]
    numbers = torch.ones(3 + len(given), dtype=torch.float64, device="cpu")
    key = torch.ones((), dtype=torch.int32, device="cpu")
    example: list[Any] = [numbers, key, param, grad, *slots, *scales]
    try:
        return standalone_compile(
            make_fx(update, tracing_mode="symbolic")(*example), example, dynamic_shapes="from_graph"
        )
    except Exception as error:  # the compiler's own classes are slow to import
        if "InvalidCxxCompiler" not in str(error):
            raise
        remedy = "install g++ or clang++ (or name one in CXX), or use fused=False"
        raise RuntimeError(f"fused=True on the CPU needs a C++ compiler: {remedy}") from error


Rows = dict[int, tuple[list[int], list[Tensor]]]
"""By the place of a parameter: where it and its state lay in memory, and the rows that were made of them."""


def step(
    rule: Rule,
    hyper: Hyper,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: State,
    steps: Sequence[Tensor],
    *,
    rounding: Rounding = DEFAULT,
    rows: Rows | None = None,
) -> None:
    """As `mvngrad.optim.eager.step`, compiled; what no flat walk over memory reaches is left to that.

    `rows` are kept by the caller from step to step.
    """
    rows = {} if rows is None else rows
    values = hyper._asdict()
    given = tuple(name for name in NUMBERS if values[name] or name == "lr")  # which a warm-up begins at 0
    numbers: dict[float, Tensor] = {}
    names, slots = tuple(state), len(rule.state_names)
    for i, (param, grad, count) in enumerate(zip(params, grads, steps, strict=True)):
        kept = [tensors[i] for tensors in state.values()]
        own = [param, *kept[:slots]]
        lie = list(map(Tensor.data_ptr, own))
        if i not in rows or rows[i][0] != lie:
            rows[i] = lie, [row for tensor in own if (row := _row(tensor, kept[0])) is not None]
        g = _row(grad, kept[0])
        if param.numel() < 2 or g is None or len(rows[i][1]) < 1 + slots:  # the compiler sets sizes 0 and 1 apart
            one = {name: [tensor] for name, tensor in zip(names, kept, strict=True)}
            eager.step(rule, hyper, [param], [grad], one, [count], rounding=rounding, first=i)
            continue
        count += 1
        t = count.item()
        if t not in numbers:
            corrections = [1 - hyper.beta1**t, 1 - hyper.beta2**t, 1 - hyper.beta2 ** (t - 1)]
            all_numbers = [*corrections, *(values[name] for name in given)]
            numbers[t] = torch.tensor(all_numbers, dtype=torch.float64, device="cpu")
        x, *slot_rows = rows[i][1]
        rounded = kept[0].itemsize < 4, rounding.params and param.dtype == torch.bfloat16
        dtypes = x.dtype, g.dtype, *(row.dtype for row in slot_rows)
        run = compiled(rule, given, hyper.decoupled, hyper.maximize, rounded, names, dtypes)
        key = rounding.key(i, t) if any(rounded) else NO_KEY
        run(numbers[t], key, x, g, *slot_rows, *kept[slots:])
    torch.autograd.graph.increment_version(params)


def _row(tensor: Tensor, like: Tensor) -> Tensor | None:
    """A dense tensor as one row, as it lies in memory; None where it does not lie there as its state does."""
    tensor, like = real(tensor.detach()), real(like)
    return tensor.as_strided((tensor.numel(),), (1,)) if tensor.stride() == like.stride() else None
