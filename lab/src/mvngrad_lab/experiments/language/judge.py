"""Verdicts on Table 2, as far as a stand-in text can decide it, and on how long runs take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mvngrad_lab.experiments.language.recipes import table2
from mvngrad_lab.report.claims import load_claims
from mvngrad_lab.report.statistics import variance_above, welch
from mvngrad_lab.report.tables import (
    OPTIMIZERS,
    SECOND_MOMENT,
    VARIANCE,
    Row,
    count_runs,
    describe,
    get_values,
    make_strip,
)
from mvngrad_lab.report.verdicts import (
    COMPARED,
    NOT_REPRODUCED,
    NOT_RUN,
    UNDECIDED,
    Estimate,
    Strip,
    Verdict,
    decide_transferred,
    judges,
)

LEVEL, LEVEL_OF_SPREAD = 0.01, 0.05
STAND_IN = (
    "On the stand-in and for 3,000 steps, not on the paper's text for 100,000: optimizer with optimizer, no number "
    "with the paper's."
)
NOT_BEST = "These runs are not at the best rate of the sweep for each, or the sweep is not done."
CUT_SHORT = Verdict(NOT_RUN, "", "`python -m benchmarks.language` was cut short before this part.")
COMMON_RATE = f"{table2()[0].lr:g}"
"""The learning rate at which all four are compared."""
OTHERS = [cell for cell in OPTIMIZERS if cell != "MVN-Grad"]


def get_losses(rows: dict[str, Row]) -> dict[str, list[float]]:
    return {cell: get_values(row, "validation_loss") for cell, row in rows.items()}


def describe_losses(losses: dict[str, list[float]]) -> str:
    return f"validation loss on the stand-in: {describe(losses, 4) or 'none yet'}"


def draw_losses(losses: dict[str, list[float]]) -> Strip:
    return make_strip("validation loss on the stand-in", losses, digits=4)


def check_runs(table: dict[str, Row], better: Sequence[str], others: Sequence[str]) -> Verdict | None:
    """The verdict if runs of these are missing, or have diverged and so have no loss to compare."""
    rows, text = {cell: table[cell] for cell in (*better, *others)}, describe_losses(get_losses(table))
    if left := count_runs(rows, "to_come"):
        return Verdict(NOT_RUN, text, f"Runs on the stand-in to come: {left}.")
    if lost := count_runs(rows, "diverged"):
        status = NOT_REPRODUCED if any(rows[cell]["diverged"] for cell in better) else UNDECIDED
        return Verdict(status, f"{text}; diverged: {lost}", STAND_IN)
    return None


def describe_rates(result: dict[str, Any]) -> str:
    """Which optimizers would do better at another rate than the common one."""
    best = result["best_rate"]
    other = [f"{cell} at {best[cell]}" for cell in OPTIMIZERS if best[cell] not in (None, COMMON_RATE)]
    unknown = [cell for cell in OPTIMIZERS if best[cell] is None]
    return " ".join(
        [f"In the sweep of rates {', '.join(other)} did better than at {COMMON_RATE}."] * bool(other)
        + [f"The sweep of rates has no best one for {', '.join(unknown)}."] * bool(unknown)
    )


def judge_below(result: dict[str, Any], low: Sequence[str], high: Sequence[str], table: str = "cells") -> Verdict:
    """Whether each of `low` has a lower mean loss than each of `high`: at one rate, or in `tuned` each at its best."""
    if (verdict := check_runs(result[table], low, high)) is not None:
        return verdict
    losses = get_losses(result[table])
    if table == "tuned" and result["best_rate"] != result["tuned_rate"]:
        return Verdict(NOT_RUN, describe_losses(losses), NOT_BEST)
    pairs = [(losses[one], losses[other]) for one in low for other in high]
    p_for, p_against = max(welch(*pair) for pair in pairs), min(welch(*reversed(pair)) for pair in pairs)
    text = f"largest p for it {p_for:.2g}, smallest against it {p_against:.2g}"
    note = f"{STAND_IN} {describe_rates(result) if table == 'cells' else ''}".strip()
    return decide_transferred(p_for < LEVEL, p_against < LEVEL, text, note, draw_losses(losses))


judges("stand-in-adam")(partial(judge_below, low=["MVN-Grad"], high=["Adam"]))
judges("stand-in-order")(partial(judge_below, low=["MVN-Grad"], high=OTHERS))
judges("stand-in-variance")(partial(judge_below, low=VARIANCE, high=SECOND_MOMENT))
judges("stand-in-tuned-order")(partial(judge_below, low=["MVN-Grad"], high=OTHERS, table="tuned"))
judges("stand-in-tuned-variance")(partial(judge_below, low=VARIANCE, high=SECOND_MOMENT, table="tuned"))


@judges("stand-in-spread")
def judge_spread(result: dict[str, Any]) -> Verdict:
    if (verdict := check_runs(result["cells"], (), list(OPTIMIZERS))) is not None:
        return verdict
    losses = get_losses(result["cells"])
    p = variance_above(losses["LaProp"], [losses[cell] for cell in OPTIMIZERS if cell != "LaProp"])
    text = f"p that LaProp varies more {p:.2g}"
    return decide_transferred(p < LEVEL_OF_SPREAD, 1 - p < LEVEL_OF_SPREAD, text, STAND_IN, draw_losses(losses))


@judges("time-openwebtext")
def compare_step_times(result: dict[str, Any]) -> Verdict:
    rows = {row["name"]: row for row in result["overhead"].get("124M", {}).get("rows", [])}
    names = {cell: f"{cell.replace('-', '')} float32" for cell in ("AdamW", "MVN-GradW", "LaPropW", "AdaBeliefW")}
    if not set(names.values()) <= rows.keys():
        return CUT_SHORT
    paper = next(claim.values for claim in load_claims() if claim.id == "time-openwebtext")
    steps = {cell: rows[name]["step_seconds"] for cell, name in names.items()}
    of_adamw = [Estimate(c, s / steps["AdamW"], None, None, paper[c] / paper["AdamW"]) for c, s in steps.items()]
    strip = Strip("time of a training step, of AdamW's", tuple(of_adamw), 3)
    return Verdict(COMPARED, f"a step with AdamW takes {steps['AdamW']:.4f} s", strip=strip)


@judges("time-wikitext")
def compare_hours(result: dict[str, Any]) -> Verdict:
    ours = next((row for row in result["throughput"].get("30M", []) if row["name"] == "ours"), None)
    if ours is None:
        return CUT_SHORT
    row = Estimate("100k steps", ours["projected_seconds"] / 3600, reference=4.0)
    return Verdict(COMPARED, "", "Another GPU and another loop.", Strip("hours, evaluations not counted", (row,)))
