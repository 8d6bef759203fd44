"""fig:thm_vgap_ada_prop_cifar: the variance gap along CIFAR-100 trainings."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter

from mvngrad_lab.report.figures.style import LIGHT, axes, band, cell, curve
from mvngrad_lab.report.figures.svg import Figure, panel


def draw(result: dict[str, Any]) -> list[Figure]:
    epochs, trained = result["epochs"], result["trained_with"]
    left = axes("epoch", "Var(AdaBelief's update) − Var(MVN-Grad's)")
    right = axes("epoch", "gap / Var(AdaBelief's update)")
    right.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.2%}"))
    parts = []
    for name, measured in trained.items():
        gap, error, before = (np.array(measured[key], dtype=float) for key in ("gap", "error", "before"))
        for at, scale in ((left, 1.0), (right, before)):
            band(at, cell(name), epochs, (gap - 2 * error) / scale, (gap + 2 * error) / scale)
            curve(at, cell(name), epochs, gap / scale)
        parts.append(f"trained with {name}, the gap is {(gap / before).min():.2%} to {(gap / before).max():.2%}")
    for at in (left, right):
        at.axhline(0, color=LIGHT["muted"], linewidth=0.8)
    words = f"{'; '.join(parts)} of AdaBelief's variance"
    return [
        Figure(
            "The variance gap on CIFAR-100",
            f"After these epochs the state is frozen, {result['K']} augmented mini-batches are drawn, and the "
            "variances of the next update are averaged over all parameters. One run each; band: two standard errors "
            f"over batches. In short: {words}. Data: {result['data']}.",
            (panel(left, "The gap on CIFAR-100", words), panel(right, "As a share, on CIFAR-100", words)),
            tuple(cell(name).named(f"trained with {name}") for name in trained),
        )
    ]
