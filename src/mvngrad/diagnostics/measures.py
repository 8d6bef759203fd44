"""Measures of a group's state after a step, from bias-corrected samples of m, v or s, and u on the host.

An update is divided by lr and does not include decoupled weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

LAYER = 8
"""The smallest number of sampled coordinates for which a parameter has values of its own."""


def correct_bias(
    hyper: Hyper, state: Mapping[str, Tensor], t: Tensor, per_coordinate: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Divide each average by 1 - beta^t. `t` has the step count of each parameter, which `per_coordinate` expands."""
    decays = {"m": hyper.mean_decay, "u": hyper.beta1, "v": hyper.beta2, "s": hyper.beta2}
    return {k: values / per_coordinate(OUT_OF_PLACE.correction(decays[k], t)) for k, values in state.items()}


def update_sizes(rule: Rule, hyper: Hyper, averages: Mapping[str, Tensor]) -> Tensor:
    """|x_t - x_{t-1}| / lr."""
    if rule.momentum_last:
        return averages["u"].abs()
    return averages["m"].abs() / (_root(rule, averages) + hyper.eps)


def _root(rule: Rule, averages: Mapping[str, Tensor]) -> Tensor:
    return averages["s" if rule.centered else "v"].sqrt()


def signal_to_noise(rule: Rule, hyper: Hyper, ratio: Tensor) -> Tensor:
    """|mu|/sigma of gradients mu + sigma xi with independent xi, from |m|/sqrt(s) or |m|/sqrt(v).

    Algorithm 1 centers with m_t, which contains g_t, so E s = beta^2 2/(1+beta) sigma^2. And E v = mu^2 + sigma^2.
    """
    if rule.centered:
        beta = hyper.mean_decay
        return ratio * (beta * math.sqrt(2 / (1 + beta)))
    return ratio / (1 - ratio**2).clamp(min=0).sqrt()


def measure_sample(
    rule: Rule, hyper: Hyper, averages: Mapping[str, Tensor], names: Sequence[str], counts: Sequence[int]
) -> dict[str, Any]:
    """The measures of a sample of averages; None for those that this cell's state does not give.

    The sample has `counts` coordinates of parameters with these `names`.
    """
    live = averages["u" if rule.momentum_last else "m"] != 0  # the others have never had a gradient
    root, update = _root(rule, averages), update_sizes(rule, hyper, averages)
    ratio = snr = None
    if rule.lean:
        ratio = update * (root + hyper.eps) / root  # m is rebuilt from u as in the rule: u (sqrt(s) + eps)
    elif "m" in averages:
        ratio = averages["m"].abs() / root
    saturation = update
    if ratio is not None:
        snr = signal_to_noise(rule, hyper, ratio)
        if rule.centered:
            saturation = (1 + snr**-2).rsqrt()  # what |mu|/sqrt(v) would be
    at_floor = root <= max(hyper.eps, math.sqrt(AT_FLOOR) * hyper.floor)
    all_live = bool(live.all())

    def pick(values: Tensor, where: Tensor = live) -> Tensor:
        return values if all_live else values[where]

    ordered = None if ratio is None else pick(ratio).sort().values
    by_layer = [
        values.split_with_sizes(list(counts)) for values in (live, at_floor, update, update if snr is None else snr)
    ]
    return {
        "sampled": live.numel(),
        "dead": _share(~live),
        "ratio": None if ordered is None else quantiles(ordered),
        "snr": None if ordered is None else quantiles(signal_to_noise(rule, hyper, ordered)),  # grows with the ratio
        "sign_collapse": _share((pick(saturation) - 1).abs() <= SATURATION),
        "sign_collapse_is": "implied" if rule.centered else "measured",
        "epsilon_floor": _share(pick(at_floor)),
        "floor_divisor": _median(root[live & at_floor] + hyper.eps),
        "update": quantiles(pick(update).sort().values),
        "layers": [
            {
                "name": name,
                "sampled": len(here),
                "epsilon_floor": _share(pick(floor, here)),
                "update": _median(pick(size, here)),
                "snr": None if snr is None else _median(pick(signal, here)),
            }
            for name, here, floor, size, signal in zip(names, *by_layer, strict=True)
            if here.sum() >= LAYER
        ],
    }


def quantiles(ordered: Tensor) -> dict[str, float | None] | None:
    """The value at each of `QUANTILES` of sorted values, by its name; None without values."""
    if not len(ordered):
        return None
    values = ordered[[round(q * (len(ordered) - 1)) for q in QUANTILES]].tolist()
    return {str(q): finite_or_none(value) for q, value in zip(QUANTILES, values, strict=True)}


def _share(where: Tensor) -> float | None:
    return where.sum().item() / len(where) if len(where) else None


def _median(values: Tensor) -> float | None:
    return finite_or_none(values.median().item()) if len(values) else None


def finite_or_none(number: float) -> float | None:
    """The number, or None for infinity and NaN, which JSON does not have."""
    return number if math.isfinite(number) else None
