"""fig:thm_vgap_ada_prop: the variance gap of a network at frozen states."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from mvngrad_lab.report.figures.style import LIGHT, Mark, cell_mark, draw_band, draw_curve, make_axes
from mvngrad_lab.report.figures.svg import Figure, make_panel


def draw(result: dict[str, Any]) -> list[Figure]:
    steps, trained = result["steps"], result["trained_with"]
    gaps = {name: np.array(measured["gap"], dtype=float) for name, measured in trained.items()}
    shares = {name: gaps[name] / np.array(measured["before"], dtype=float) for name, measured in trained.items()}
    positive = all((gap > 0).all() for gap in gaps.values())
    left = make_axes("training step", "Var(AdaBelief's update) − Var(MVN-Grad's)", log="xy" if positive else "x")
    right = make_axes("training step", "gap / Var(AdaBelief's update)", log="x")
    right.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    for name in trained:
        _seeds(left, cell_mark(name), steps, gaps[name])
        _seeds(right, cell_mark(name), steps, shares[name])
    for at in (right,) if positive else (left, right):
        at.axhline(0, color=LIGHT["muted"], linewidth=0.8)
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


def _seeds(at: Axes, mark: Mark, steps: list[int], values: Any) -> None:
    draw_band(at, mark, steps, values.min(axis=0), values.max(axis=0))
    draw_curve(at, mark, steps, values.mean(axis=0))
