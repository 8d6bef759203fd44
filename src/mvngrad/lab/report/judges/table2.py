"""Verdicts on what Table 2 says of the four optimizers, as far as a stand-in text shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mvngrad.lab.recipes.language import SEEDS, table2
from mvngrad.lab.report.gather import CELLS
from mvngrad.lab.report.statistics import mean_and_deviation, spread_above, welch
from mvngrad.lab.report.verdicts import CAVEAT, NOT_REPRODUCED, NOT_RUN, UNDECIDED, Verdict, judges

LEVEL, LEVEL_OF_SPREAD = 0.01, 0.05
STAND_IN = (
    "On the stand-in and for 3,000 steps, not on the paper's text for 100,000: optimizer with optimizer, no number "
    "with the paper's."
)
VARIANCE, SECOND_MOMENT = ("AdaBelief", "MVN-Grad"), ("Adam", "LaProp")
RATE = f"{table2()[0].lr:g}"
"""At which all four are compared."""


def losses(result: dict[str, Any]) -> dict[str, list[float]]:
    return {cell: [loss for loss in result["cells"][cell]["validation_loss"] if loss is not None] for cell in CELLS}


def told(values: dict[str, list[float]]) -> str:
    cells = ", ".join(f"{cell} {mean_and_deviation(row, 4)} (n = {len(row)})" for cell, row in values.items() if row)
    return f"validation loss on the stand-in: {cells or 'none yet'}"


def at_once(result: dict[str, Any], better: Sequence[str], others: Sequence[str]) -> Verdict | None:
    """The verdict where runs of these are missing, or have diverged and so have no loss to compare."""
    cells, text, compared = result["cells"], told(losses(result)), [*better, *others]
    if missing := {cell: lack for cell in compared if (lack := len(SEEDS) - len(cells[cell]["seeds"]))}:
        left = ", ".join(f"{count} of {cell}" for cell, count in missing.items())
        return Verdict(NOT_RUN, text, f"Runs on the stand-in to come: {left}.")
    if lost := {cell: cells[cell]["diverged"] for cell in compared if cells[cell]["diverged"]}:
        status = NOT_REPRODUCED if lost.keys() & set(better) else UNDECIDED
        named = ", ".join(f"{count} of {cell}" for cell, count in lost.items())
        return Verdict(status, f"{text}; diverged: {named}", STAND_IN)
    return None


def transferred(holds: bool, fails: bool, measured: str, *notes: str) -> Verdict:
    """What holds on another text holds with a caveat; what shows neither way is undecided."""
    status = CAVEAT if holds else NOT_REPRODUCED if fails else UNDECIDED
    return Verdict(status, measured, " ".join([STAND_IN, *filter(None, notes)]))


def tuned(result: dict[str, Any]) -> str:
    """Who may be held back by the rate that all share."""
    best = result["best_rate"]
    other = [f"{cell} at {best[cell]}" for cell in CELLS if best[cell] not in (None, RATE)]
    unknown = [cell for cell in CELLS if best[cell] is None]
    return " ".join(
        [f"In the sweep of rates {', '.join(other)} did better than at {RATE}."] * bool(other)
        + [f"The sweep of rates has no best one for {', '.join(unknown)}."] * bool(unknown)
    )


def below(result: dict[str, Any], low: Sequence[str], high: Sequence[str]) -> Verdict:
    """Whether each of `low` has a lower mean loss than each of `high`."""
    if (verdict := at_once(result, low, high)) is not None:
        return verdict
    values = losses(result)
    pairs = [(values[one], values[other]) for one in low for other in high]
    for_it, against = [welch(*pair) for pair in pairs], [welch(*reversed(pair)) for pair in pairs]
    text = f"{told(values)}; largest p for it {max(for_it):.2g}, smallest against it {min(against):.2g}"
    return transferred(max(for_it) < LEVEL, min(against) < LEVEL, text, tuned(result))


@judges("stand-in-adam")
def _(result: dict[str, Any]) -> Verdict:
    return below(result, ["MVN-Grad"], ["Adam"])


@judges("stand-in-order")
def _(result: dict[str, Any]) -> Verdict:
    return below(result, ["MVN-Grad"], [cell for cell in CELLS if cell != "MVN-Grad"])


@judges("stand-in-variance")
def _(result: dict[str, Any]) -> Verdict:
    return below(result, VARIANCE, SECOND_MOMENT)


@judges("stand-in-spread")
def _(result: dict[str, Any]) -> Verdict:
    if (verdict := at_once(result, (), list(CELLS))) is not None:
        return verdict
    values = losses(result)
    wider = spread_above(values["LaProp"], [values[cell] for cell in CELLS if cell != "LaProp"])
    text = f"{told(values)}; p that LaProp varies more {wider:.2g}"
    return transferred(wider < LEVEL_OF_SPREAD, 1 - wider < LEVEL_OF_SPREAD, text)
