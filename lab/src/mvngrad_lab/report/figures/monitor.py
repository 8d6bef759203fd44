"""What a `Monitor` recorded of one parameter group, over steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.ticker import FuncFormatter

from mvngrad.diagnostics.floor import FLOOR_SHARE
from mvngrad_lab.report.figures.style import (
    BOUND,
    LIGHT,
    RC,
    SIZE,
    Mark,
    cell_mark,
    draw_band,
    draw_curve,
    make_axes,
    number,
)
from mvngrad_lab.report.figures.svg import Figure, Panel, make_panel

COLLAPSE = Mark("sign collapse", "mvngrad", marker="D", width=2.2)
FLOOR = Mark("epsilon's floor", "laprop", (7, 2, 1.2, 2), "o")
DEAD = Mark("never had a gradient", "adam", (5, 2.4), "s")
LARGEST = Mark("largest since the last record", "muted", marker="o", width=1.1)
SPIKE = Mark("spike, as high as its norm", "mvngrad", marker="^", line=False)

LAYERS, COLUMNS = 24, 60
"""The most rows and columns of a heat map."""

LAYER_MAPS = (
    ("epsilon_floor", "At epsilon's floor", "The share of coordinates whose divisor is mostly epsilon."),
    ("update", "|update| / lr", "The median size of a step in a layer."),
    ("snr", "|mean| / std", "The median signal to noise in a layer."),
)
"""What heat maps show: the name in a record, a title and a description."""

Entries = Sequence[tuple[int, dict[str, Any]]]
"""(step, a group's entry) of each record."""


def draw(name: str, entries: Entries, losses: Sequence[tuple[int, float]] = ()) -> list[Figure]:
    """All figures of one group; `name` makes their ids unique on a page. `losses` has (step, loss) of the training."""
    with matplotlib.rc_context(RC | {"svg.hashsalt": name}):
        mark = cell_mark(entries[-1][1]["cell"].removeprefix("lean "))
        layers = (_draw_layers(entries, *what) for what in LAYER_MAPS)
        spikes = any(entry["spikes"] for _, entry in entries)
        figures = (
            Figure(
                "Loss",
                "The mean of what was logged since the last record.",
                (_draw_loss(mark, losses),) if losses else (),
            ),
            _draw_coordinates(mark, entries),
            Figure(
                "Where normalizing is at its limits",
                "Shares of coordinates; for a normalizer that keeps the variance, sign collapse is what a second "
                "moment would have made of it.",
                (_draw_shares(entries),),
                (COLLAPSE, FLOOR, DEAD),
            ),
            Figure(
                "Layers, over steps",
                "Parameters from the input to the output, those with most sampled coordinates. A stronger colour is "
                "more.",
                tuple(filter(None, layers)),
            ),
            Figure(
                "Gradient norms",
                "Of all steps since the last record: their median and their largest.",
                tuple(filter(None, [_draw_gradients(mark, entries)])),
                (mark.with_label("median"), LARGEST, *([SPIKE] if spikes else [])),
            ),
        )
        return [figure for figure in figures if figure.panels]


def _column(entries: Entries, *keys: str) -> Any:
    """The values under nested keys, nan where there is none."""
    values = []
    for _, entry in entries:
        value: Any = entry
        for key in keys:
            value = None if value is None else value.get(key)
        values.append(np.nan if value is None else float(value))
    return np.array(values)


def _steps(entries: Entries) -> list[int]:
    return [step for step, _ in entries]


def _draw_coordinates(mark: Mark, entries: Entries) -> Figure:
    """Quantiles over all coordinates of signal to noise and of the step; the figure may have no panel."""
    caption = "Line: the median coordinate. Inner band: the middle half of all. Outer band: from 5% to 95% of them."
    if (hidden := entries[-1][1].get("noise_hidden") or 0.0) >= FLOOR_SHARE:
        caption += f" Signal to noise is a lower bound: epsilon hides the noise of {hidden:.0%} of the coordinates."
    quantiles = (
        _draw_quantiles(mark, entries, "snr", "Signal to noise", "|mean| / std of a gradient"),
        _draw_quantiles(mark, entries, "update", "Size of a step", "|update| / lr of a coordinate"),
    )
    legend = (mark.with_label(f"{mark.label}, median"),)
    return Figure("Coordinates, over steps", caption, tuple(filter(None, quantiles)), legend)


def _draw_quantiles(mark: Mark, entries: Entries, key: str, title: str, label: str) -> Panel | None:
    """The quantiles under `key` over steps, with gaps where a value is missing; None without a median."""
    low, lower, middle, upper, high = (_column(entries, key, q) for q in ("0.05", "0.25", "0.5", "0.75", "0.95"))
    if not np.isfinite(middle).any():
        return None
    at = make_axes("step", label, log="y")
    for bottom, top in ((low, high), (lower, upper)):
        positive = np.where(bottom > 0, bottom, np.nan)  # a quantile of 0 has no place on this axis
        draw_band(at, mark, _steps(entries), positive, top)
    draw_curve(at, mark, _steps(entries), np.where(middle > 0, middle, np.nan))
    first, last = (float(value) for value in middle[np.isfinite(middle)][[0, -1]])
    return make_panel(at, title, f"The median goes from {number(first)} to {number(last)}.")


def _draw_shares(entries: Entries) -> Panel:
    at = make_axes("step", "share of coordinates")
    words = []
    for mark, key in ((COLLAPSE, "sign_collapse"), (FLOOR, "epsilon_floor"), (DEAD, "dead")):
        shares = _column(entries, key)
        draw_curve(at, mark, _steps(entries), shares)
        if np.isfinite(shares[-1]):
            words.append(f"{mark.label} {shares[-1]:.1%}")
    at.set_ylim(-0.03, 1.03)
    at.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    return make_panel(at, "Shares", "At the end: " + ", ".join(words) + ".")


def _draw_gradients(mark: Mark, entries: Entries) -> Panel | None:
    middle, largest = (_column(entries, "gradient_norm", key) for key in ("median", "max"))
    if not np.isfinite(middle).any():
        return None
    at = make_axes("step", "norm of the gradient", log="y")
    draw_curve(at, LARGEST, _steps(entries), largest)
    draw_curve(at, mark, _steps(entries), middle)
    spikes = list({spike["step"]: spike for _, entry in entries for spike in entry["spikes"]}.values())
    for spike in spikes:
        at.axvline(spike["step"], color=LIGHT["line"], linewidth=BOUND.width, zorder=0)
    heights = [(spike["step"], spike["median"] * spike["multiple"]) for spike in spikes if spike["multiple"]]
    if heights:
        at.plot(*zip(*heights, strict=True), **SPIKE.points)
    sizes = [spike["multiple"] for spike in spikes if spike["multiple"] is not None]
    words = f"{len(spikes)} spikes" + (f", the largest {number(max(sizes))} times the median." if sizes else ".")
    return make_panel(at, "Gradients and their spikes", words)


def _draw_loss(mark: Mark, losses: Sequence[tuple[int, float]]) -> Panel:
    at = make_axes("step", "loss")
    steps, values = zip(*losses, strict=True)
    draw_curve(at, mark, steps, values)
    return make_panel(at, "Loss", f"From {number(values[0])} to {number(values[-1])}.")


def _draw_layers(entries: Entries, key: str, title: str, words: str) -> Panel | None:
    """A row for each layer and a column for each record, as dark as the value under `key` is large; None if all are 0.

    Shares are as dark as they are. Other values are on a logarithmic scale, from the smallest to the largest shown.
    """
    shown = [entries[i] for i in sorted({round(i) for i in np.linspace(0, len(entries) - 1, COLUMNS)})]
    columns = [{layer["name"]: layer for layer in entry.get("layers", ())} for _, entry in shown]
    largest = sorted(columns[-1].values(), key=lambda layer: -layer["sampled"])[:LAYERS]
    names = [name for name in columns[-1] if columns[-1][name] in largest]
    table = np.array([[column.get(name, {}).get(key) or np.nan for column in columns] for name in names], dtype=float)
    if len(names) < 2 or not np.isfinite(table).any():
        return None
    low, high = np.nanmin(table), np.nanmax(table)
    if key == "epsilon_floor":
        darkness = table
    else:
        darkness = 0.05 + 0.95 * np.log(table / low) / np.log(high / low) if high > low else np.full_like(table, 0.5)
        title = f"{title}, {number(low)} to {number(high)}"
    longest = max(map(len, names))
    at = make_axes("step", "", size=(SIZE[0], 0.9 + 0.19 * len(names)), left=min(2.2, 0.4 + 0.075 * longest))
    steps = _steps(entries)
    edges = [max(0, 2 * steps[0] - steps[1]) if steps[1:] else 0, *_steps(shown)]  # a Monitor may start late
    for row, of_layer in enumerate(darkness):
        for (left, right), dark in zip(pairwise(edges), of_layer, strict=True):
            if np.isfinite(dark):
                at.bar(
                    left, 0.86, right - left, row - 0.43, align="edge", color=LIGHT["mvngrad"], alpha=dark, linewidth=0
                )
    at.set_xlim(edges[0], edges[-1])
    at.set_ylim(len(names) - 0.5, -0.5)
    at.set_yticks(range(len(names)), names)
    at.grid(visible=False)
    return make_panel(at, title, words)
