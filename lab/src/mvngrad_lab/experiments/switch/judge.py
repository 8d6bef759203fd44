"""Verdicts on the switch at half of training."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import Any

from scipy import stats

from mvngrad_lab.experiments.switch.records import SEEDS
from mvngrad_lab.report.statistics import OUR_LEVEL, mean_interval
from mvngrad_lab.report.tables import make_mean_strip
from mvngrad_lab.report.verdicts import (
    CAVEAT,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    UNDECIDED,
    Estimate,
    Strip,
    Verdict,
    judges,
)  # fmt: skip

BUMP, END = 0.02, 0.01


def check_seeds(result: dict[str, Any]) -> Verdict | None:
    """The verdict if seeds are missing."""
    done = len(result["seeds"])
    return Verdict(NOT_RUN, f"{done} of {len(SEEDS)} seeds", "Run it again.") if done < len(SEEDS) else None


def one_sided(values: list[float]) -> tuple[float, float]:
    """The mean, and how far OUR_LEVEL's one-sided bound by Student's t is from it."""
    return fmean(values), float(stats.t.isf(OUR_LEVEL, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def differences(result: dict[str, Any], arm: str, other: str) -> list[float]:
    return [seed["validation_loss"][arm] - seed["validation_loss"][other] for seed in result["seeds"]]


@judges("switch-bump")
def judge_bump(result: dict[str, Any]) -> Verdict:
    if (verdict := check_seeds(result)) is not None:
        return verdict
    converted, fresh = ([seed["bump"][arm] for seed in result["seeds"]] for arm in ("converted", "fresh"))
    mean, width = one_sided([two / 2 - one for one, two in zip(converted, fresh, strict=True)])
    small, smaller = fmean(converted) < BUMP, mean > width
    strip = make_mean_strip("bump, nats", {"with from_adamw": converted, "with fresh state": fresh}, digits=4)
    if small == smaller:
        return Verdict(REPRODUCED if small else NOT_REPRODUCED, "", strip=strip)
    why = (
        f"Not shown to be below half of that with fresh state, p < {OUR_LEVEL}." if small else f"Not below {BUMP} nats."
    )
    return Verdict(CAVEAT, "", why, strip)


@judges("switch-end")
def judge_end(result: dict[str, Any]) -> Verdict:
    if (verdict := check_seeds(result)) is not None:
        return verdict
    less = {other: differences(result, "converted", other) for other in ("AdamW", "fresh", "MVN-GradW")}
    mean, width = one_sided(less["AdamW"])
    rows = (
        Estimate(f"less {other}", fmean(of), mean_interval(of), len(of), END if other == "AdamW" else None)
        for other, of in less.items()
    )
    strip = Strip("loss of converted, nats, mean over seeds and 95% interval", tuple(rows), 4, "limit")
    status = REPRODUCED if mean + width <= END else NOT_REPRODUCED if mean > END else UNDECIDED
    return Verdict(status, f"at most {mean + width:+.4f} above AdamW (one-sided)", strip=strip)
