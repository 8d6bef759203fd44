"""Statistics of a few runs, and tests on pairs of runs of a sweep.

Tests that assume a distribution are scipy's. Those for sweeps are written here, because a run that diverged counts as
an infinite value, worse than any other: numpy's quantiles return nan then, and so does scipy's signed-rank test for two
runs that both diverged. Its exact distribution also assumes that there are no ties.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean, stdev
from typing import NamedTuple

from scipy import stats

LEVEL = 0.01
"""The level of every claim of the paper. If a claim needs several tests to pass, each passes at it; if one test of
several is enough, for or against a claim, they are corrected by Holm's method."""
OUR_LEVEL = 0.05
"""The level of our own hypotheses, unless their rule names another."""


def mean_and_deviation(values: Sequence[float], digits: int = 2) -> str:
    """
    >>> mean_and_deviation([1.0, 2.0, 3.0]), mean_and_deviation([1.234])
    ('2.00 ± 1.00', '1.23')
    """
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{deviation}"


def find_common_seeds(arms: Mapping[str, Mapping[str, object]], compared: Sequence[str]) -> list[str]:
    """The seeds that all of the compared arms have, in the order of the first.

    >>> find_common_seeds({"a": {"1": 0.5, "2": 0.6}, "b": {"2": 0.7}}, ["a", "b"])
    ['2']
    """
    return [seed for seed in arms[compared[0]] if all(seed in arms[arm] for arm in compared)]


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95% interval of the mean; None for a single value.

    >>> [round(end, 3) for end in mean_interval([1.0, 2.0, 3.0])]  # 2 -+ 4.303 / sqrt(3)
    [-0.484, 4.484]
    """
    return estimate_mean(values).interval() if len(values) > 1 else None


def welch(low: Sequence[float], high: Sequence[float]) -> float:
    """The p-value of Welch's one-sided test that the mean of `low` is below that of `high`; nan for a single value.

    >>> round(welch([1.0, 2.0, 3.0], [2.0, 3.0, 5.0]), 4)
    0.1423
    """
    if min(len(low), len(high)) < 2:
        return math.nan
    if stdev(low) == stdev(high) == 0:
        return 0.0 if fmean(low) < fmean(high) else 1.0
    both = [number for values in (low, high) for number in (fmean(values), stdev(values), len(values))]
    return float(stats.ttest_ind_from_stats(*both, equal_var=False, alternative="less").pvalue)


def worse_by_at_most(values: Sequence[float], reference: Sequence[float], level: float = 0.05) -> float:
    """The upper bound, at `level`, on how far the mean of `values` is below that of `reference`, by Welch's test.

    >>> round(worse_by_at_most([9.0, 10.0, 11.0], [9.5, 10.5, 11.5]), 3)  # 0.5 + 2.132 sqrt(1/3 + 1/3)
    2.241
    """
    if min(len(values), len(reference)) < 2:
        return math.nan
    errors = [(stdev(sample) ** 2 / len(sample), len(sample) - 1) for sample in (values, reference)]
    total, difference = sum(error for error, _ in errors), fmean(reference) - fmean(values)
    if total == 0:
        return difference
    freedom = total**2 / sum(error**2 / count for error, count in errors)
    return difference + float(stats.t.isf(level, freedom)) * math.sqrt(total)


def p_farther_than(values: Sequence[float], center: float, margin: float) -> float:
    """The p-value of the one-sided t-test that the mean of `values` is farther than `margin` from `center`.

    >>> round(p_farther_than([1.0, 2.0, 3.0], 0.0, 1.0), 4)  # t = (2 - 1) / (1 / sqrt(3)) with 2
    0.1127
    """
    mean, error, freedom = estimate_mean(values)
    return Contrast(abs(mean - center), error, freedom).p_above(margin)


def p_fewer(low: Sequence[int], high: Sequence[int]) -> float:
    """The p-value of the exact permutation test that the counts `low` have a smaller mean than the counts `high`.

    >>> p_fewer([0, 1, 0], [3, 4, 5])  # one of 20 assignments
    0.05
    """
    both, size = [*low, *high], len(low)
    sums = [sum(both[index] for index in chosen) for chosen in combinations(range(len(both)), size)]
    return sum(total <= sum(low) for total in sums) / len(sums)


def p_deviations_differ(values: Sequence[float], deviation: float, size: int) -> float:
    """The p-value of the two-sided F test that `values` vary more or less than a sample of `size` with this deviation.

    >>> round(p_deviations_differ([1.0, 2.0, 3.0], 1.0, 3), 4), round(p_deviations_differ([1.0, 2.0, 3.0], 0.05, 3), 4)
    (1.0, 0.005)
    """
    ratio = (stdev(values) / deviation) ** 2
    upper = float(stats.f.sf(ratio, len(values) - 1, size - 1))
    return min(1.0, 2 * min(upper, 1 - upper))


def p_variance_above(values: Sequence[float], others: Sequence[Sequence[float]]) -> float:
    """The p-value of the F test that the variance of `values` is above the one that all `others` share.

    >>> round(p_variance_above([1.0, 2.0, 6.0], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), 4)  # F = 7 with 2 and 4
    0.0494
    """
    freedom = sum(len(other) - 1 for other in others)
    shared = sum(stdev(other) ** 2 * (len(other) - 1) for other in others) / freedom
    if shared == 0:
        return 0.0 if stdev(values) > 0 else 0.5
    return float(stats.f.sf(stdev(values) ** 2 / shared, len(values) - 1, freedom))


class Contrast(NamedTuple):
    """An estimated difference of means, its standard error, and the degrees of freedom of that error."""

    estimate: float
    error: float
    freedom: int

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        reach = float(stats.t.isf((1 - level) / 2, self.freedom)) * self.error
        return self.estimate - reach, self.estimate + reach

    def p_above(self, value: float) -> float:
        """The p-value of the one-sided t-test that the difference is above `value`."""
        if self.error == 0:
            return 0.0 if self.estimate > value else 1.0
        return float(stats.t.sf((self.estimate - value) / self.error, self.freedom))

    def p_below(self, value: float) -> float:
        return Contrast(-self.estimate, self.error, self.freedom).p_above(-value)

    def p_within(self, margin: float) -> float:
        """The p-value of two one-sided t-tests that the difference is above -margin and below margin."""
        return max(self.p_above(-margin), self.p_below(margin))

    def p_different(self) -> float:
        """The p-value of the two-sided t-test against 0; for one contrast, that of the F-test."""
        return min(1.0, 2 * min(self.p_above(0), self.p_below(0)))

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.estimate:+.2f} (95%: {low:+.2f} to {high:+.2f})"


def estimate_mean(values: Sequence[float]) -> Contrast:
    """The mean of values, with Student's standard error; of a single value the error is infinite."""
    if len(values) < 2:
        return Contrast(fmean(values), math.inf, 1)
    return Contrast(fmean(values), stdev(values) / math.sqrt(len(values)), len(values) - 1)


def estimate_contrast(values: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> Contrast:
    """The sum of weights times means, with the residual deviation of all `values`, seeds as blocks.

    Args:
        values: the values of each arm; the n-th values of all arms share a seed.
        weights: of the arms that are compared; they add up to 0.

    >>> values = {"a": [1.0, 2.0, 4.0], "b": [2.0, 3.0, 6.0]}
    >>> round(estimate_contrast(values, {"a": -1, "b": 1}).p_different(), 4)  # the paired t-test
    0.0572
    """
    means, seeds = {arm: fmean(row) for arm, row in values.items()}, len(next(iter(values.values())))
    total = fmean(means.values())
    shifts = [fmean(column) - total for column in zip(*values.values(), strict=True)]
    freedom = (len(values) - 1) * (seeds - 1)
    residuals = [
        (value - means[arm] - shift) ** 2
        for arm, row in values.items()
        for value, shift in zip(row, shifts, strict=True)
    ]
    estimate = math.fsum(weight * means[arm] for arm, weight in weights.items())
    spread = math.sqrt(math.fsum(residuals) / freedom) if freedom else math.inf
    return Contrast(estimate, spread * math.sqrt(sum(weight**2 for weight in weights.values()) / seeds), freedom)


def estimate_ratio(
    values: Mapping[str, Sequence[float]], above: Mapping[str, float], below: Mapping[str, float]
) -> tuple[float, tuple[float, float] | None]:
    """The ratio of two contrasts with seeds as blocks, and its 95% interval by Fieller's theorem.

    The interval has every r for which the contrast of weights above - r * below is not different from 0. It is None if
    it is unbounded, which it is if the contrast `below` itself is not different from 0.

    >>> values = {"a": [0.9, 1.0, 1.1], "b": [3.9, 4.2, 3.9], "c": [2.0, 2.1, 1.9]}
    >>> ratio, (low, high) = estimate_ratio(values, {"b": 1, "c": -1}, {"b": 1, "a": -1})
    >>> f"{ratio:.3f} ({low:.3f} to {high:.3f})"
    '0.667 (0.591 to 0.745)'
    """
    numerator, denominator = estimate_contrast(values, above), estimate_contrast(values, below)
    both = estimate_contrast(values, {arm: above.get(arm, 0.0) + below.get(arm, 0.0) for arm in values})
    covariance = (both.error**2 - numerator.error**2 - denominator.error**2) / 2
    reach = float(stats.t.isf(0.025, numerator.freedom)) ** 2
    ratio = numerator.estimate / denominator.estimate
    square = denominator.estimate**2 - reach * denominator.error**2
    half = numerator.estimate * denominator.estimate - reach * covariance
    constant = numerator.estimate**2 - reach * numerator.error**2
    if square <= 0:
        return ratio, None
    width = math.sqrt(max(0.0, half**2 - square * constant))
    return ratio, ((half - width) / square, (half + width) / square)


def adjust_by_holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: those below a level are significant together at that level.

    >>> adjust_by_holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order, largest, adjusted = sorted(range(len(p_values)), key=p_values.__getitem__), 0.0, [0.0] * len(p_values)
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest values, as numpy's default; values may be infinite.

    >>> quantile([1.0, 2.0, 4.0], 0.5), quantile([1.0, 2.0, 4.0], 0.75), quantile([1.0, math.inf], 0.5)
    (2.0, 3.0, inf)
    """
    ordered, index = sorted(values), share * (len(values) - 1)
    low, high = ordered[math.floor(index)], ordered[math.ceil(index)]
    if low == high or math.isinf(low):
        return low
    return low + (high - low) * (index % 1)


def interquartile(values: Sequence[float]) -> float:
    """
    >>> interquartile([1.0, 2.0, 3.0, 4.0, 5.0])
    2.0
    """
    return quantile(values, 0.75) - quantile(values, 0.25)


def signed_rank(pairs: Sequence[tuple[float, float]]) -> float:
    """The p-value of Wilcoxon's one-sided signed-rank test that the first of a pair is below the second.

    Exact with ties: all assignments of signs are counted. Ties share their ranks, pairs without a difference are
    dropped, and an infinite value differs by more than any other. Differences are rounded to nine decimals: 0.2 and
    79.3 - 79.1 are a tie.

    >>> signed_rank([(1.0, 2.0), (1.0, 3.0), (1.0, 4.0)]), signed_rank([(79.3 - 79.1, 0.2), (80.1 - 79.9, 0.2)])
    (0.125, 1.0)
    """
    rounded = (round(second - first, 9) for first, second in pairs if first != second)
    differences = sorted((difference for difference in rounded if difference), key=abs)
    sizes = [abs(difference) for difference in differences]
    # Twice the mean of the ranks that equal sizes share, so that sums are integers.
    ranks = [2 * sizes.index(size) + sizes.count(size) + 1 for size in sizes]
    ways = [1] + [0] * sum(ranks)
    for rank in ranks:
        ways = [count + (ways[total - rank] if total >= rank else 0) for total, count in enumerate(ways)]
    observed = sum(rank for rank, difference in zip(ranks, differences, strict=True) if difference > 0)
    return sum(ways[observed:]) / sum(ways)


DRAWS = 9999
"""The number of random permutations of `p_narrower`."""


def p_narrower(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The p-values of a permutation test that the first of the pairs have the smaller interquartile range, and that
    the second have.

    Both are centred at their medians. If the two were alike, their order within a pair would be random: so each pair is
    swapped with probability 1/2, 9,999 times with a fixed seed, counting how often the difference is as large.

    >>> [p < 0.05 for p in p_narrower([(i / 10, float(i)) for i in range(12)])]
    [True, False]
    """
    centres = [quantile(column, 0.5) for column in zip(*pairs, strict=True)]
    centred = [(first - centres[0], second - centres[1]) for first, second in pairs]
    observed, draw = _range_gap(centred), random.Random(0)
    gaps = [_range_gap([p if draw.random() < 0.5 else p[::-1] for p in centred]) for _ in range(DRAWS)]
    # `not <` instead of `>=`: if both ranges are infinite the gap is nan, and counts against.
    counts = sum(not gap < observed for gap in gaps), sum(not gap > observed for gap in gaps)
    return (1 + counts[0]) / (1 + DRAWS), (1 + counts[1]) / (1 + DRAWS)


def _range_gap(pairs: Sequence[tuple[float, float]]) -> float:
    """How much wider the second's interquartile range is."""
    first, second = zip(*pairs, strict=True)
    return interquartile(second) - interquartile(first)
