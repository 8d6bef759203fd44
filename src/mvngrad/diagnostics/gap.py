"""The variance gap between the two orders of momentum, at a frozen state of a real training: app:mnist-vgap.

Theorem thm:var_adabelief_mvngrad: given the past, the next update of AdaBelief varies more than that of MVN-Grad.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from mvngrad.diagnostics import reading
from mvngrad.diagnostics.reading import Reading
from mvngrad.diagnostics.welford import Welford
from mvngrad.optim.eager import OUT_OF_PLACE
from mvngrad.optim.gather import local, local_part
from mvngrad.optim.state import real
from mvngrad.rule import ADABELIEF, ADAM, LAPROP, MVNGRAD, Rule

Loss = Callable[[Any], "Tensor | Sequence[Tensor | None]"]


@dataclass(frozen=True)
class ParameterGap:
    """The two variances of one parameter, averaged over its coordinates."""

    name: str
    coordinates: int
    batches: int
    before: float
    after: float

    @property
    def gap(self) -> float:
        return self.before - self.after


@dataclass(frozen=True)
class VarianceGap:
    """Variances of the one-step update over lr, from one frozen state, averaged over all coordinates."""

    cells: tuple[str, str]
    """Momentum then normalize, and normalize then momentum."""
    before: float
    """Of the first: Var(Delta_t^AB | F_{t-1}) where they are AdaBelief and MVN-Grad."""
    after: float
    """Of the second: Var(Delta_t^MV | F_{t-1})."""
    error: float
    """The standard error of the gap, over batches."""
    batches: int
    coordinates: int
    parameters: tuple[ParameterGap, ...]

    @property
    def gap(self) -> float:
        """Delta Var_t: positive where the second order is the steadier one."""
        return self.before - self.after

    @property
    def relative(self) -> float:
        """The gap as a share of the first order's variance: what the second saves, or costs where it is negative."""
        return self.gap / self.before if self.before else 0.0

    def __str__(self) -> str:
        first, second = self.cells
        return (
            f"Var {first} {self.before:.4g}, Var {second} {self.after:.4g}, gap {self.gap:.3g} +- {self.error:.1g} "
            f"({self.relative:+.1%}), over {self.batches} batches and {self.coordinates} coordinates"
        )


class _Frozen:
    """A parameter with the state it had, and the variances of the updates that would follow."""

    def __init__(self, name: str, param: Tensor, kept: dict[str, Any], how: Reading, dtype: torch.dtype) -> None:
        self.name, self.param, self.dtype = name, param, dtype
        self.t = float(kept["step"]) + 1
        self.before_rule, self.after_rule = orders(how.rule)
        hyper = how.hyper
        self.decay = 0.0 if hyper.decoupled else float(hyper.weight_decay)
        self.sign = -1.0 if hyper.maximize else 1.0
        self.hyper = hyper._replace(lr=1.0, weight_decay=0.0, maximize=False)  # a shrinking x has no variance
        state = {slot: reading.whole(kept, name, dtype) for slot, name in how.names.items()}
        if how.rule.lean:
            state["m"] = how.rule.reconstruct_mean(state, self.t, hyper, OUT_OF_PLACE)
        # Any u of the past is a constant here, and 0 is one that AdaBelief's state has too.
        self.state: dict[str, Any] = {"m": state["m"], how.root: state[how.root], "u": 0.0}
        self.before, self.after = Welford(), Welford()

    def add(self, grad: Tensor) -> Tensor:
        """Take a gradient in; returns its part of the gap, summed over coordinates."""
        g = self.sign * real(local_part(grad, self.param)).to(self.dtype)
        if self.decay:
            g = g + self.decay * real(local(self.param)).to(self.dtype)
        parts = []
        for rule, variance in ((self.before_rule, self.before), (self.after_rule, self.after)):
            state = {slot: self.state[slot] for slot in rule.state_names}
            x, _ = rule.update(0.0, g, state, self.t, self.hyper, OUT_OF_PLACE)
            parts.append(variance.add(-x))
        return (parts[0] - parts[1]).sum()

    def result(self) -> ParameterGap:
        before, after = (float(each.variance.mean()) for each in (self.before, self.after))
        return ParameterGap(self.name, self.before.mean.numel(), self.before.count, before, after)


def orders(rule: Rule) -> tuple[Rule, Rule]:
    """The cell with momentum before, and that with momentum after, in a cell's own row of the table."""
    return (ADABELIEF, MVNGRAD) if rule.centered else (ADAM, LAPROP)


def variance_gap(
    optimizer: Optimizer,
    loss: Loss,
    batches: Iterable[Any],
    K: int = 128,
    *,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float64,
) -> VarianceGap:
    r"""The variance of the next update with momentum before and after normalizing, over K mini-batches.

    .. math::
        \Delta\mathrm{Var}_t = \mathrm{Var}(\Delta_t^{AB} \mid F_{t-1}) - \mathrm{Var}(\Delta_t^{MV} \mid F_{t-1})

    The state (x, m, s, t) stands still. For each batch the gradient is computed, and from it both updates by
    `Rule.update`, with bias correction, coupled weight decay and epsilon as the optimizer has them, divided by lr.
    Variances are coordinate-wise, then averaged over coordinates. No gradient is kept: four numbers a coordinate are.
    The standard error of the gap comes from the contrasts of each batch with those before it, which are independent.

    The optimizer is AdaBelief, MVN-Grad or lean MVN-Grad; of an Adam, torch's included, the same is asked of Adam and
    LaProp in its v, to which the theorem does not apply. It, its parameters and their `.grad` are left as they were.
    No random number is drawn. Whatever else `loss` changes is its own: give `model`, and its buffers (the running
    statistics of batch norm) are put back too.

    Args:
        optimizer: one that has taken a step.
        loss: batch -> a scalar loss to differentiate, or the gradients themselves, one for each parameter in the order
            of the groups, None where there is none: for those who must call `backward` on their own (FSDP).
        batches: independent mini-batches, of which at most K are taken, and at least two.
        K: how many; the paper's 128.
        model: whose buffers are put back, and whose names are used.
        dtype: of the arithmetic.

    >>> import torch
    >>> from mvngrad import MVNGrad
    >>> weight = torch.nn.Parameter(torch.zeros(100))
    >>> optimizer = MVNGrad([weight], betas=(0.9, 0.95))
    >>> noise = torch.Generator().manual_seed(0)
    >>> def batch():
    ...     return 1 + torch.randn(100, generator=noise)
    >>> for _ in range(50):
    ...     weight.grad = batch()
    ...     optimizer.step()
    >>> result = variance_gap(optimizer, lambda g: (weight * g).sum(), (batch() for _ in range(64)))
    >>> result.gap > 0
    True
    """
    frozen, place = _freeze(optimizer, model, dtype)
    params = [each.param for each in frozen]
    buffers = [] if model is None else [(buffer, buffer.clone()) for buffer in model.buffers()]
    parts: list[list[Tensor]] = []
    try:
        for batch in islice(batches, K):
            with torch.enable_grad():
                given = loss(batch)
                grads: Sequence[Tensor | None]
                if isinstance(given, Tensor):
                    grads = torch.autograd.grad(given, params, allow_unused=True)
                else:
                    grads = [given[i] for i in place]
            with torch.no_grad():
                given_to = zip(frozen, grads, strict=True)
                parts.append([each.add(grad) for each, grad in given_to if grad is not None])
            del given, grads
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    count = len(parts)
    results = tuple(each.result() for each in frozen if each.before.count > 1 and each.before.mean.numel())
    if not results:
        raise ValueError(f"variance_gap: {count} batches gave no parameter two gradients; a variance needs at least 2")
    total = sum(each.coordinates for each in results)
    before, after = (sum(getattr(r, name) * r.coordinates for r in results) / total for name in ("before", "after"))
    cells = orders(reading.read(optimizer, optimizer.param_groups[0]).rule)
    gaps = torch.tensor([sum(part.item() for part in each) / total for each in parts[1:]], dtype=torch.float64)
    error = float(gaps.std() / (count - 1) ** 0.5) if count > 2 else math.inf
    return VarianceGap((cells[0].name, cells[1].name), before, after, error, count, total, results)


def _freeze(optimizer: Optimizer, model: nn.Module | None, dtype: torch.dtype) -> tuple[list[_Frozen], list[int]]:
    """The parameters that have state and can have a gradient, and the place of each among all."""
    known = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    frozen, place, position = [], [], -1
    for number, group in enumerate(optimizer.param_groups):
        how = reading.read(optimizer, group)
        if not how.rule.lean and "m" not in how.rule.state_names:
            raise ValueError(f"variance_gap: {how.rule.name} keeps no m; train with Adam, AdaBelief or MVN-Grad")
        if how.hyper.beta_mean is not None:
            raise ValueError("variance_gap: AdaBelief has no beta_mean, so the two orders would not share an m")
        if group.get("amsgrad"):
            raise ValueError("variance_gap: the largest v of amsgrad=True has no order of its own to compare with")
        names = group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]
        for param, name in zip(group["params"], names, strict=True):
            position += 1
            kept = optimizer.state.get(param)
            if kept and param.requires_grad:
                with torch.no_grad():
                    frozen.append(_Frozen(known.get(id(param), name), param, kept, how, dtype))
                place.append(position)
    if not frozen:
        raise ValueError("variance_gap: the optimizer has taken no step, so there is no state to freeze")
    return frozen, place
