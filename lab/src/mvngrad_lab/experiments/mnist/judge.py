"""Verdicts on fig:loss_smallbatch, fig:loss_largebatch and fig:thm_vgap_ada_prop."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from mvngrad_lab.report.statistics import welch
from mvngrad_lab.report.tables import make_strip
from mvngrad_lab.report.verdicts import Verdict, decide, judges

LEVEL = 0.05


def with_sample_size(result: dict[str, Any], text: str) -> str:
    return f"{text} (n = {len(result['seeds'])} seeds; {result['data']})"


@judges("mnist-smooth")
def _(result: dict[str, Any]) -> Verdict:
    counts = {cell: row["spikes"] for cell, row in result["panels"]["batch 128"]["cells"].items()}
    p = {cell: welch(counts["MVN-Grad"], row) for cell, row in counts.items() if cell != "MVN-Grad"}
    tests = ", ".join(f"{cell} {value:.2g}" for cell, value in p.items())
    fewer = {cell for cell, value in p.items() if value < LEVEL}
    caveat = "Fewer than with momentum before normalizing; not fewer than LaProp, which has the same order."
    return decide(
        {"Adam", "AdaBelief"} <= fewer,
        f"p that MVN-Grad has fewer: {tests}",
        "" if "LaProp" in fewer else caveat,
        make_strip("loss spikes in a run", counts, digits=1),
    )


@judges("mnist-fast")
def _(result: dict[str, Any]) -> Verdict:
    cells = {cell: row["final_loss"] for cell, row in result["panels"]["batch 1024"]["cells"].items()}
    if any(value is None for row in cells.values() for value in row):
        return decide(False, with_sample_size(result, "a loss is not finite"))
    p = {
        "MVN-Grad below LaProp": welch(cells["MVN-Grad"], cells["LaProp"]),
        "AdaBelief below Adam": welch(cells["AdaBelief"], cells["Adam"]),
    }
    tests = ", ".join(f"{name} {value:.2g}" for name, value in p.items())
    true = [name for name, value in p.items() if value < LEVEL]
    caveat = f"Only {true[0]}." if len(true) == 1 else ""
    return decide(bool(true), f"p: {tests}", caveat, make_strip("final training loss", cells, digits=4))


def checkpoint_means(result: dict[str, Any], cell: str) -> list[float]:
    """The mean gap over seeds at each checkpoint."""
    return [fmean(column) for column in zip(*result["trained_with"][cell]["gap"], strict=True)]


@judges("mnist-gap-positive")
def _(result: dict[str, Any]) -> Verdict:
    means_by_cell = {cell: checkpoint_means(result, cell) for cell in result["trained_with"]}
    positive = {cell: sum(gap > 0 for gap in gaps) for cell, gaps in means_by_cell.items()}
    every = len(result["steps"])
    text = "; ".join(f"trained with {cell}: positive at {n} of {every} checkpoints" for cell, n in positive.items())
    caveat = "Not at every checkpoint."
    fewest = min(positive.values())
    return decide(fewest >= 0.75 * every, with_sample_size(result, text), caveat if fewest < every else "")


@judges("mnist-gap-plateau")
def _(result: dict[str, Any]) -> Verdict:
    texts, true = [], []
    for cell in result["trained_with"]:
        gaps = checkpoint_means(result, cell)
        last, top = fmean(gaps[-3:]), max(gaps)
        texts.append(
            f"trained with {cell}: {gaps[0]:.3g} at step {result['steps'][0]}, largest {top:.3g} at step "
            f"{result['steps'][gaps.index(top)]}, {last:.3g} over the last three"
        )
        if gaps.index(top) > 0 and last >= top / 4:
            true.append(cell)
    caveat = f"Only trained with {true[0]}." if len(true) == 1 else ""
    return decide(bool(true), with_sample_size(result, "; ".join(texts)), caveat)
