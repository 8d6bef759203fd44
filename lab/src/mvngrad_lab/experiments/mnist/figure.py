"""fig:loss_smallbatch, fig:loss_largebatch and fig:thm_vgap_ada_prop: loss, spikes and the variance gap on MNIST."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from mvngrad_lab.report.figures.style import (
    LIGHT,
    MARKS,
    Mark,
    cell_mark,
    draw_band,
    draw_curve,
    label_columns,
    make_axes,
    number,
)
from mvngrad_lab.report.figures.svg import Figure, Panel, Table, make_panel


def draw_curves(result: dict[str, Any]) -> list[Figure]:
    seeds = len(result["seeds"])
    return [_losses(result["panels"], seeds, result["data"]), _spikes(result["panels"], seeds, result["spike_rule"])]


def format_mean(values: list[float | None]) -> str:
    """Mean ± standard deviation over seeds, to the deviation's two digits; runs that did not stay finite are counted.

    >>> format_mean([1.0, 2.0, 3.0]), format_mean([0.5, None]), format_mean([None])
    ('2.0 ± 1.0', '0.5, 1 not finite', '1 not finite')
    """
    finite = [value for value in values if value is not None]
    rest = [f"{len(values) - len(finite)} not finite"] if len(finite) < len(values) else []
    if len(finite) < 2 or not (deviation := stdev(finite)):
        return ", ".join([*(number(value) for value in finite[:1]), *rest])
    digits = max(0, 1 - math.floor(math.log10(deviation)))
    if digits > 5 or deviation > 1e4:
        return ", ".join([f"{number(fmean(finite))} ± {number(deviation, 2)}", *rest])
    return ", ".join([f"{fmean(finite):.{digits}f} ± {deviation:.{digits}f}", *rest])


def _losses(panels: dict[str, Any], seeds: int, data: str) -> Figure:
    drawn: list[Panel] = []
    rows: list[tuple[str, ...]] = []
    for name, panel in panels.items():
        axes = make_axes("step", "training loss, mean of a bin of batches", log="y")
        for label, cell in panel["cells"].items():
            _draw_seeds(axes, cell_mark(label), cell["steps"], np.array(cell["loss"], dtype=float))
            rows.append((name, label, *(format_mean(cell[key]) for key in ("final_loss", "test_accuracy", "spikes"))))
        finals = ", ".join(f"{label} {format_mean(cell['final_loss'])}" for label, cell in panel["cells"].items())
        (beta1, beta2), lr = panel["betas"], panel["lr"]
        title = f"Batch {panel['batch']}, lr {lr:g}, β = ({beta1:g}, {beta2:g}), {panel['steps']:,} steps"
        drawn.append(make_panel(axes, title, f"Loss over the last tenth of the run: {finals}."))
    return Figure(
        "Training loss of a two-layer network on MNIST",
        f"Line: mean over {seeds} seeds. Band: from the lowest to the highest seed. Data: {data}.",
        tuple(drawn),
        tuple(MARKS.values()),
        Table(
            f"Mean ± standard deviation, n = {seeds} seeds",
            ("setting", "optimizer", "final training loss", "test accuracy, %", "loss spikes"),
            tuple(rows),
        ),
    )


def _spikes(panels: dict[str, Any], seeds: int, rule: str) -> Figure:
    drawn = []
    for name, panel in panels.items():
        counts = {label: cell["spikes"] for label, cell in panel["cells"].items()}
        labels = list(counts)
        axes = make_axes("", "loss spikes in a run")
        for index, label in enumerate(labels):
            offsets = np.linspace(-0.14, 0.14, len(counts[label])) if len(counts[label]) > 1 else [0.0]
            axes.plot(index + np.asarray(offsets), sorted(counts[label]), **cell_mark(label).points)
        label_columns(axes, labels)
        top = max(5, *(count for row in counts.values() for count in row))
        axes.set_ylim(-0.05 * top, 1.05 * top)
        means = ", ".join(f"{label} {format_mean(row)}" for label, row in counts.items())
        drawn.append(make_panel(axes, f"Spikes, {name}", f"Loss spikes in a run: {means}."))
    return Figure(
        "Smoothness, counted", f"One mark for each of {seeds} seeds. {rule[:1].upper()}{rule[1:]}.", tuple(drawn)
    )


def draw_gap(result: dict[str, Any]) -> list[Figure]:
    steps, trained = result["steps"], result["trained_with"]
    gaps = {name: np.array(measured["gap"], dtype=float) for name, measured in trained.items()}
    shares = {name: gaps[name] / np.array(measured["before"], dtype=float) for name, measured in trained.items()}
    positive = all((gap > 0).all() for gap in gaps.values())
    left = make_axes("training step", "Var(AdaBelief's update) − Var(MVN-Grad's)", log="xy" if positive else "x")
    right = make_axes("training step", "gap / Var(AdaBelief's update)", log="x")
    right.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    for name in trained:
        _draw_seeds(left, cell_mark(name), steps, gaps[name])
        _draw_seeds(right, cell_mark(name), steps, shares[name])
    for axes in (right,) if positive else (left, right):
        axes.axhline(0, color=LIGHT["muted"], linewidth=0.8)
    words = "; ".join(
        f"trained with {name}, {(gap > 0).sum()} of {gap.size} measured gaps are positive, on average "
        f"{shares[name].mean():.0%} of AdaBelief's variance"
        for name, gap in gaps.items()
    )
    return [
        Figure(
            "The variance gap on MNIST",
            f"At each checkpoint the state is frozen, {result['K']} mini-batches are drawn, and the variances of the "
            f"next update are averaged over all parameters. Line: mean over {len(result['seeds'])} seeds; band: lowest "
            f"to highest. In short: {words}. Data: {result['data']}.",
            (make_panel(left, "The gap", words), make_panel(right, "As a share of AdaBelief's variance", words)),
            tuple(cell_mark(name).with_label(f"trained with {name}") for name in trained),
        )
    ]


def _draw_seeds(axes: Axes, mark: Mark, steps: list[int], values: Any) -> None:
    draw_band(axes, mark, steps, values.min(axis=0), values.max(axis=0))
    draw_curve(axes, mark, steps, values.mean(axis=0))


FIGURES = {"mnist-curves": draw_curves, "mnist-gap": draw_gap}
