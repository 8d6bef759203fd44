"""Table 1 with the paper's numbers, as far as its runs are done, and fig:thm_vgap_ada_prop_cifar."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter

from mvngrad_lab.report import Row
from mvngrad_lab.report.claims import load_claims
from mvngrad_lab.report.figures.curves import draw_accuracies
from mvngrad_lab.report.figures.style import LIGHT, MARKS, cell_mark, draw_band, draw_curve, label_rows, make_axes
from mvngrad_lab.report.figures.svg import Figure, Panel, Table, make_panel
from mvngrad_lab.report.statistics import mean_and_deviation, mean_interval
from mvngrad_lab.report.tables import SECOND_MOMENT, bold_best, format_count, format_mean, format_seconds, get_values
from mvngrad_lab.report.verdicts import CAVEAT, NOT_REPRODUCED, REPRODUCED, Verdict


def draw_table(result: dict[str, Any]) -> list[Figure]:
    paper = {claim.id: claim.values for claim in load_claims()}
    rows = []
    for batch, cells in result["cells"].items():
        tests = bold_best([format_mean(row, "test_accuracy") for row in cells.values()])
        for (cell, row), test in zip(cells.items(), tests, strict=True):
            ours = test, format_mean(row, "train_accuracy")
            papers = (f"{paper[f'cifar-{kind}-{batch}'][cell]:.2f}" for kind in ("test", "train"))
            pairs = (number for pair in zip(ours, papers, strict=True) for number in pair)
            rows.append((batch, cell, format_count(row), *pairs, format_seconds(row)))
    head = ("batch", "optimizer", "seeds", "test", "paper", "train, clean images", "paper", "seconds")
    more = sum(len(row["seeds"]) for cells in result["order"].values() for row in cells.values()) - result["done"]
    others = f"; {more} with other seeds {'counts' if more == 1 else 'count'} for the order alone" if more else ""
    caption = (
        f"{result['done']} of {result['of']} runs of 200 epochs are done{others}. Dot and line: mean over seeds and "
        "its 95% interval; small marks: seeds; hollow diamond: the paper's mean. In the table, mean ± standard "
        "deviation. The paper does not say how it measures train accuracy under MixUp; ours is on clean images. "
        "Seconds do not include compilation, and are of runs that had the GPU to themselves. With the paper's εₛ of "
        "10⁻⁸ the root of s is at least 0.001, which is most of what AdaBelief and MVN-Grad divide by here. "
        f"{result['data']}"
    )
    panels = tuple(
        _draw_forest(f"Batch {batch}", cells, paper[f"cifar-test-{batch}"]) for batch, cells in result["cells"].items()
    )
    if not (curves := _draw_curves(result["cells"])):
        caption += (
            ". These runs did not keep their accuracy along the training; later ones did (Training curves, below)."
        )
    table = Table("Accuracy, %", head, tuple(rows))
    return [Figure("ResNet-18 on CIFAR-100", caption, panels, table=table), *curves]


def _draw_curves(batches: Mapping[str, Mapping[str, Row]]) -> list[Figure]:
    """Test accuracy along the trainings, of the runs that have kept it."""
    panels = [
        panel
        for batch, cells in batches.items()
        for panel in draw_accuracies(
            f"Batch {batch}, curves", {cell: [curve for curve in row["curve"] if curve] for cell, row in cells.items()}
        )
    ]
    caption = "Mean over the seeds that kept their accuracy at each evaluation."
    return [Figure("Training curves of Table 1", caption, tuple(panels), tuple(MARKS.values()))] if panels else []


def _draw_forest(title: str, cells: Mapping[str, Row], paper: Mapping[str, float]) -> Panel:
    """Test accuracy of each optimizer, one line each."""
    at, parts = make_axes("test accuracy, %", "", size=(5.0, 2.5), left=0.86), []
    for index, (cell, row) in enumerate(cells.items()):
        values, mark = get_values(row, "test_accuracy"), cell_mark(cell)
        at.plot(paper[cell], index, **{**mark.points, "marker": "D", "markersize": 8, "markerfacecolor": "none"})
        if values:
            at.plot(mean_interval(values) or [fmean(values)] * 2, [index] * 2, color=LIGHT[mark.color], linewidth=1.6)
            at.plot(values, [index] * len(values), **{**mark.points, "marker": "|", "markersize": 7})
            at.plot(fmean(values), index, **{**mark.points, "marker": "o", "markersize": 6})
            parts.append(f"{cell} {mean_and_deviation(values)} (paper {paper[cell]:.2f})")
    label_rows(at, list(cells))
    return make_panel(at, title, f"{'; '.join(parts)}.")


def describe_table(result: dict[str, Any], verdicts: Mapping[str, Verdict]) -> str:
    """The finding of Table 1, once all its runs are done."""
    order = [verdicts[f"cifar-order-{batch}"] for batch in result["cells"]]
    means = {batch: verdicts[f"cifar-test-{batch}"] for batch in result["cells"]}
    if any(verdict.strip is None for verdict in (*order, *means.values())):
        return ""
    reached = [
        f"**{row.value:.2f}%** at batch {batch} (paper {row.reference:.2f}, n\u00a0=\u00a0{row.n})"
        for batch, verdict in means.items()
        for row in (verdict.strip.rows if verdict.strip else ())
        if row.label == "MVN-Grad"
    ]
    labels = [f"MVN-Grad less {cell}" for cell in SECOND_MOMENT]
    leads = [row.value for verdict in order if verdict.strip for row in verdict.strip.rows if row.label in labels]
    counts = sorted({str(row.n) for verdict in order if verdict.strip for row in verdict.strip.rows})
    by_batch = {batch: _describe_order(result["order"][batch], verdicts[f"cifar-order-{batch}"]) for batch in means}
    words = [f"at batch {batch} {text}" for batch, text in by_batch.items()]
    if len({*by_batch.values()}) == 1:
        words = [*by_batch.values()][:1]
    lead = (
        f"{min(leads):+.1f} to {max(leads):+.1f} points relative to Adam and LaProp "
        f"(n\u00a0=\u00a0{' or '.join(counts)}), {' and '.join(words)}"
    )
    where = "On CIFAR-100, at the paper's settings (no floor for Adam and LaProp)"
    return f"{where}, MVN-Grad reaches {' and '.join(reached)}: {lead}."


def _describe_order(rows: Mapping[str, Row], verdict: Verdict) -> str:
    """What the rule says of the order at one batch size."""
    if verdict.status == REPRODUCED:
        return "as the paper says"
    if verdict.status == CAVEAT:
        return f"as the paper says with a caveat ({verdict.note.removesuffix('.')})"
    if verdict.status == NOT_REPRODUCED:
        return "not as the paper says"
    if any(row["to_come"] for row in rows.values()):
        return "with too few seeds to decide"
    lost = any(row["diverged"] for row in rows.values())
    return "undecided because a run diverged" if lost else "undecided by the rule"


def draw_gap(result: dict[str, Any]) -> list[Figure]:
    epochs, trained = result["epochs"], result["trained_with"]
    left = make_axes("epoch", "Var(AdaBelief's update) − Var(MVN-Grad's)", left=0.7)
    right = make_axes("epoch", "gap / Var(AdaBelief's update)", left=0.7)
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
FINDINGS = {"table1": (40, describe_table)}
