"""State in float32, bf16 and int8: the accuracy it leads to, and what it takes."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from mvngrad_lab.report.figures.svg import Figure, Table
from mvngrad_lab.report.statistics import welch, worse_by_at_most
from mvngrad_lab.report.tables import format_count, format_mean, get_values


def draw(result: dict[str, Any]) -> list[Figure]:
    states = result["states"]
    whole, rows = get_values(states["float32"], "test_accuracy"), []
    for state, row in states.items():
        mine, compared = get_values(row, "test_accuracy"), ("", "", "")
        if state != "float32" and min(len(mine), len(whole)) > 1:
            p, bound = 2 * min(welch(mine, whole), welch(whole, mine)), worse_by_at_most(mine, whole)
            compared = (f"{fmean(mine) - fmean(whole):+.2f}", f"{p:.2g}", f"{bound:.2f}")
        rows.append((state, format_count(row), format_mean(row, "test_accuracy"), *compared, _bytes(row)))
    head = ("state", "runs", "test, %", "less float32", "p", "worse by at most", "bytes of state (a parameter)")
    caption = (
        f"{result['done']} of {result['of']} runs of 200 epochs at batch 1024 are done. Mean ± deviation over seeds; "
        "p of Welch's test, two-sided; the bound is one-sided, of 95%. bf16 and int8 are rounded at random. Bytes are "
        f"of all that the optimizer keeps, scales and step counts too. {result['data']}"
    )
    return [Figure("MVN-Grad's state in fewer bits", caption, (), (), Table("Test accuracy", head, tuple(rows)))]


def _bytes(row: dict[str, Any]) -> str:
    """Of the first run that counted them; runs of earlier versions did not."""
    for kept, parameters in zip(row["state_bytes"], row["parameters"], strict=True):
        if kept is not None and parameters:
            return f"{kept:,} ({kept / parameters:.2f})"
    return "not counted"


FIGURES = {"state-precision": draw}
