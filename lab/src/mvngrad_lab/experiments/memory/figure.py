"""Figure on memory: bytes of state for each byte of the model."""

from __future__ import annotations

from typing import Any

from mvngrad_lab.report.figures.style import LIGHT, MVNGRAD, cell_mark, label_rows, make_axes, number
from mvngrad_lab.report.figures.svg import Figure, make_panel


def draw(result: dict[str, Any]) -> list[Figure]:
    smaller = {f"MVN-GradW, {name}": size for name, size in result["smaller"].items()}
    sizes = {**result["state"], **smaller}
    at = make_axes("bytes of state / bytes of float32 parameters", "", left=1.5)
    for row, (name, size) in enumerate(sizes.items()):
        mark, alpha = (MVNGRAD, 0.55) if name in smaller else (cell_mark(name), 1.0)
        at.barh(row, size, height=0.62, color=LIGHT[mark.color], alpha=alpha)
        at.annotate(number(size), (size, row), xytext=(4, 0), textcoords="offset points", va="center")
    at.set_xlim(0, 1.12 * max(sizes.values()))
    label_rows(at, list(sizes))
    text = ", ".join(f"{name} {number(size)}" for name, size in sizes.items())
    caption = "Measured after one step. MVN-Grad has a third state tensor; pale: our variants with smaller state."
    return [Figure("State of an optimizer", caption, (make_panel(at, "Times the model, in float32", text),))]


FIGURES = {"memory": draw}
