"""Means, deviations and Welch's test, for groups of a few runs; quartiles and tests of pairs, for sweeps."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean, stdev


def mean_and_deviation(values: Sequence[float], digits: int = 2) -> str:
    """
    >>> mean_and_deviation([1.0, 2.0, 3.0])
    '2.00 ± 1.00'
    """
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def welch(low: Sequence[float], high: Sequence[float]) -> float:
    """The p-value of Welch's one-sided test that the mean behind `low` is below that behind `high`.

    >>> round(welch([1.0, 2.0, 3.0], [2.0, 3.0, 5.0]), 4)
    0.1423
    """
    if min(len(low), len(high)) < 2:
        return math.nan
    errors = [stdev(values) ** 2 / len(values) for values in (low, high)]
    total, difference = sum(errors), fmean(high) - fmean(low)
    if total == 0:
        return 0.0 if difference > 0 else 1.0
    freedom = total**2 / sum(error**2 / (len(v) - 1) for error, v in zip(errors, (low, high), strict=True))
    return student_above(difference / math.sqrt(total), freedom)


def worse_by_at_most(values: Sequence[float], reference: Sequence[float], level: float = 0.05) -> float:
    """The upper bound, at `level`, of how far the mean behind `values` is below that behind `reference`.

    It is the margin at which Welch's one-sided test just decides, found by halving.

    >>> round(worse_by_at_most([9.0, 10.0, 11.0], [9.5, 10.5, 11.5]), 3)  # 0.5 + 2.132 sqrt(1/3 + 1/3)
    2.241
    """
    if min(len(values), len(reference)) < 2:
        return math.nan
    low = fmean(reference) - fmean(values)
    if welch(reference, [value + low + 1e-9 for value in values]) < level:
        return low  # none of them varies
    high = low + 1.0
    while welch(reference, [value + high for value in values]) >= level:
        high += high - low
    for _ in range(50):
        middle = (low + high) / 2
        decides = welch(reference, [value + middle for value in values]) < level
        low, high = (low, middle) if decides else (middle, high)
    return high


def spread_above(values: Sequence[float], others: Sequence[Sequence[float]]) -> float:
    """The p-value of the F test that the variance behind three `values` is above the one that all `others` share.

    Of three values the numerator has two degrees of freedom, and then P(F > f) = (1 + 2 f / n)^(-n/2).

    >>> round(spread_above([1.0, 2.0, 6.0], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), 4)  # F = 7, n = 4
    0.0494
    """
    if len(values) != 3:
        raise ValueError(f"values={list(values)!r} are {len(values)}; the test is written for 3")
    freedom = sum(len(other) - 1 for other in others)
    shared = sum(stdev(other) ** 2 * (len(other) - 1) for other in others) / freedom
    if shared == 0:
        return 0.0 if stdev(values) > 0 else 1.0
    return float((1 + 2 * stdev(values) ** 2 / shared / freedom) ** (-freedom / 2))


def student_above(t: float, freedom: float) -> float:
    """P(T > t) of Student's distribution with any, also fractional, number of degrees of freedom.

    With t = sqrt(freedom) tan(angle) the density is a power of cos(angle), smooth on a finite range: Simpson's rule.
    """
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    end, steps = math.atan(t / math.sqrt(freedom)), 1000
    weights = [1 if i in (0, steps) else 4 if i % 2 else 2 for i in range(steps + 1)]
    area = sum(w * math.cos(end * i / steps) ** (freedom - 1) for i, w in enumerate(weights)) * end / steps / 3
    return float(0.5 - scale * area)


def quantile(values: Sequence[float], share: float) -> float:
    """Between the two nearest, in proportion, as `statistics.quantiles(method="inclusive")`; they may be infinite.

    >>> quantile([1.0, 2.0, 4.0], 0.5), quantile([1.0, 2.0, 4.0], 0.75), quantile([1.0, math.inf], 0.5)
    (2.0, 3.0, inf)
    """
    ordered, place = sorted(values), share * (len(values) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    if low == high or math.isinf(low):
        return low
    return low + (high - low) * (place % 1)


def signed_rank(pairs: Sequence[tuple[float, float]]) -> float:
    """The p-value of Wilcoxon's one-sided signed-rank test that the first of a pair is below the second.

    Exact: all ways to choose the signs are counted, ties share their ranks, and pairs without a difference say nothing.
    An infinite value differs by more than any other.

    >>> signed_rank([(1.0, 2.0), (1.0, 3.0), (1.0, 4.0)])
    0.125
    """
    differences = sorted((second - first for first, second in pairs if first != second), key=abs)
    sizes = [abs(difference) for difference in differences]
    # Twice the mean of the ranks that equal sizes share, so that sums are whole.
    ranks = [2 * sizes.index(size) + sizes.count(size) + 1 for size in sizes]
    ways = [1] + [0] * sum(ranks)
    for rank in ranks:
        ways = [count + (ways[total - rank] if total >= rank else 0) for total, count in enumerate(ways)]
    seen = sum(rank for rank, difference in zip(ranks, differences, strict=True) if difference > 0)
    return sum(ways[seen:]) / sum(ways)


DRAWS = 9999


def narrower(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The p-values of a permutation test that the first of the pairs have the smaller interquartile range, and that
    the second have.

    Both are centred at their medians. Were they alike, who is first in a pair would be chance: so the two are swapped,
    or not, in each pair, 9,999 times with a fixed seed, and it is counted how often the difference is as large.

    >>> [p < 0.05 for p in narrower([(i / 10, float(i)) for i in range(12)])]
    [True, False]
    """
    centres = [quantile(column, 0.5) for column in zip(*pairs, strict=True)]
    centred = [(first - centres[0], second - centres[1]) for first, second in pairs]
    seen, draw = _range_gap(centred), random.Random(0)
    gaps = [_range_gap([p if draw.random() < 0.5 else p[::-1] for p in centred]) for _ in range(DRAWS)]
    # `not <` and not `>=`: where both ranges are infinite their difference is no number, and speaks against.
    counts = sum(not gap < seen for gap in gaps), sum(not gap > seen for gap in gaps)
    return (1 + counts[0]) / (1 + DRAWS), (1 + counts[1]) / (1 + DRAWS)


def _range_gap(pairs: Sequence[tuple[float, float]]) -> float:
    """How much wider the second's interquartile range is."""
    first, second = zip(*pairs, strict=True)
    return interquartile(second) - interquartile(first)


def interquartile(values: Sequence[float]) -> float:
    """
    >>> interquartile([1.0, 2.0, 3.0, 4.0, 5.0])
    2.0
    """
    return quantile(values, 0.75) - quantile(values, 0.25)
