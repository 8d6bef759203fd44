"""Verdicts on the memory of the optimizers."""

from __future__ import annotations

from typing import Any

from mvngrad_lab.report.verdicts import Estimate, Strip, Verdict, decide, judges


def judge_sizes(result: dict[str, Any], others: int, label: str) -> Verdict:
    """Compare the state, plus `others` tensors of the model's size, with the number of tensors in the paper."""
    sizes = {cell: state + others for cell, state in result["state"].items()}
    paper = {cell: others + (3 if cell == "MVN-GradW" else 2) for cell in sizes}
    holds = all(abs(size / paper[cell] - 1) <= 0.01 for cell, size in sizes.items())
    rows = [Estimate(cell, size, reference=paper[cell]) for cell, size in sizes.items()]
    rows += [Estimate(f"MVN-GradW, {name}", state + others) for name, state in result["smaller"].items()]
    return decide(holds, "", strip=Strip(label, tuple(rows)))


@judges("memory-states")
def _(result: dict[str, Any]) -> Verdict:
    return judge_sizes(result, 0, "state, in sizes of the model")


@judges("memory-total")
def _(result: dict[str, Any]) -> Verdict:
    return judge_sizes(result, 2, "parameters, gradients and state, in sizes of the model")
