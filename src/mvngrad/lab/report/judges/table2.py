"""Verdicts on what Table 2 says of the four optimizers, as far as a stand-in text shows it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mvngrad.lab.recipes.language import table2
from mvngrad.lab.report.gather import CELLS, SECOND_MOMENT, VARIANCE
from mvngrad.lab.report.seeds import counted, known, told as over_seeds
from mvngrad.lab.report.statistics import spread_above, welch
from mvngrad.lab.report.verdicts import NOT_REPRODUCED, NOT_RUN, UNDECIDED, Verdict, judges, transferred

LEVEL, LEVEL_OF_SPREAD = 0.01, 0.05
STAND_IN = (
    "On the stand-in and for 3,000 steps, not on the paper's text for 100,000: optimizer with optimizer, no number "
    "with the paper's."
)
RATE = f"{table2()[0].lr:g}"
"""At which all four are compared."""


def losses(result: dict[str, Any]) -> dict[str, list[float]]:
    return {cell: known(row, "validation_loss") for cell, row in result["cells"].items()}


def told(values: dict[str, list[float]]) -> str:
    return f"validation loss on the stand-in: {over_seeds(values, 4) or 'none yet'}"


def at_once(result: dict[str, Any], better: Sequence[str], others: Sequence[str]) -> Verdict | None:
    """The verdict where runs of these are missing, or have diverged and so have no loss to compare."""
    rows, text = {cell: result["cells"][cell] for cell in (*better, *others)}, told(losses(result))
    if left := counted(rows, "to_come"):
        return Verdict(NOT_RUN, text, f"Runs on the stand-in to come: {left}.")
    if lost := counted(rows, "diverged"):
        status = NOT_REPRODUCED if any(rows[cell]["diverged"] for cell in better) else UNDECIDED
        return Verdict(status, f"{text}; diverged: {lost}", STAND_IN)
    return None


def tuned(result: dict[str, Any]) -> str:
    """With the note on the stand-in, who may be held back by the rate that all share."""
    best = result["best_rate"]
    other = [f"{cell} at {best[cell]}" for cell in CELLS if best[cell] not in (None, RATE)]
    unknown = [cell for cell in CELLS if best[cell] is None]
    return " ".join(
        [STAND_IN]
        + [f"In the sweep of rates {', '.join(other)} did better than at {RATE}."] * bool(other)
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


judges("stand-in-adam")(partial(below, low=["MVN-Grad"], high=["Adam"]))
judges("stand-in-order")(partial(below, low=["MVN-Grad"], high=[cell for cell in CELLS if cell != "MVN-Grad"]))
judges("stand-in-variance")(partial(below, low=VARIANCE, high=SECOND_MOMENT))


@judges("stand-in-spread")
def _(result: dict[str, Any]) -> Verdict:
    if (verdict := at_once(result, (), list(CELLS))) is not None:
        return verdict
    values = losses(result)
    wider = spread_above(values["LaProp"], [values[cell] for cell in CELLS if cell != "LaProp"])
    text = f"{told(values)}; p that LaProp varies more {wider:.2g}"
    return transferred(wider < LEVEL_OF_SPREAD, 1 - wider < LEVEL_OF_SPREAD, text, STAND_IN)
