"""Verdict on state in fewer bits."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from mvngrad_lab.report.statistics import worse_by_at_most
from mvngrad_lab.report.tables import check_rows, describe
from mvngrad_lab.report.verdicts import NOT_REPRODUCED, Verdict, decided, judges

MARGIN = 0.3
"""Points of accuracy."""


@judges("cifar-state-precision")
def _(result: dict[str, Any]) -> Verdict:
    values, at_once = check_rows(result["states"], "test_accuracy", link="with")
    if at_once:
        return at_once
    text, whole, near, noise = describe(values), values["float32"], list[str](), list[float]()
    for state in ("bf16", "int8"):
        bound, loss = worse_by_at_most(values[state], whole), fmean(whole) - fmean(values[state])
        text += f"; {state} worse by {loss:+.2f}, at most {bound:+.2f}"
        noise.append(bound - loss)
        if bound <= MARGIN:
            near.append(state)
    if not near and min(noise) > MARGIN:
        return Verdict(NOT_REPRODUCED, text, "Equal means would miss it too, so much do seeds deviate.")
    return decided(bool(near), text, f"Only {near[0]}." if len(near) == 1 else "")
