"""MVN-Grad's state in float32, bf16 and int8: test accuracy and memory."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from mvngrad_lab.report.figures.svg import Figure, Table
from mvngrad_lab.report.statistics import welch, worse_by_at_most
from mvngrad_lab.report.tables import Row, format_count, format_mean, get_values


def draw(result: dict[str, Any]) -> list[Figure]:
    states = result["states"]
    reference, rows = get_values(states["float32"], "test_accuracy"), []
    for state, row in states.items():
        values, compared = get_values(row, "test_accuracy"), ("", "", "")
        if state != "float32" and min(len(values), len(reference)) > 1:
            p = 2 * min(welch(values, reference), welch(reference, values))
            bound = worse_by_at_most(values, reference)
            compared = (f"{fmean(values) - fmean(reference):+.2f}", f"{p:.2g}", f"{bound:.2f}")
        rows.append((state, format_count(row), format_mean(row, "test_accuracy"), *compared, _format_bytes(row)))
    head = ("state", "runs", "test, %", "less float32", "p", "worse by at most", "bytes of state (a parameter)")
    caption = (
        f"{result['done']} of {result['of']} runs of 200 epochs at batch 1024 are done. Mean ± standard deviation over "
        "seeds; p of Welch's two-sided test; the bound is one-sided, of 95%. bf16 and int8 are rounded stochastically. "
        f"Bytes include scales and step counts. {result['data']}"
    )
    return [Figure("MVN-Grad's state in fewer bits", caption, table=Table("Test accuracy", head, tuple(rows)))]


def _format_bytes(row: Row) -> str:
    """Of the first run that counted them; runs of earlier versions did not."""
    for state_bytes, parameters in zip(row["state_bytes"], row["parameters"], strict=True):
        if state_bytes is not None and parameters:
            return f"{state_bytes:,} ({state_bytes / parameters:.2f})"
    return "not counted"


FIGURES = {"state-precision": draw}
