"""The verdict on state in fewer bits."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from mvngrad_lab.report.statistics import worse_by_at_most
from mvngrad_lab.report.tables import check_rows, make_strip
from mvngrad_lab.report.verdicts import Verdict, decide, judges

MARGIN = 0.3
"""Points of accuracy."""


@judges("cifar-state-precision")
def judge_state_precision(result: dict[str, Any]) -> Verdict:
    values, verdict = check_rows(result["states"], "test_accuracy", link="with")
    if verdict:
        return verdict
    texts, reference, within, widths = list[str](), values["float32"], list[str](), list[float]()
    for state in ("bf16", "int8"):
        bound, loss = worse_by_at_most(values[state], reference), fmean(reference) - fmean(values[state])
        texts.append(f"{state} worse by {loss:+.2f}, at most {bound:+.2f}")
        widths.append(bound - loss)
        if bound <= MARGIN:
            within.append(state)
    caveat, strip = f"Only {within[0]}." if len(within) == 1 else "", make_strip("test accuracy, %", values)
    return decide(bool(within), "; ".join(texts), caveat, strip, could_hold=min(widths) <= MARGIN)
