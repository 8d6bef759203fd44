"""Effects on accuracy as contrasts of arms, over the seeds that all of them have.

An analysis of variance of this design, 2 x 2 x 2 with seeds as blocks, has one contrast for each effect; its F is the
square of the contrast's t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any

from mvngrad_lab.experiments.floor.arms import EPS_ARMS, GRID_ARMS
from mvngrad_lab.recipe import COUPLED, NAMES, RULES, has_eps_s
from mvngrad_lab.report.statistics import Contrast, estimate_contrast, find_common_seeds
from mvngrad_lab.report.verdicts import NOT_RUN, UNDECIDED, Verdict

LOOKS = (6, 3)
"""How many seeds the table is read at: each look has half of the level. Equivalence is read at six only."""
FACTORS: dict[str, Callable[[str], bool]] = {
    "floor": lambda arm: arm.endswith("-floor"),
    "variance": lambda arm: has_eps_s(GRID_ARMS[arm]),
    "order": lambda arm: RULES[GRID_ARMS[arm]].momentum_last,
}
"""Whether an arm has a floor, normalizes by the variance, and applies momentum last."""
KINDS = {"with a floor": "floor", "without a floor": "none"}
VARIANCE_EFFECT, ORDER_EFFECT = "variance", "momentum last"
SGD_ARMS = ("sgd", *filter(FACTORS["floor"], GRID_ARMS))
"""SGD, and what it is compared with."""

SAME_EPS = ("adam-floor", "laprop-floor", *EPS_ARMS)
VARIANCE_AT_EPS = "eps in all four: variance"

Values = dict[str, list[float]]
Effects = Mapping[str, Contrast]


def make_weights(*factors: str, among: Sequence[str] = tuple(GRID_ARMS)) -> dict[str, float]:
    """Weights of a factor's effect, or of the interaction of several: a difference of differences.

    >>> make_weights("variance", among=["adam-none", "adabelief-none"])
    {'adam-none': -1.0, 'adabelief-none': 1.0}
    """
    scale = 2 ** len(factors) / len(among)
    return {arm: scale * prod(1 if FACTORS[factor](arm) else -1 for factor in factors) for arm in among}


def get_whole_seeds(
    arms: Mapping[str, Mapping[str, float | None]], among: Sequence[str] = tuple(GRID_ARMS)
) -> tuple[list[str], Values]:
    """The seeds that all these arms have, and the values of the arms at these seeds."""
    seeds = find_common_seeds(arms, among)
    return seeds, {arm: [arms[arm][seed] for seed in seeds] for arm in among}  # type: ignore[misc]


def name_arm(arm: str) -> str:
    """The name of an arm in a sentence.

    >>> [name_arm(arm) for arm in ("sgd", "mvngrad-none", "adamw-floor", "adam-tuned")]
    ['SGD', 'MVN-Grad without a floor', 'AdamW with a floor', 'Adam with tuned coupled decay']
    """
    cell, _, kind = arm.partition("-")
    if not kind:
        return cell.upper()
    name = NAMES[cell] if cell in NAMES else f"{NAMES[cell.removesuffix('w')]}W"
    words = {
        "floor": "with a floor",
        "none": "without a floor",
        "tuned": "with tuned coupled decay",
        "eps": "with a floor by eps",
    }
    return f"{name} {words[kind]}"


def find_obstacle(values: Mapping[str, Sequence[float | None]], seeds: int) -> Verdict | None:
    """Why nothing can be judged yet."""
    if seeds < 3:
        return Verdict(NOT_RUN, "", f"{seeds} of 3 seeds are done in every arm.")
    if lost := [arm for arm, row in values.items() if None in row]:
        return Verdict(UNDECIDED, "", f"Diverged: {', '.join(map(name_arm, lost))}; the rule compares means.")
    return None


def get_seeds_of_look(
    arms: Mapping[str, Mapping[str, float | None]], among: Sequence[str] = tuple(GRID_ARMS)
) -> tuple[list[str], Values]:
    """The first six whole seeds of these arms, or three, or as many as there are."""
    seeds, values = get_whole_seeds(arms, among)
    count = next((look for look in LOOKS if len(seeds) >= look), len(seeds))
    return seeds[:count], {arm: row[:count] for arm, row in values.items()}


def get_arms_with_published(result: dict[str, Any]) -> dict[str, Any]:
    """The runs of each arm, at the paper's settings in the four arms that the paper ran."""
    return {**result["arms"], **result.get("published", {})}


def compute_effects(result: dict[str, Any], published: bool = False) -> dict[str, Contrast]:
    """All effects that the rules of the table look at, by name; none if `find_obstacle` finds one.

    "variance" is less second moment, "momentum last" less first, "SGD" less the four arms with a floor. `published`
    takes the paper's settings in the four arms that the paper ran, and all seeds that the eight arms then share.
    """
    if published:
        return _estimate_effects(get_arms_with_published(result), get_whole_seeds)
    return _estimate_effects(result["arms"], get_seeds_of_look)


def compute_mnist_effects(result: dict[str, Any]) -> dict[str, Contrast]:
    """The same on MNIST, of all seeds, and what the variance is worth with eps in all four."""
    effects = _estimate_effects(result["arms"], get_whole_seeds)
    _, values = get_whole_seeds(result["arms"], (*SAME_EPS, *(arm.replace("-eps", "-floor") for arm in EPS_ARMS)))
    weights = {arm: 0.5 if arm in EPS_ARMS else -0.5 for arm in SAME_EPS}
    effects[VARIANCE_AT_EPS] = estimate_contrast({arm: values[arm] for arm in SAME_EPS}, weights)
    centered = {arm: row for arm, row in values.items() if has_eps_s(arm.partition("-")[0])}
    effects["eps_s less eps"] = estimate_contrast(centered, {arm: -0.5 if arm in EPS_ARMS else 0.5 for arm in centered})
    return effects


def _estimate_effects(
    arms: Mapping[str, Any], get_seeds: Callable[..., tuple[list[str], Values]]
) -> dict[str, Contrast]:
    seeds, values = get_seeds(arms)
    if find_obstacle(values, len(seeds)):
        return {}
    effects = {"floor": estimate_contrast(values, make_weights("floor"))}
    for cell in COUPLED:
        weights = {f"{cell}-floor": 1.0, f"{cell}-none": -1.0}
        effects[f"floor, {NAMES[cell]}"] = estimate_contrast(values, weights)
    for factor, name in (("variance", VARIANCE_EFFECT), ("order", ORDER_EFFECT)):
        effects[name] = estimate_contrast(values, make_weights(factor))
        for where, kind in KINDS.items():
            four = {arm: row for arm, row in values.items() if arm.endswith(f"-{kind}")}
            effects[f"{name}, {where}"] = estimate_contrast(four, make_weights(factor, among=list(four)))
    for factors in (*combinations(FACTORS, 2), tuple(FACTORS)):
        effects[" x ".join(factors)] = estimate_contrast(values, make_weights(*factors))
    seeds, values = get_seeds(arms, SGD_ARMS)
    return effects if find_obstacle(values, len(seeds)) else {**effects, "SGD": compare_sgd(values)}


def compare_sgd(values: Values) -> Contrast:
    """SGD less the mean of the four arms with a floor."""
    return estimate_contrast(values, {arm: 1.0 if arm == "sgd" else -0.25 for arm in SGD_ARMS})
