"""Verdicts on the switch at half of training."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import Any

from scipy import stats

from mvngrad_lab.experiments.switch.arms import SEEDS
from mvngrad_lab.report.verdicts import CAVEAT, NOT_REPRODUCED, NOT_RUN, REPRODUCED, UNDECIDED, Verdict, judges

BUMP, END, LEVEL = 0.02, 0.01, 0.05


def check_seeds(result: dict[str, Any]) -> Verdict | None:
    """The verdict if seeds are missing."""
    done = len(result["seeds"])
    return Verdict(NOT_RUN, f"{done} of {len(SEEDS)} seeds", "Run it again.") if done < len(SEEDS) else None


def interval(values: list[float], level: float = LEVEL / 2) -> tuple[float, float]:
    """The mean and half of the width of its interval by Student's t; `level` is that of one side."""
    width = float(stats.t.isf(level, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return fmean(values), width


def differences(result: dict[str, Any], arm: str, other: str) -> list[float]:
    return [seed["validation_loss"][arm] - seed["validation_loss"][other] for seed in result["seeds"]]


@judges("switch-bump")
def judge_bump(result: dict[str, Any]) -> Verdict:
    if (verdict := check_seeds(result)) is not None:
        return verdict
    converted, fresh = ([seed["bump"][arm] for seed in result["seeds"]] for arm in ("converted", "fresh"))
    mean, width = interval([two / 2 - one for one, two in zip(converted, fresh, strict=True)], LEVEL)
    small, smaller = fmean(converted) < BUMP, mean > width
    text = f"bump {fmean(converted):.4f} nats with from_adamw, {fmean(fresh):.4f} with fresh state"
    if small == smaller:
        return Verdict(REPRODUCED if small else NOT_REPRODUCED, text)
    why = f"Not shown to be below half of that with fresh state, p < {LEVEL}." if small else f"Not below {BUMP} nats."
    return Verdict(CAVEAT, text, why)


@judges("switch-end")
def judge_end(result: dict[str, Any]) -> Verdict:
    if (verdict := check_seeds(result)) is not None:
        return verdict
    mean, width = interval(differences(result, "converted", "AdamW"), LEVEL)
    text = f"converted less AdamW {mean:+.4f} nats, at most {mean + width:+.4f}"
    for other in ("fresh", "MVN-GradW"):
        text += "; less {} {:+.4f} ± {:.4f}".format(other, *interval(differences(result, "converted", other)))
    status = REPRODUCED if mean + width <= END else NOT_REPRODUCED if mean > END else UNDECIDED
    return Verdict(status, text)
