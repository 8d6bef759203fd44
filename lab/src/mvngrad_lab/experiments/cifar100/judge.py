"""Verdicts on Table 1 and on fig:thm_vgap_ada_prop_cifar."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from mvngrad_lab.report.claims import find_values
from mvngrad_lab.report.statistics import LEVEL, adjust_by_holm, estimate_contrast
from mvngrad_lab.report.tables import (
    SECOND_MOMENT,
    VARIANCE,
    check_rows,
    describe,
    describe_counts,
    judge_deviations,
    judge_means,
)  # fmt: skip
from mvngrad_lab.report.verdicts import (
    COMPARED,
    NOT_REPRODUCED,
    NOT_RUN,
    UNDECIDED,
    Estimate,
    Strip,
    Verdict,
    decide,
    judges,
)  # fmt: skip

MARGIN = 0.6
"""Points of accuracy."""
ORDER_SEEDS = 6
"""Seeds that the order of the cells is judged with."""
ERRORS = 2.33
"""Standard errors by which a gap must be above 0: one-sided, 0.01."""
PAPER_SECONDS = {"128": 4000, "1024": 4150}
"""Of a run; at batch 1024 the paper has 4,000 to 4,300."""


def judge_accuracy(result: dict[str, Any], kind: str, batch: str) -> Verdict:
    """Whether the means are within MARGIN of the paper's."""
    values, verdict = check_rows(result["cells"][batch], f"{kind}_accuracy")
    return verdict or judge_means(f"{kind} accuracy, %", values, find_values(f"cifar-{kind}-{batch}"), MARGIN)


def judge_deviation(result: dict[str, Any], kind: str, batch: str) -> Verdict:
    values, verdict = check_rows(result["cells"][batch], f"{kind}_accuracy")
    return verdict or judge_deviations(values, find_values(f"cifar-deviation-{kind}-{batch}"), 3)


def judge_order(result: dict[str, Any], batch: str) -> Verdict:
    """Whether variance is above second moment; and MVN-Grad near AdaBelief at batch 128, or above it at 1024.

    Runs with the same seed have the same data and initial weights, so they are paired.
    """
    of_cells = result["order"][batch]
    by_seed = {
        cell: {seed: value for seed, value in zip(row["seeds"], row["test_accuracy"], strict=True) if value is not None}
        for cell, row in of_cells.items()
    }
    seeds = [seed for seed in by_seed["MVN-Grad"] if all(seed in each for each in by_seed.values())]
    values = {cell: [each[seed] for seed in seeds] for cell, each in by_seed.items()}
    if len(seeds) < 2:
        return Verdict(NOT_RUN, describe(values), f"{len(seeds)} seeds are done with all four.")
    pairs = {
        (high, low): estimate_contrast({cell: values[cell] for cell in (high, low)}, {high: 1.0, low: -1.0})
        for low in SECOND_MOMENT
        for high in VARIANCE
    }
    last = estimate_contrast({cell: values[cell] for cell in VARIANCE}, {"MVN-Grad": 1.0, "AdaBelief": -1.0})
    p_for = max(pair.p_above(0) for pair in pairs.values())
    p_against = min(adjust_by_holm([pair.p_below(0) for pair in pairs.values()]))
    paper, text = find_values(f"cifar-test-{batch}"), f"largest of the first four p-values {p_for:.2g}"
    rows = (
        Estimate(f"{high} less {low}", pair.estimate, pair.interval(), len(seeds), paper[high] - paper[low])
        for (high, low), pair in {**pairs, ("MVN-Grad", "AdaBelief"): last}.items()
    )
    strip = Strip("points of test accuracy, paired by seed, and 95% interval", tuple(rows))
    lost = describe_counts(of_cells, "diverged")
    if lost and not describe_counts(of_cells, "to_come"):
        return Verdict(UNDECIDED, text, f"Diverged: {lost}; the rule compares {ORDER_SEEDS} pairs.", strip)
    if len(seeds) < ORDER_SEEDS:
        return Verdict(UNDECIDED, text, f"There were too few seeds to decide: {len(seeds)} of {ORDER_SEEDS}.", strip)
    if p_for >= LEVEL:
        return Verdict(NOT_REPRODUCED if p_against < LEVEL else UNDECIDED, text, strip=strip)
    if batch == "128":
        near = last.p_within(MARGIN) < 0.05
        return decide(True, text, "" if near else f"MVN-Grad is not shown to be within {MARGIN} of AdaBelief.", strip)
    return decide(True, text, "" if last.p_above(0) < LEVEL else "MVN-Grad is not shown to be above AdaBelief.", strip)


for batch in ("128", "1024"):
    judges(f"cifar-order-{batch}")(partial(judge_order, batch=batch))
    for kind in ("test", "train"):
        judges(f"cifar-{kind}-{batch}")(partial(judge_accuracy, kind=kind, batch=batch))
        judges(f"cifar-deviation-{kind}-{batch}")(partial(judge_deviation, kind=kind, batch=batch))


@judges("time-cifar")
def compare_times(result: dict[str, Any]) -> Verdict:
    times = {
        batch: [seconds for row in cells.values() for seconds in row["seconds"] if seconds is not None]
        for batch, cells in result["cells"].items()
    }
    if not all(times.values()):
        return Verdict(NOT_RUN, "", "At one batch size, no run had the GPU to itself yet.")
    rows = (
        Estimate(f"batch {batch}", median(of), (min(of), max(of)), len(of), PAPER_SECONDS[batch])
        for batch, of in times.items()
    )
    strip = Strip("seconds of a run without compilation, median and range", tuple(rows), 0)
    return Verdict(COMPARED, "", "Another GPU and another loop.", strip)


@judges("cifar-gap")
def judge_gap(result: dict[str, Any]) -> Verdict:
    checkpoints, counts, negative, rows = len(result["epochs"]), [], [], []
    for cell, row in result["trained_with"].items():
        positive = sum(gap > ERRORS * error for gap, error in zip(row["gap"], row["error"], strict=True))
        shares = [100 * gap / before for gap, before in zip(row["gap"], row["before"], strict=True)]
        counts.append(positive)
        negative.append(sum(gap < -ERRORS * error for gap, error in zip(row["gap"], row["error"], strict=True)))
        rows.append(Estimate(f"{cell} trains", median(shares), (min(shares), max(shares)), 1))
    text = f"positive at {' and '.join(map(str, counts))} of {checkpoints} checkpoints, K = {result['K']}"
    caveat = "Not at every checkpoint." if min(counts) < checkpoints else ""
    strip = Strip("the gap, % of AdaBelief's variance, median and range over checkpoints", tuple(rows))
    if min(counts) < 0.75 * checkpoints:
        return Verdict(NOT_REPRODUCED if max(negative) >= 0.25 * checkpoints else UNDECIDED, text, strip=strip)
    return decide(True, text, caveat, strip)
