"""Measures of a group's state after a step, from samples of m, v or s, and u on the host.

All ratios are of bias-corrected averages; an update is divided by lr and does not include decoupled weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from mvngrad.optim.backends.eager import OUT_OF_PLACE
from mvngrad.rule import Hyper, Rule

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

SATURATION = 0.05
"""A coordinate is in sign collapse if its update over lr is this close to 1. For gradients of mean mu and deviation
sigma, |mu|/sqrt(v) is above 0.95 from |mu|/sigma = 3.04 on: from there, the step depends on the sign alone. A much
smaller bound would be lost in the noise of m, whose deviation at beta1 = 0.9 and |mu|/sigma = 5 is 4.6% of mu."""

AT_FLOOR = 2.0
"""A coordinate is at the floor of eps_s if s is at most this multiple of it: at least half of s is epsilon."""


def mean_noise(beta: float) -> float:
    """The deviation of m over that of the gradient: the size of |m| if there is no signal.

    >>> round(mean_noise(0.9), 4)
    0.2294
    """
    return math.sqrt((1 - beta) / (1 + beta))


def signal_to_noise(rule: Rule, hyper: Hyper, ratio: float) -> float:
    """|mu|/sigma of gradients mu + sigma xi with independent xi, from |m|/sqrt(s) or |m|/sqrt(v).

    Algorithm 1 centers with m_t, which contains g_t, so E s = beta^2 2/(1+beta) sigma^2. And E v = mu^2 + sigma^2.
    """
    if rule.centered:
        beta = hyper.mean_decay
        return ratio * beta * math.sqrt(2 / (1 + beta))
    return ratio / math.sqrt(1 - ratio**2) if ratio < 1 else math.inf


class Corrections(NamedTuple):
    """1 - beta^t of each coordinate: for u or Adam's m, for the mean m, and for v or s."""

    momentum: Tensor
    mean: Tensor
    square: Tensor

    @classmethod
    def at(cls, hyper: Hyper, t: Tensor, per_coordinate: Callable[[Tensor], Tensor]) -> Corrections:
        """From the step count of each parameter; `per_coordinate` repeats a value for its coordinates."""
        momentum, square = (per_coordinate(OUT_OF_PLACE.correction(beta, t)) for beta in (hyper.beta1, hyper.beta2))
        if hyper.beta_mean is None:
            return cls(momentum, momentum, square)
        return cls(momentum, per_coordinate(OUT_OF_PLACE.correction(hyper.mean_decay, t)), square)


def update_sizes(rule: Rule, hyper: Hyper, corrections: Corrections, state: Mapping[str, Tensor]) -> Tensor:
    """|x_t - x_{t-1}| / lr."""
    if rule.momentum_last:
        return state["u"].abs() / corrections.momentum
    return state["m"].abs() / corrections.momentum / (_root(rule, corrections, state) + hyper.eps)


def _root(rule: Rule, corrections: Corrections, state: Mapping[str, Tensor]) -> Tensor:
    return (state["s" if rule.centered else "v"] / corrections.square).sqrt()


def measure_sample(rule: Rule, hyper: Hyper, corrections: Corrections, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The measures of a sample; None for those that this cell's state does not give."""
    live = state["u" if rule.momentum_last else "m"] != 0  # the others have never had a gradient
    corrections = Corrections(*(values[live] for values in corrections))
    state = {letter: values[live] for letter, values in state.items()}
    count = int(live.sum())
    root, update = _root(rule, corrections, state), update_sizes(rule, hyper, corrections, state)
    ratio = None
    if rule.lean:
        ratio = update * (root + hyper.eps) / root  # m is rebuilt from u as in the rule: u (sqrt(s) + eps)
    elif "m" in rule.state_names:
        ratio = state["m"].abs() / corrections.mean / root
    if rule.centered and ratio is not None:
        snr = ratio * signal_to_noise(rule, hyper, 1.0)
        saturation = (1 + snr**-2).rsqrt()  # what |mu|/sqrt(v) would be
    else:
        saturation = update
    ratios = quantiles(ratio)
    floor = max(hyper.eps, math.sqrt(AT_FLOOR) * hyper.floor)
    return {
        "sampled": live.numel(),
        "dead": _share(~live, live.numel()),
        "ratio": ratios,
        "snr": ratios
        and {
            q: None if value is None else finite_or_none(signal_to_noise(rule, hyper, value))
            for q, value in ratios.items()
        },
        "sign_collapse": _share((saturation - 1).abs() <= SATURATION, count),
        "sign_collapse_is": "implied" if rule.centered else "measured",
        "epsilon_floor": _share(root <= floor, count),
        "update": quantiles(update),
    }


def quantiles(values: Tensor | None) -> dict[str, float | None] | None:
    """The value nearest to each quantile, by name; None without values."""
    if values is None or not values.numel():
        return None
    ordered = values.sort().values
    return {str(q): finite_or_none(ordered[round(q * (len(ordered) - 1))].item()) for q in QUANTILES}


def _share(where: Tensor, count: int) -> float | None:
    return where.sum().item() / count if count else None


def finite_or_none(number: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return number if math.isfinite(number) else None
