"""Table 1 with the paper's numbers, as far as its runs are done, and fig:thm_vgap_ada_prop_cifar."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter

from mvngrad_lab.report.claims import load_claims
from mvngrad_lab.report.figures.style import LIGHT, cell_mark, draw_band, draw_curve, make_axes
from mvngrad_lab.report.figures.svg import Figure, Table, make_panel
from mvngrad_lab.report.tables import format_count, format_mean, format_seconds


def draw_table(result: dict[str, Any]) -> list[Figure]:
    paper = {claim.id: claim.values for claim in load_claims()}
    rows = []
    for batch, cells in result["cells"].items():
        for cell, row in cells.items():
            test, train = (
                (format_mean(row, f"{kind}_accuracy"), f"{paper[f'cifar-{kind}-{batch}'][cell]:.2f}")
                for kind in ("test", "train")
            )
            rows.append((batch, cell, format_count(row), *test, *train, format_seconds(row)))
    head = ("batch", "optimizer", "seeds", "test", "paper", "train, clean images", "paper", "seconds")
    caption = (
        f"{result['done']} of {result['of']} runs of 200 epochs are done. Mean ± standard deviation over seeds. The "
        "paper does not say how it measures train accuracy under MixUp; ours is on clean images. Seconds do not "
        "include compilation, and are of runs that had the GPU to themselves. With the paper's εₛ of 10⁻⁸ the root of "
        "s is at least 0.001, which is most of what AdaBelief and MVN-Grad divide by here (docs/log.md). "
        f"{result['data']}"
    )
    return [Figure("ResNet-18 on CIFAR-100", caption, table=Table("Accuracy, %", head, tuple(rows)))]


def draw_gap(result: dict[str, Any]) -> list[Figure]:
    epochs, trained = result["epochs"], result["trained_with"]
    left = make_axes("epoch", "Var(AdaBelief's update) − Var(MVN-Grad's)")
    right = make_axes("epoch", "gap / Var(AdaBelief's update)")
    right.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.2%}"))
    parts = []
    for name, measured in trained.items():
        gap, error, before = (np.array(measured[key], dtype=float) for key in ("gap", "error", "before"))
        for at, scale in ((left, 1.0), (right, before)):
            draw_band(at, cell_mark(name), epochs, (gap - 2 * error) / scale, (gap + 2 * error) / scale)
            draw_curve(at, cell_mark(name), epochs, gap / scale)
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
            (make_panel(left, "The gap on CIFAR-100", words), make_panel(right, "As a share, on CIFAR-100", words)),
            tuple(cell_mark(name).with_label(f"trained with {name}") for name in trained),
        )
    ]


FIGURES = {"table1": draw_table, "cifar-gap": draw_gap}
