"""The powers that the rules in claims.toml state: computed, or simulated with normal values.

    python -m mvngrad_lab.report.power

prints the power of Welch's test, by which optimizers are mostly compared over seeds, and each claim with the sentence
of its rule. `make_sentences` in the power.py of an experiment returns these by claim. Needs scipy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
from scipy import stats

from mvngrad_lab.arrays import Floats
from mvngrad_lab.discovery import import_all
from mvngrad_lab.report.statistics import LEVEL

SEEDS = (3, 5, 6)
DIFFERENCES = (1, 2, 3, 4, 6)
"""Of the two means, in deviations over seeds."""
DRAWS = 50_000


def welch_power(
    seeds: int,
    difference: float,
    deviations: tuple[float, float] = (1.0, 1.0),
    level: float = LEVEL,
    draws: int = 100_000,
) -> float:
    """The share of experiments in which the test finds a true difference of normal values.

    `deviations` are those of the lower and of the higher.
    """
    rng = np.random.default_rng(0)
    low, high = (
        rng.normal(mean, deviation, (seeds, draws)) for mean, deviation in zip((0, difference), deviations, strict=True)
    )
    return float((stats.ttest_ind(high, low, equal_var=False, alternative="greater").pvalue < level).mean())


def t_test_power(above: float, error: float, df: int, alpha: float) -> float:
    """The power of a one-sided t-test if the effect exceeds the null value by `above`."""
    return float(stats.nct.sf(stats.t.isf(alpha, df), df, above / error))


def signed_rank_power(
    pairs: int, shift: float, level: float, within: float = math.inf, seeds: int = 1, correlation: float = 0.0
) -> float:
    """The power of Wilcoxon's one-sided test for normal differences of deviation 1.

    Args:
        pairs: how many.
        shift: the mean of their differences.
        level: of the test.
        within: the power of two one-sided tests that the difference is within this margin instead.
        seeds: groups of pairs that correlate.
        correlation: of pairs of one seed.
    """
    rng = np.random.default_rng(0)
    shared = np.repeat(rng.normal(size=(DRAWS, seeds)), pairs // seeds, axis=1)
    values = shift + math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * rng.normal(size=(DRAWS, pairs))
    sides = [values] if math.isinf(within) else [within + values, within - values]
    p_values = [stats.wilcoxon(side, alternative="greater", axis=1, method="exact").pvalue for side in sides]
    return float((np.max(p_values, axis=0) < level).mean())


def narrower_power(pairs: int, ratio: float, draws: int = 1000, swaps: int = 999) -> float:
    """The power of the permutation test for interquartile ranges if the deviations of the two have this ratio."""
    rng = np.random.default_rng(0)

    def range_gap(first: Floats, second: Floats) -> Floats:
        ordered, at = np.sort([first, second]), np.array([0.25, 0.75]) * (pairs - 1)
        low, high = (ordered[..., np.int64(index)] for index in (np.floor(at), np.ceil(at)))
        gap: Floats = np.diff(np.diff(low + (high - low) * (at % 1)), axis=0)
        return gap

    found = 0
    for _ in range(draws):
        first, second = (rng.normal(size=pairs) * deviation for deviation in (1, ratio))
        first, second = first - np.median(first), second - np.median(second)
        swap = rng.random((swaps, pairs)) < 0.5
        gaps = range_gap(np.where(swap, second, first), np.where(swap, first, second))
        found += (1 + (gaps >= range_gap(first, second)).sum()) / (1 + swaps) < LEVEL
    return found / draws


def permutation_power(seeds: int, low: float, high: float) -> float:
    """The power of the exact permutation test for Poisson counts with these means."""
    rng = np.random.default_rng(0)
    counts = np.concatenate([rng.poisson(mean, (DRAWS, seeds)) for mean in (low, high)], axis=1)
    every = range(2 * seeds)
    sums = counts @ np.array([[index in each for index in every] for each in combinations(every, seeds)]).T
    return float(((sums <= sums[:, :1]).mean(axis=1) < LEVEL).mean())  # the first combination is that of `low`


# Columns of a table of the paper


def share_inside(deviations: Sequence[float], seeds: int, margin: float) -> tuple[float, float]:
    """How often means that equal the paper's are within the margin: all of them, and all but one at most."""
    inside = [1 - 2 * float(stats.norm.sf(margin * math.sqrt(seeds) / deviation)) for deviation in deviations]
    every = math.prod(inside)
    return every, every + sum((1 - share) / share * every for share in inside)


def outside_power(deviations: Sequence[float], seeds: int, margin: float, off: float, count: int) -> float:
    """How often `judge_means` says "not reproduced" if `count` means, any of them, are off by so much."""
    rng, n = np.random.default_rng(0), len(deviations)
    shifts = off * rng.permuted(np.tile(np.arange(n) < count, (DRAWS, 1)), axis=1)
    values = shifts[..., None] + np.array(deviations)[:, None] * rng.normal(size=(DRAWS, n, seeds))
    errors = values.std(axis=-1, ddof=1) / math.sqrt(seeds)
    p_values = np.sort(stats.t.sf((abs(values.mean(axis=-1)) - margin) / errors, seeds - 1), axis=1)
    return float(((p_values[:, :2] * (n, n - 1)).max(axis=1) < LEVEL).mean())  # Holm's first two


def deviation_powers(seeds: int, ratios: Sequence[float]) -> tuple[float, list[float]]:
    """How often four deviations of as many seeds as the paper's are within a factor of 2 if the true ones are equal;
    and how often the F test finds that one differs by these ratios, at Holm's first level."""
    ratio = stats.f(seeds - 1, seeds - 1)
    low, high = ratio.ppf(LEVEL / 8), ratio.isf(LEVEL / 8)
    found = [float(ratio.sf(high / by**2) + ratio.cdf(low / by**2)) for by in ratios]
    return float(ratio.cdf(4) - ratio.cdf(1 / 4)) ** 4, found


def describe_means(deviations: Sequence[float], seeds: int, margin: float, off: float, unit: str) -> str:
    """The sentence for a rule of `judge_means`."""
    every, three = share_inside(deviations, seeds, margin)
    two, four = (outside_power(deviations, seeds, margin, off, count) for count in (2, len(deviations)))
    return (
        f"if means equal the paper's, all four are inside in {every:.2f} and at least three in {three:.2f}; not "
        f"reproduced in {two:.2f} if two are off by {off:g}{unit}, {four:.2f} if all four are."
    )


def describe_deviations(seeds: int, ratios: Sequence[float]) -> str:
    """The sentence for a rule of `judge_deviations`."""
    every, found = deviation_powers(seeds, ratios)
    ratio = ", ".join(f"{power:.2f} if its ratio is {by:g}" for by, power in zip(ratios, found, strict=True))
    return f"Power: if deviations are equal, all four are within a factor of 2 in {every:.2f}; one is found in {ratio}."


def list_powers(power: Callable[..., float], values: Sequence[float], unit: str) -> str:
    """The powers at some values, as text.

    >>> list_powers(lambda shift: shift / 2, (0.5, 1), " deviations")
    '0.25, 0.50 for 0.5, 1 deviations'
    """
    return f"{', '.join(f'{power(value):.2f}' for value in values)} for {', '.join(f'{v:g}' for v in values)}{unit}"


def main() -> None:
    for seeds in SEEDS:
        powers = (f"{difference} deviations {welch_power(seeds, difference):.2f}" for difference in DIFFERENCES)
        print(f"{seeds} seeds each, level {LEVEL}: {', '.join(powers)}")
    for module in import_all("power"):
        for claim, sentence in module.make_sentences().items():
            print(f"{claim}: {sentence}")


if __name__ == "__main__":
    main()
