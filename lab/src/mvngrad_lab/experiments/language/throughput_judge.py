"""Verdicts on how long a run of a language model takes."""

from __future__ import annotations

from typing import Any

from mvngrad_lab.report.verdicts import COMPARED, NOT_RUN, UNDECIDED, Verdict, decided, judges

CELLS = {cell: cell.replace("-", "") for cell in ("AdamW", "MVN-GradW", "LaPropW", "AdaBeliefW")}
"""As the paper writes them, and their classes."""
WITHIN = 0.05


@judges("time-openwebtext")
def _(result: dict[str, Any]) -> Verdict:
    rows = {row["name"]: row for row in result["overhead"].get("124M", {}).get("rows", [])}
    if not all(f"{name} float32" in rows for name in CELLS.values()):
        return Verdict(NOT_RUN, "", "`python -m benchmarks.language` was cut short before this part.")
    steps = {cell: rows[f"{name} float32"]["step_seconds"] for cell, name in CELLS.items()}
    text = "seconds a step: " + ", ".join(f"{cell} {seconds:.4f}" for cell, seconds in steps.items())
    return decided(all(abs(seconds / steps["AdamW"] - 1) <= WITHIN for seconds in steps.values()), text)


@judges("time-wikitext")
def _(result: dict[str, Any]) -> Verdict:
    ours = next((row for row in result["throughput"].get("30M", []) if row["name"] == "ours"), None)
    if ours is None:
        return Verdict(NOT_RUN, "", "`python -m benchmarks.language` was cut short before this part.")
    return Verdict(UNDECIDED, f"{ours['projected_seconds'] / 3600:.2f} h, evaluations not counted", COMPARED)
