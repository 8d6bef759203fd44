"""Verdict on state in fewer bits."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from mvngrad.lab.recipes.cifar100 import SEEDS
from mvngrad.lab.report.statistics import mean_and_deviation, worse_by_at_most
from mvngrad.lab.report.verdicts import NOT_RUN, Verdict, decided, judges

MARGIN = 0.3
"""Points of accuracy."""


@judges("cifar-state-precision")
def _(result: dict[str, Any]) -> Verdict:
    states = result["states"]
    values = {state: [v for v in row["test_accuracy"] if v is not None] for state, row in states.items()}
    text = ", ".join(f"{state} {mean_and_deviation(row)} (n = {len(row)})" for state, row in values.items() if row)
    missing = {state: len(SEEDS) - len(row["seeds"]) for state, row in states.items()}
    if any(missing.values()):
        left = ", ".join(f"{count} with {state}" for state, count in missing.items() if count)
        return Verdict(NOT_RUN, text, f"Runs to come: {left}.")
    if lost := {state: row["diverged"] for state, row in states.items() if row["diverged"]}:
        return decided(False, f"{text}; diverged: " + ", ".join(f"{n} with {state}" for state, n in lost.items()))
    whole, near = values["float32"], []
    for state in ("bf16", "int8"):
        bound, loss = worse_by_at_most(values[state], whole), fmean(whole) - fmean(values[state])
        text += f"; {state} worse by {loss:+.2f}, at most {bound:+.2f}"
        if bound <= MARGIN:
            near.append(state)
    return decided(bool(near), text, f"Only {near[0]}." if len(near) == 1 else "")
