"""Accuracy along trainings: the mean over the runs that have kept it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from mvngrad_lab.report.figures.style import cell_mark, draw_curve, make_axes
from mvngrad_lab.report.figures.svg import Panel, make_panel

Curve = Sequence[tuple[int, float]]
"""Epoch and test accuracy at each evaluation."""


def draw_accuracies(title: str, curves: Mapping[str, Sequence[Curve]]) -> list[Panel]:
    """One panel with a line for each optimizer that has curves; an empty list if none has."""
    at, parts = make_axes("epoch", "test accuracy, %"), []
    for name, of_seeds in curves.items():
        if of_seeds:
            means = [fmean(value for _, value in column) for column in zip(*of_seeds, strict=True)]
            draw_curve(at, cell_mark(name), [epoch for epoch, _ in of_seeds[0]], means)
            parts.append(f"{name} {means[-1]:.2f} (n = {len(of_seeds)})")
    return [make_panel(at, title, f"At the end: {', '.join(parts)}.")] if parts else []
