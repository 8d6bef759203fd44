"""Verdicts on two arms that ran with the same seeds, by the rules in `RULES`, fixed before any result.

All metrics of a failed run are NaN. It never counts in favour of its arm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from scipy import stats

CONFIDENCE = 0.95
FAILED_BELOW = 90.0
"""Test accuracy in percent below which a run counts as failed. The worst float32 run that trains is above 92."""
MARGINS = {"test_accuracy": 0.3, "test_loss": 0.01}
"""How much worse lean may be: points of accuracy, nats of loss."""
HIGHER_IS_BETTER = {"test_accuracy"}

_POINTS, _NATS = MARGINS.values()
RULES = f"""\
A difference is taken between two runs with the same seed, which have the same initial weights and see the same batches
in the same order. The seeds are not those on which the settings were chosen.

**State in fewer bits**, for test accuracy and train loss each: *within seed noise* if the mean difference to float32 is
no larger than the standard deviation of the float32 runs over their seeds; else *worse* or *better*. Where a float32
run itself fails (its loss is not finite, or its test accuracy is under {FAILED_BELOW:g}), seed noise is no yardstick:
*not judged*. An arm that fails where float32 does not is *worse*. The rule is strict: were there no effect at all, and
two runs of one seed as unlike as runs of two seeds, one verdict in 19 at 10 seeds, and one in 5 at 5 seeds, would still
not be *within seed noise*.

**Lean**, for test accuracy and test loss each: *not inferior* if the upper one-sided {CONFIDENCE:.0%} confidence bound
of the mean deterioration against MVN-Grad is below the margin, {_POINTS} points or {_NATS} nats; *inferior* if the
lower bound is above it, or if lean fails where MVN-Grad does not; else *undecided*. A setting has the worse of its two
verdicts."""


@dataclass(frozen=True)
class Verdict:
    """A verdict and its numbers, which are NaN if a run failed."""

    text: str
    mean: float
    """The mean difference; for a margin, how much worse the arm is."""
    low: float
    high: float
    yardstick: float
    """The seed noise or the margin."""


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; NaN if a value is NaN, where `statistics.stdev` may raise an error."""
    mean = fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def interval(differences: Sequence[float], probability: float) -> tuple[float, float, float]:
    """The mean, and its lower and upper one-sided confidence bounds."""
    mean = fmean(differences)
    reach = float(stats.t.ppf(probability, len(differences) - 1)) * deviation(differences) / math.sqrt(len(differences))
    return mean, mean - reach, mean + reach


def compare_with_noise(metric: str, reference: Sequence[float], arm: Sequence[float]) -> Verdict:
    """Whether an arm differs from its reference by more than seeds do."""
    noise = deviation(reference)
    mean, low, high = interval([b - a for a, b in zip(reference, arm, strict=True)], (1 + CONFIDENCE) / 2)
    if not math.isfinite(noise):
        text = "not judged"
    elif abs(mean) <= noise:
        text = "within seed noise"
    else:
        text = "better" if math.isfinite(mean) and (mean > 0) == (metric in HIGHER_IS_BETTER) else "worse"
    return Verdict(text, mean, low, high, noise)


def compare_with_margin(
    metric: str,
    reference: Sequence[float],
    arm: Sequence[float],
    margins: Mapping[str, float] = MARGINS,
    confidence: float = CONFIDENCE,
) -> Verdict:
    """Whether an arm is worse than its reference by more than the margin of the metric."""
    sign, margin = (-1 if metric in HIGHER_IS_BETTER else 1), margins[metric]
    mean, low, high = interval([sign * (b - a) for a, b in zip(reference, arm, strict=True)], confidence)
    if not math.isfinite(mean):
        lost = any(math.isfinite(a) and not math.isfinite(b) for a, b in zip(reference, arm, strict=True))
        text = "inferior" if lost else "undecided"
    else:
        text = "not inferior" if high < margin else "inferior" if low > margin else "undecided"
    return Verdict(text, mean, low, high, margin)


def worst_verdict(verdicts: Sequence[str]) -> str:
    """The verdict on a setting: the worst of those on its metrics."""
    return max(verdicts, key=["not inferior", "undecided", "inferior"].index)
