"""Verdicts on what Table 2 says of the four optimizers, as far as a stand-in text shows it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mvngrad_lab.report.statistics import variance_above, welch
from mvngrad_lab.report.tables import OPTIMIZERS, SECOND_MOMENT, VARIANCE, count_runs, describe, get_values
from mvngrad_lab.report.verdicts import (
    COMPARED,
    NOT_REPRODUCED,
    NOT_RUN,
    UNDECIDED,
    Verdict,
    decided,
    judges,
    transferred,
)
from mvngrad_lab.tasks.language.recipe import table2

LEVEL, LEVEL_OF_SPREAD = 0.01, 0.05
STAND_IN = (
    "On the stand-in and for 3,000 steps, not on the paper's text for 100,000: optimizer with optimizer, no number "
    "with the paper's."
)
NOT_BEST = "These runs are not at what the sweep of rates has as the best for each, or it is not done."
RATE = f"{table2()[0].lr:g}"
"""At which all four are compared."""
CLASSES = {cell: cell.replace("-", "") for cell in ("AdamW", "MVN-GradW", "LaPropW", "AdaBeliefW")}
"""As the paper writes them, and their classes."""
WITHIN = 0.05


def losses(rows: dict[str, Any]) -> dict[str, list[float]]:
    return {cell: get_values(row, "validation_loss") for cell, row in rows.items()}


def told(values: dict[str, list[float]]) -> str:
    return f"validation loss on the stand-in: {describe(values, 4) or 'none yet'}"


def at_once(table: dict[str, Any], better: Sequence[str], others: Sequence[str]) -> Verdict | None:
    """The verdict where runs of these are missing, or have diverged and so have no loss to compare."""
    rows, text = {cell: table[cell] for cell in (*better, *others)}, told(losses(table))
    if left := count_runs(rows, "to_come"):
        return Verdict(NOT_RUN, text, f"Runs on the stand-in to come: {left}.")
    if lost := count_runs(rows, "diverged"):
        status = NOT_REPRODUCED if any(rows[cell]["diverged"] for cell in better) else UNDECIDED
        return Verdict(status, f"{text}; diverged: {lost}", STAND_IN)
    return None


def common_rate(result: dict[str, Any]) -> str:
    """Who may be held back by the rate that all share."""
    best = result["best_rate"]
    other = [f"{cell} at {best[cell]}" for cell in OPTIMIZERS if best[cell] not in (None, RATE)]
    unknown = [cell for cell in OPTIMIZERS if best[cell] is None]
    return " ".join(
        [f"In the sweep of rates {', '.join(other)} did better than at {RATE}."] * bool(other)
        + [f"The sweep of rates has no best one for {', '.join(unknown)}."] * bool(unknown)
    )


def below(result: dict[str, Any], low: Sequence[str], high: Sequence[str], table: str = "cells") -> Verdict:
    """Whether each of `low` has a lower mean loss than each of `high`: at one rate, or in `tuned` each at its own."""
    if (verdict := at_once(result[table], low, high)) is not None:
        return verdict
    if table == "tuned" and result["best_rate"] != result["tuned_rate"]:
        return Verdict(NOT_RUN, told(losses(result[table])), NOT_BEST)
    values = losses(result[table])
    pairs = [(values[one], values[other]) for one in low for other in high]
    for_it, against = [welch(*pair) for pair in pairs], [welch(*reversed(pair)) for pair in pairs]
    text = f"{told(values)}; largest p for it {max(for_it):.2g}, smallest against it {min(against):.2g}"
    note = f"{STAND_IN} {common_rate(result) if table == 'cells' else ''}".strip()
    return transferred(max(for_it) < LEVEL, min(against) < LEVEL, text, note)


OTHERS = [cell for cell in OPTIMIZERS if cell != "MVN-Grad"]
judges("stand-in-adam")(partial(below, low=["MVN-Grad"], high=["Adam"]))
judges("stand-in-order")(partial(below, low=["MVN-Grad"], high=OTHERS))
judges("stand-in-variance")(partial(below, low=VARIANCE, high=SECOND_MOMENT))
judges("stand-in-tuned-order")(partial(below, low=["MVN-Grad"], high=OTHERS, table="tuned"))
judges("stand-in-tuned-variance")(partial(below, low=VARIANCE, high=SECOND_MOMENT, table="tuned"))


@judges("stand-in-spread")
def _(result: dict[str, Any]) -> Verdict:
    if (verdict := at_once(result["cells"], (), list(OPTIMIZERS))) is not None:
        return verdict
    values = losses(result["cells"])
    wider = variance_above(values["LaProp"], [values[cell] for cell in OPTIMIZERS if cell != "LaProp"])
    text = f"{told(values)}; p that LaProp varies more {wider:.2g}"
    return transferred(wider < LEVEL_OF_SPREAD, 1 - wider < LEVEL_OF_SPREAD, text, STAND_IN)


# How long a run takes


@judges("time-openwebtext")
def _(result: dict[str, Any]) -> Verdict:
    rows = {row["name"]: row for row in result["overhead"].get("124M", {}).get("rows", [])}
    if not all(f"{name} float32" in rows for name in CLASSES.values()):
        return Verdict(NOT_RUN, "", "`python -m benchmarks.language` was cut short before this part.")
    steps = {cell: rows[f"{name} float32"]["step_seconds"] for cell, name in CLASSES.items()}
    text = "seconds a step: " + ", ".join(f"{cell} {seconds:.4f}" for cell, seconds in steps.items())
    return decided(all(abs(seconds / steps["AdamW"] - 1) <= WITHIN for seconds in steps.values()), text)


@judges("time-wikitext")
def _(result: dict[str, Any]) -> Verdict:
    ours = next((row for row in result["throughput"].get("30M", []) if row["name"] == "ours"), None)
    if ours is None:
        return Verdict(NOT_RUN, "", "`python -m benchmarks.language` was cut short before this part.")
    return Verdict(UNDECIDED, f"{ours['projected_seconds'] / 3600:.2f} h, evaluations not counted", COMPARED)
