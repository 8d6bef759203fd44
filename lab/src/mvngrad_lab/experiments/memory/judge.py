"""Verdicts on what the optimizers keep."""

from __future__ import annotations

from typing import Any

from mvngrad_lab.report.verdicts import Verdict, decided, judges


def tensors(result: dict[str, Any], beside: int, rule: str) -> Verdict:
    found = {cell: state + beside for cell, state in result["state"].items()}
    text = ", ".join(f"{cell} {value:.2f}" for cell, value in found.items())
    expected = {cell: (3 if cell == "MVN-GradW" else 2) + beside for cell in found}
    small = ", ".join(f"{name} {value + beside:.2f}" for name, value in result["smaller"].items())
    holds = all(abs(found[cell] / due - 1) <= 0.01 for cell, due in expected.items())
    return decided(holds, f"{rule}: {text}. MVN-GradW with smaller state: {small}")


@judges("memory-states")
def _(result: dict[str, Any]) -> Verdict:
    return tensors(result, 0, "state, in sizes of the model")


@judges("memory-total")
def _(result: dict[str, Any]) -> Verdict:
    return tensors(result, 2, "parameters, gradients and state, in sizes of the model")
