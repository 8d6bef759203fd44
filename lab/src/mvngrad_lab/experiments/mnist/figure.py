"""fig:loss_smallbatch and fig:loss_largebatch: training loss on MNIST, and the spikes in it."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter

from mvngrad_lab.experiments.mnist import gap_figure
from mvngrad_lab.report.figures.style import MARKS, cell_mark, draw_band, draw_curve, make_axes, number
from mvngrad_lab.report.figures.svg import Figure, Panel, Table, make_panel


def draw(result: dict[str, Any]) -> list[Figure]:
    seeds = len(result["seeds"])
    return [_losses(result["panels"], seeds, result["data"]), _spikes(result["panels"], seeds, result["spike_rule"])]


def _setting(shown: dict[str, Any]) -> str:
    beta1, beta2 = shown["betas"]
    return f"batch {shown['batch']}, lr {shown['lr']:g}, β = ({beta1:g}, {beta2:g}), {shown['steps']:,} steps"


def spread(values: list[float | None]) -> str:
    """Mean ± standard deviation over seeds, to the deviation's two digits; runs that did not stay finite are counted.

    >>> spread([1.0, 2.0, 3.0]), spread([0.5, None]), spread([None])
    ('2.0 ± 1.0', '0.5, 1 not finite', '1 not finite')
    """
    known = [value for value in values if value is not None]
    lost = [f"{len(values) - len(known)} not finite"] if len(known) < len(values) else []
    if len(known) < 2 or not (deviation := stdev(known)):
        return ", ".join([*(number(value) for value in known[:1]), *lost])
    digits = max(0, 1 - math.floor(math.log10(deviation)))
    if digits > 5 or deviation > 1e4:
        return ", ".join([f"{number(fmean(known))} ± {number(deviation, 2)}", *lost])
    return ", ".join([f"{fmean(known):.{digits}f} ± {deviation:.{digits}f}", *lost])


def _losses(panels: dict[str, Any], seeds: int, data: str) -> Figure:
    drawn: list[Panel] = []
    rows: list[tuple[str, ...]] = []
    for name, shown in panels.items():
        at = make_axes("step", "training loss, mean of a bin of batches", log="y")
        for label, of in shown["cells"].items():
            mark, losses = cell_mark(label), np.array(of["loss"], dtype=float)
            steps = of["steps"]
            draw_band(at, mark, steps, losses.min(axis=0), losses.max(axis=0))
            draw_curve(at, mark, steps, losses.mean(axis=0))
            rows.append((name, label, *(spread(of[key]) for key in ("final_loss", "test_accuracy", "spikes"))))
        finals = ", ".join(f"{label} {spread(of['final_loss'])}" for label, of in shown["cells"].items())
        drawn.append(make_panel(at, _setting(shown).capitalize(), f"Loss over the last tenth of the run: {finals}."))
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
    for name, shown in panels.items():
        cells = list(shown["cells"])
        at = make_axes("", "loss spikes in a run")
        for place, label in enumerate(cells):
            counts = sorted(shown["cells"][label]["spikes"])
            offsets = np.linspace(-0.14, 0.14, len(counts)) if len(counts) > 1 else [0.0]
            at.plot(place + np.asarray(offsets), counts, **cell_mark(label).points)
        at.xaxis.set_major_locator(FixedLocator(range(len(cells))))
        at.xaxis.set_major_formatter(FuncFormatter(lambda place, _, cells=cells: cells[round(place)]))
        at.set_xlim(-0.5, len(cells) - 0.5)
        top = max(5, *(count for of in shown["cells"].values() for count in of["spikes"]))
        at.set_ylim(-0.05 * top, 1.05 * top)
        counts_of = ", ".join(f"{label} {spread(shown['cells'][label]['spikes'])}" for label in cells)
        drawn.append(make_panel(at, f"Spikes, {name}", f"Loss spikes in a run: {counts_of}."))
    return Figure(
        "Smoothness, counted", f"One mark for each of {seeds} seeds. {rule[:1].upper()}{rule[1:]}.", tuple(drawn)
    )


FIGURES = {"mnist-curves": draw, "mnist-gap": gap_figure.draw}
