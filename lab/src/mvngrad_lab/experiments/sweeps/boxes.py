"""Boxes over many runs, every run visible, a value that is not finite as a cross at the edge; and runs by settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from mvngrad_lab.report.figures.style import LIGHT, SIZE, Mark, label_columns, label_rows, make_axes

GOLDEN = 0.6180339887498949
"""The fractional parts of its multiples are evenly spread, however many: they spread the marks over a box."""
Cell = tuple[str, float]
"""A text and its rank."""
WIDE = 20
"""Positive values that span more than this factor are drawn on a logarithmic axis."""


def draw_boxes(
    y: str,
    values: Mapping[Mark, Sequence[float]],
    quartiles: Mapping[str, Sequence[float]],
    higher: bool,
    failures: Mapping[str, str],
) -> Axes:
    """One box for each optimizer with its runs on it; `failures` describes the crosses at the edge."""
    axes = _make_axes(y, [value for of in values.values() for value in of], higher, [mark.label for mark in values])
    bottom, top = axes.get_ylim()
    for index, (mark, of) in enumerate(values.items()):
        low, median, high = (min(max(value, bottom), top) for value in quartiles[mark.label])
        finite = sorted(value for value in of if math.isfinite(value))
        # Whiskers are measured in lengths of the box. If that is not finite, they reach to the last run.
        reach = 1.5 * (high - low) if all(map(math.isfinite, quartiles[mark.label])) else math.inf
        near = [value for value in finite if low - reach <= value <= high + reach]
        line = {"color": LIGHT[mark.color], "linewidth": 1.0}
        axes.bxp(
            [{"med": median, "q1": low, "q3": high, "whislo": min([low, *near]), "whishi": max([high, *near])}],
            positions=[index],
            widths=0.62,
            showfliers=False,
            boxprops={**line, "linewidth": 1.2},
            whiskerprops=line,
            capprops=line,
            medianprops={**line, "linewidth": 2.8},
            manage_ticks=False,
        )
        spread = [index + 0.5 * ((GOLDEN * i) % 1 - 0.5) for i in range(len(of))]
        axes.plot(spread[: len(finite)], finite, **{**mark.points, "markersize": 3.2, "alpha": 0.65})
        _draw_crosses(axes, mark, spread[: len(of) - len(finite)], higher)
        if failures[mark.label]:
            axes.annotate(
                failures[mark.label].replace(", ", ",\n"),
                (index, _edge(higher)),
                xycoords=axes.get_xaxis_transform(),
                xytext=(0, 7 if higher else -7),
                textcoords="offset points",
                ha="center",
                va="bottom" if higher else "top",
                fontsize=8,
            )
    return axes


def draw_cells(
    mark: Mark, x: str, y: str, columns: Sequence[str], rows: Sequence[str], values: Sequence[Sequence[Cell]]
) -> Axes:
    """A text for each combination of settings, shaded by its rank from 0 to 1; not shaded if the rank is negative."""
    axes = make_axes(x, y, size=(SIZE[0], 0.8 + 0.24 * len(rows)), left=0.95)
    best = max(rank for row in values for _, rank in row)
    for i, row in enumerate(values):
        for j, (text, rank) in enumerate(row):
            if rank >= 0:
                alpha = round(0.04 + 0.36 * rank, 2)
                color = LIGHT[mark.color]
                axes.add_patch(Rectangle((j - 0.48, i - 0.44), 0.96, 0.88, facecolor=color, alpha=alpha, linewidth=0))
            weight = "bold" if rank == best >= 0 else "normal"
            axes.text(j, i, text, ha="center", va="center", fontsize=8.5, weight=weight)
    label_rows(axes, rows)
    label_columns(axes, columns)
    return axes


def _make_axes(y: str, values: Sequence[float], higher: bool, ticks: Sequence[str]) -> Axes:
    finite = [value for value in values if math.isfinite(value)]
    log = min(finite) > 0 and max(finite) > WIDE * min(finite)
    axes = make_axes("", y, log="y" if log else "")
    low, high = (math.log10(value) if log else value for value in (min(finite), max(finite)))
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
    edge = 4.5 * margin if len(finite) < len(values) else margin  # leaves room for crosses and their number
    low, high = low - (edge if higher else margin), high + (margin if higher else edge)
    axes.set_ylim(*((10**low, 10**high) if log else (low, high)))
    label_columns(axes, ticks)
    return axes


def _edge(higher: bool) -> float:
    """The height of the worst values, from 0 to 1."""
    return 0.03 if higher else 0.97


def _draw_crosses(axes: Axes, mark: Mark, x: Sequence[float], higher: bool) -> None:
    style: dict[str, Any] = {"color": LIGHT[mark.color], "marker": "x", "markersize": 5, "linestyle": "none"}
    axes.plot(x, [_edge(higher)] * len(x), transform=axes.get_xaxis_transform(), **style)
