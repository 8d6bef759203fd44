"""Measures of a group's state after a step, from bias-corrected samples of m, v or s, and u on the host.

An update is divided by lr and does not include decoupled weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mvngrad.rule import Hyper, Rule, get_log

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

SATURATION = 0.05
"""A coordinate is in sign collapse if its update over lr is this close to 1. For gradients of mean mu and deviation
sigma, |mu|/sqrt(v) is above 0.95 from |mu|/sigma = 3.04 on: from there, the step depends on the sign alone. A much
smaller bound would be lost in the noise of m, whose deviation at beta1 = 0.9 and |mu|/sigma = 5 is 4.6% of mu."""

AT_FLOOR = 2.0
"""A coordinate is at the floor of eps_s if s is at most this multiple of it: at least half of s is epsilon."""

CLIPPED = 0.95
"""A coordinate is clipped if its update is at least this share of z_clip: almost every recent gradient was clipped, to
the same sign."""

NEAR_FLOOR = 10.0
"""If no root is below this multiple of the floor, epsilon is at most 1% of each s and is not subtracted."""

RESOLVED, COARSELY_RESOLVED = 1e-3, 0.25
"""The smallest variance, as a share of the squared floor, that can be read from s in float32, and from s in bf16 or
int8, which rounds at random in every step. A smaller one is hidden by the floor."""

FORGOTTEN = 1e-12
"""A coordinate has no gradient now if |m|, or |u| times the divisor, is below this share of its root: at beta1 = 0.9 it
has had none for some 300 steps. Its root has decayed since, perhaps to the floor, which does not matter: there is
nothing to divide, and the next gradient raises it."""

MIN_LAYER_SAMPLE = 8
"""The smallest number of sampled coordinates for which a parameter has values of its own."""


def correct_bias(hyper: Hyper, state: Mapping[str, Tensor], t: Tensor) -> dict[str, Tensor]:
    """Divide each average by 1 - beta^t. `t` has the step count of each coordinate, or one for all."""
    decays = {"m": hyper.mean_decay, "u": hyper.beta1, "v": hyper.beta2, "s": hyper.beta2}
    corrections = {decay: -torch.expm1(t * get_log(decay)) for decay in {decays[letter] for letter in state}}
    return {letter: values / corrections[decays[letter]] for letter, values in state.items()}


def update_sizes(rule: Rule, hyper: Hyper, averages: Mapping[str, Tensor]) -> Tensor:
    """|x_t - x_{t-1}| / lr."""
    if rule.momentum_last:
        return averages["u"].abs()
    return averages["m"].abs() / (_root(rule, averages) + hyper.eps)


def _root(rule: Rule, averages: Mapping[str, Tensor]) -> Tensor:
    return averages[rule.normalizer].sqrt()


def signal_to_noise(rule: Rule, hyper: Hyper, ratio: Tensor) -> Tensor:
    """|mu|/sigma of gradients mu + sigma xi with independent xi, from |m|/sqrt(s) or |m|/sqrt(v).

    Algorithm 1 centers with m_t, which contains g_t, so E s = beta^2 2/(1+beta) sigma^2. And E v = mu^2 + sigma^2.
    """
    if rule.centered:
        beta = hyper.mean_decay
        return ratio * (beta * math.sqrt(2 / (1 + beta)))
    return ratio / (1 - ratio**2).clamp(min=0).sqrt()


def measure_sample(
    rule: Rule,
    hyper: Hyper,
    averages: Mapping[str, Tensor],
    names: Sequence[str],
    counts: Sequence[int],
    resolved: float = RESOLVED,
) -> dict[str, Any]:
    """The measures of a sample of averages; None for those that this cell's state does not give.

    The sample has `counts` coordinates of parameters with these `names`. `resolved` is the smallest variance that can
    be read beside the floor; smaller variances are replaced by this bound, so `snr` is underestimated.
    """
    average = averages["u" if rule.momentum_last else "m"]  # 0 if a coordinate has never had a gradient
    live_counts, sampled = list(counts), average.numel()
    is_finite = average.isfinite() & averages[rule.normalizer].isfinite()
    not_finite = sampled - int(is_finite.count_nonzero())
    if not_finite or int(average.count_nonzero()) < sampled:
        live = (average != 0) & is_finite
        averages = {letter: values[live] for letter, values in averages.items()}
        live_counts = [int(here.count_nonzero()) for here in live.split_with_sizes(live_counts)]
    root, update = _root(rule, averages), update_sizes(rule, hyper, averages)
    numerator = update * (root + hyper.eps)  # not m, which in int8 is 0 where gradients of a block are far larger
    has_gradient = numerator > FORGOTTEN * root
    deviation, hidden = (
        _remove_floor(root, averages["s"], hyper.floor, resolved, has_gradient) if rule.centered else (root, 0.0)
    )
    snr, saturation, rows = None, update, [update]
    if rule.lean or "m" in averages:
        mean = averages["m"].abs() if "m" in averages else numerator  # m is rebuilt from u as in the rule
        rows += [mean / root] if deviation is root else [mean / root, mean / deviation]
        snr = signal_to_noise(rule, hyper, rows[-1])
        if rule.centered:
            saturation = (1 + snr**-2).rsqrt()  # what |mu|/sqrt(v) would be
    at_floor = (root <= max(hyper.eps, math.sqrt(AT_FLOOR) * hyper.floor)) & has_gradient
    clipped_share = None
    if hyper.z_clip is not None:
        clipped = update >= CLIPPED * hyper.z_clip
        clipped_share = _share(clipped)
        at_floor &= ~clipped  # they are divided by |g| / z_clip
    floor_share = _share(at_floor)
    sizes, *ratios = find_quantiles(rows)
    return {
        "sampled": sampled,
        "dead": (sampled - len(root) - not_finite) / sampled,
        "not_finite": not_finite / sampled,
        "ratio": _name_quantiles(ratios[0]) if ratios else None,
        "snr": _name_quantiles(signal_to_noise(rule, hyper, ratios[-1])) if ratios else None,  # grows with the ratio
        "noise_hidden": hidden if len(root) else None,
        "sign_collapse": _share((saturation - 1).abs() <= SATURATION),
        "sign_collapse_is": "implied" if rule.centered else "measured",
        "epsilon_floor": floor_share,
        "clipped": clipped_share,
        "floor_divisor": _median(root[at_floor] + hyper.eps) if floor_share else None,
        "root": _median(deviation),
        "update": _name_quantiles(sizes),
        "layers": _measure_layers(names, counts, live_counts, at_floor, update, snr),
    }


def _remove_floor(
    root: Tensor, s: Tensor, floor: float, resolved: float, has_gradient: Tensor
) -> tuple[Tensor, float | None]:
    """The standard deviations, without what eps_s added to s, and the share of them that it hides."""
    if not bool((root <= NEAR_FLOOR * floor).any()):
        return root, 0.0
    variance, least = s - floor**2, resolved * floor**2
    return variance.clamp(min=least).sqrt(), _share((variance < least) & has_gradient)


def _measure_layers(
    names: Sequence[str],
    counts: Sequence[int],
    live_counts: list[int],
    at_floor: Tensor,
    update: Tensor,
    snr: Tensor | None,
) -> list[dict[str, Any]]:
    """The measures of each parameter that has enough live coordinates in the sample."""
    any_at_floor = bool(at_floor.any())
    by_layer = [values.split_with_sizes(live_counts) for values in (at_floor, update, update if snr is None else snr)]
    return [
        {
            "name": name,
            "sampled": count,
            "epsilon_floor": _share(floor) if any_at_floor else 0.0,  # saves a pass over each layer
            "update": _median(size),
            "snr": None if snr is None else _median(signal),
        }
        for name, count, floor, size, signal in zip(names, counts, *by_layer, strict=True)
        if len(floor) >= MIN_LAYER_SAMPLE
    ]


def find_quantiles(rows: list[Tensor]) -> Tensor:
    """The value at each of `QUANTILES` of each row of float64 values that are not negative; empty without values."""
    joined = torch.stack(rows).abs_()
    if not joined.numel():
        return joined
    bits = joined.view(torch.int64)  # they have the same order, with NaN last, and kthvalue is faster on integers
    ranks = [1 + round(q * (bits.shape[1] - 1)) for q in QUANTILES]
    return torch.stack([bits.kthvalue(rank).values for rank in ranks], -1).view(torch.float64)


def _name_quantiles(values: Tensor) -> dict[str, float | None] | None:
    return dict(zip(map(str, QUANTILES), map(finite_or_none, values.tolist()), strict=True)) if len(values) else None


def _share(where: Tensor) -> float | None:
    return int(where.count_nonzero()) / len(where) if len(where) else None


def _median(values: Tensor) -> float | None:
    return finite_or_none(values.median().item()) if len(values) else None


def finite_or_none(number: float) -> float | None:
    """The number, or None for infinity and NaN, which JSON does not have."""
    return number if math.isfinite(number) else None
