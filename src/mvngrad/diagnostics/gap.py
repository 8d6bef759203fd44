"""The variance gap between the two orders of momentum, at a frozen state of a real training.

Theorem 3.1 of the paper: given the past, the next update of AdaBelief varies more than that of MVN-Grad.
Appendix C.3 measures it on MNIST.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from mvngrad.diagnostics.state import GroupView, load_values, view_group
from mvngrad.optim.backends.eager import OUT_OF_PLACE
from mvngrad.optim.tensors import get_local, get_local_like, resolve_bits, view_as_real
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
    """The variances of the next update, divided by lr, from one frozen state, averaged over all coordinates."""

    cells: tuple[str, str]
    """The cells with momentum before and after normalizing."""
    before: float
    """Variance of the first cell's update: Var(Delta_t^AB | F_{t-1}) for AdaBelief."""
    after: float
    """Variance of the second cell's update: Var(Delta_t^MV | F_{t-1}) for MVN-Grad."""
    error: float
    """The standard error of the gap over batches."""
    batches: int
    coordinates: int
    parameters: tuple[ParameterGap, ...]

    @property
    def gap(self) -> float:
        """Delta Var_t: positive if the update varies less with momentum after normalizing."""
        return self.before - self.after

    @property
    def relative(self) -> float:
        """The gap as a share of `before`; 0 if `before` is 0."""
        return self.gap / self.before if self.before else 0.0

    def __str__(self) -> str:
        first, second = self.cells
        return (
            f"Var {first} {self.before:.4g}, Var {second} {self.after:.4g}, gap {self.gap:.3g} +- {self.error:.1g} "
            f"({self.relative:+.1%}), over {self.batches} batches and {self.coordinates} coordinates"
        )


class _FrozenParameter:
    """A parameter with a copy of its state, and the variances of the updates that would follow.

    `mean` and `squares` have one row for each of the two cells. Welford's recursion updates them, which neither stores
    the updates nor subtracts large sums.
    """

    def __init__(self, name: str, param: Tensor, state: dict[str, Any], view: GroupView, dtype: torch.dtype) -> None:
        self.name, self.param, self.dtype = name, param, dtype
        self.t = float(state["step"]) + 1
        self.rules = cells_by_order(view.rule)
        hyper = view.hyper
        self.decay = 0.0 if hyper.decoupled else float(hyper.weight_decay)
        self.sign = -1.0 if hyper.maximize else 1.0
        # Decoupled decay adds no variance. AdaBelief has no z_clip, so clipping would count as an effect of the order.
        self.hyper = hyper._replace(lr=1.0, weight_decay=0.0, maximize=False, z_clip=None)
        values = {letter: load_values(state, name, dtype) for letter, name in view.names.items()}
        if view.rule.lean:
            values["m"] = view.rule.reconstruct_mean(values, self.t, hyper, OUT_OF_PLACE)
        # u_{t-1} is a constant given the past, so 0 gives the same variance; AdaBelief does not have it.
        self.state: dict[str, Any] = {**values, "u": 0.0}
        self.batches = 0
        self.mean = self.squares = torch.zeros(())

    def add_gradient(self, grad: Tensor) -> Tensor:
        """Add a gradient and return its contribution to the gap, summed over coordinates.

        The contribution comes from squared Helmert contrasts of the updates with those before them. They are
        independent and have the variance as their mean; the first is 0.
        """
        g = self.sign * view_as_real(resolve_bits(get_local_like(grad, self.param))).to(self.dtype)
        if self.decay:
            g = g + self.decay * view_as_real(get_local(self.param)).to(self.dtype)
        updates = torch.stack(
            [rule.update(0.0, g, self.state, self.t, self.hyper, OUT_OF_PLACE)[0] for rule in self.rules]
        )
        if self.batches == 0:
            self.mean, self.squares = torch.zeros_like(updates), torch.zeros_like(updates)
        self.batches += 1
        deviations = updates - self.mean
        self.mean.add_(deviations, alpha=1 / self.batches)
        contrasts = deviations * (updates - self.mean)
        self.squares.add_(contrasts)
        return (contrasts[0] - contrasts[1]).sum()

    def result(self) -> ParameterGap:
        before, after = (float((squares / (self.batches - 1)).mean()) for squares in self.squares)
        return ParameterGap(self.name, self.squares[0].numel(), self.batches, before, after)


def cells_by_order(rule: Rule) -> tuple[Rule, Rule]:
    """The cells with momentum before and after normalizing that have the normalizer of `rule`."""
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
    r"""Compare the variance of the next update with momentum before and after normalizing, over K mini-batches.

    .. math::
        \Delta\mathrm{Var}_t = \mathrm{Var}(\Delta_t^{AB} \mid F_{t-1}) - \mathrm{Var}(\Delta_t^{MV} \mid F_{t-1})

    The state (x, m, s, t) is frozen. For each batch, `Rule.update` computes both updates from its gradient, with the
    optimizer's bias correction, coupled weight decay and epsilon, divided by lr. Variances are computed for each
    coordinate, then averaged. Gradients are not stored, only four numbers per coordinate. The standard error of the gap
    comes from the contrasts of each batch with those before it, which are independent.

    The optimizer is AdaBelief, MVN-Grad or lean MVN-Grad. For Adam, including torch's, Adam and LaProp are compared
    with its v; the theorem does not cover them. The optimizer, its parameters and their `.grad` are not changed, and no
    random number is drawn. `loss` may change other things; with `model`, its buffers (the running statistics of batch
    norm) are restored too.

    Args:
        optimizer: an optimizer that has taken a step.
        loss: a function of a batch that returns a scalar loss to differentiate, or the gradients, one for each
            parameter in the order of the groups and None where there is none (if you must call `backward` yourself,
            as under FSDP).
        batches: independent mini-batches, at least two; at most K are used.
        K: the number of batches; 128 in the paper.
        model: the model whose buffers are restored and whose parameter names are used.
        dtype: the dtype of the arithmetic.

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
    frozen = _freeze(optimizer, model, dtype)
    params = [each.param for each in frozen.values()]
    buffers = [] if model is None else [(buffer, buffer.clone()) for buffer in model.buffers()]
    contributions: list[list[Tensor]] = []  # for each batch, those of the parameters that had a gradient
    try:
        for batch in islice(batches, K):
            with torch.enable_grad():
                value = loss(batch)
                grads: Sequence[Tensor | None]
                if isinstance(value, Tensor):
                    grads = torch.autograd.grad(value, params, allow_unused=True)
                else:
                    grads = _select_gradients(value, optimizer, frozen)
            with torch.no_grad():
                pairs = zip(frozen.values(), grads, strict=True)
                contributions.append([each.add_gradient(grad) for each, grad in pairs if grad is not None])
            del value, grads
    finally:
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
    count = len(contributions)
    results = tuple(result for each in frozen.values() if each.batches > 1 and (result := each.result()).coordinates)
    if not results:
        raise ValueError(
            f"variance_gap: no parameter has two gradients in {count} batches; pass at least 2 batches that reach the "
            "parameters"
        )
    total = sum(each.coordinates for each in results)
    before, after = (sum(getattr(r, name) * r.coordinates for r in results) / total for name in ("before", "after"))
    cells = cells_by_order(view_group(optimizer, optimizer.param_groups[0]).rule)
    gaps = [sum(part.item() for part in parts) / total for parts in contributions[1:]]
    error = float(torch.tensor(gaps, dtype=torch.float64).std() / (count - 1) ** 0.5) if count > 2 else math.inf
    return VarianceGap((cells[0].name, cells[1].name), before, after, error, count, total, results)


def _select_gradients(value: Any, optimizer: Optimizer, frozen: Mapping[int, _FrozenParameter]) -> list[Tensor | None]:
    """The gradients of the frozen parameters among those that a function returned for all parameters.

    Raises:
        ValueError: there is not one gradient, or None, for each parameter, or one has another shape.
    """
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if not isinstance(value, Sequence) or len(value) != count:
        returned = f"{len(value)} values" if isinstance(value, Sequence) else f"a {type(value).__name__}"
        raise ValueError(
            f"variance_gap: loss(batch) returned {returned}; it must return a loss tensor, or a list with a gradient "
            f"or None for each of the {count} parameters"
        )
    for index, each in frozen.items():
        shape = getattr(value[index], "shape", None)
        if value[index] is not None and shape != each.param.shape:
            raise ValueError(
                f"variance_gap: loss(batch) returned a gradient of shape {shape and tuple(shape)} for {each.name}, "
                f"whose shape is {tuple(each.param.shape)}"
            )
    return [value[index] for index in frozen]


def _freeze(optimizer: Optimizer, model: nn.Module | None, dtype: torch.dtype) -> dict[int, _FrozenParameter]:
    """Freeze the parameters that have state and require gradients, by their index among all parameters.

    Raises:
        ValueError: the optimizer has taken no step, or the two orders cannot be compared at its state.
    """
    model_names = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    frozen: dict[int, _FrozenParameter] = {}
    index = -1
    for number, group in enumerate(optimizer.param_groups):
        view = view_group(optimizer, group)
        if not view.rule.lean and "m" not in view.rule.state_names:
            raise ValueError(f"variance_gap: {view.rule.name} keeps no m; train with Adam, AdaBelief or MVN-Grad")
        if view.hyper.beta_mean is not None:
            raise ValueError("variance_gap: AdaBelief has no beta_mean, to share an m with; train with beta_mean=None")
        if group.get("amsgrad"):
            raise ValueError("variance_gap: LaProp has no counterpart of amsgrad=True; train with amsgrad=False")
        names = group.get("param_names") or []
        if len(names) != len(group["params"]):  # params may have been changed by hand
            names = [f"{number}.{i}" for i in range(len(group["params"]))]
        for param, name in zip(group["params"], names, strict=True):
            index += 1
            state = optimizer.state.get(param)
            if state and param.requires_grad:
                with torch.no_grad():
                    frozen[index] = _FrozenParameter(model_names.get(id(param), name), param, state, view, dtype)
    if not frozen:
        raise ValueError("variance_gap: the optimizer has no state to freeze; take a step first")
    return frozen
