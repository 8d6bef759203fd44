"""Verdict on state in fewer bits."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from mvngrad.lab.report.judges.table1 import column
from mvngrad.lab.report.seeds import told
from mvngrad.lab.report.statistics import worse_by_at_most
from mvngrad.lab.report.verdicts import Verdict, decided, judges

MARGIN = 0.3
"""Points of accuracy."""


@judges("cifar-state-precision")
def _(result: dict[str, Any]) -> Verdict:
    values, at_once = column(result["states"], "test_accuracy", link="with")
    if at_once:
        return at_once
    text, whole, near = told(values), values["float32"], list[str]()
    for state in ("bf16", "int8"):
        bound, loss = worse_by_at_most(values[state], whole), fmean(whole) - fmean(values[state])
        text += f"; {state} worse by {loss:+.2f}, at most {bound:+.2f}"
        if bound <= MARGIN:
            near.append(state)
    return decided(bool(near), text, f"Only {near[0]}." if len(near) == 1 else "")
