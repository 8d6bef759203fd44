"""Verdicts on the memory of the optimizers."""

from __future__ import annotations

from typing import Any

from mvngrad_lab.report.verdicts import Verdict, decide, judges


def judge_sizes(result: dict[str, Any], others: int, label: str) -> Verdict:
    """Compare the state, plus `others` tensors of the model's size, with the number of tensors in the paper."""
    sizes = {cell: state + others for cell, state in result["state"].items()}
    holds = all(abs(size / (others + (3 if cell == "MVN-GradW" else 2)) - 1) <= 0.01 for cell, size in sizes.items())
    text = ", ".join(f"{cell} {size:.2f}" for cell, size in sizes.items())
    small = ", ".join(f"{name} {state + others:.2f}" for name, state in result["smaller"].items())
    return decide(holds, f"{label}: {text}. MVN-GradW with smaller state: {small}")


@judges("memory-states")
def _(result: dict[str, Any]) -> Verdict:
    return judge_sizes(result, 0, "state, in sizes of the model")


@judges("memory-total")
def _(result: dict[str, Any]) -> Verdict:
    return judge_sizes(result, 2, "parameters, gradients and state, in sizes of the model")
