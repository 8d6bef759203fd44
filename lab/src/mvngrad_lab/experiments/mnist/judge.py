"""Verdicts on fig:loss_smallbatch, fig:loss_largebatch and fig:thm_vgap_ada_prop."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from mvngrad_lab.report.statistics import LEVEL, adjust_by_holm, estimate_mean, p_fewer, welch
from mvngrad_lab.report.tables import make_mean_strip
from mvngrad_lab.report.verdicts import NOT_REPRODUCED, UNDECIDED, Strip, Verdict, decide, judges

PAIRS = (("MVN-Grad", "LaProp"), ("AdaBelief", "Adam"))
"""Variance and second moment, in the same order of momentum."""


def describe_sample(result: dict[str, Any]) -> str:
    return f"n = {len(result['seeds'])} seeds; {result['data']}"


@judges("mnist-smooth")
def _(result: dict[str, Any]) -> Verdict:
    counts = {cell: row["spikes"] for cell, row in result["panels"]["batch 128"]["cells"].items()}
    others = [cell for cell in counts if cell != "MVN-Grad"]
    p = {cell: p_fewer(counts["MVN-Grad"], counts[cell]) for cell in others}
    p_against = adjust_by_holm([p_fewer(counts[cell], counts["MVN-Grad"]) for cell in others])
    against = ", ".join(f"{value:.2g} against {cell}" for cell, value in p.items())
    text = f"tests for fewer spikes with MVN-Grad: p = {against}"
    strip = make_mean_strip("loss spikes in a run", counts, digits=1)
    if max(p["Adam"], p["AdaBelief"]) >= LEVEL:
        return Verdict(NOT_REPRODUCED if min(p_against) < LEVEL else UNDECIDED, text, strip=strip)
    caveat = "Fewer than with momentum before normalizing; not fewer than LaProp, which has the same order."
    return decide(True, text, "" if p["LaProp"] < LEVEL else caveat, strip)


@judges("mnist-fast")
def _(result: dict[str, Any]) -> Verdict:
    cells = {cell: row["final_loss"] for cell, row in result["panels"]["batch 1024"]["cells"].items()}
    if lost := [cell for cell, row in cells.items() if None in row]:
        status = NOT_REPRODUCED if {*lost} & {low for low, _ in PAIRS} else UNDECIDED
        return Verdict(status, f"a loss is not finite: {', '.join(lost)}; {describe_sample(result)}")
    pairs = {f"{low} below {high}": (cells[low], cells[high]) for low, high in PAIRS}
    p = dict(zip(pairs, adjust_by_holm([welch(*pair) for pair in pairs.values()]), strict=True))
    p_against = adjust_by_holm([welch(*reversed(pair)) for pair in pairs.values()])
    text = f"p (Holm): {', '.join(f'{name} {value:.2g}' for name, value in p.items())}"
    strip = make_mean_strip("final training loss", cells, digits=4)
    true = [name for name, value in p.items() if value < LEVEL]
    if true:
        return decide(True, text, f"Only {true[0]}." if len(true) == 1 else "", strip)
    return Verdict(NOT_REPRODUCED if min(p_against) < LEVEL else UNDECIDED, text, strip=strip)


def checkpoint_means(result: dict[str, Any], cell: str) -> list[float]:
    """The mean gap over seeds at each checkpoint."""
    return [fmean(column) for column in zip(*result["trained_with"][cell]["gap"], strict=True)]


@judges("mnist-gap-positive")
def _(result: dict[str, Any]) -> Verdict:
    means_by_cell = {cell: checkpoint_means(result, cell) for cell in result["trained_with"]}
    positive = {cell: sum(gap > 0 for gap in gaps) for cell, gaps in means_by_cell.items()}
    every, fewest = len(result["steps"]), min(positive.values())
    columns = {cell: list(zip(*row["gap"], strict=True)) for cell, row in result["trained_with"].items()}
    shown = {cell: sum(estimate_mean(column).p_above(0) < LEVEL for column in of) for cell, of in columns.items()}
    negative = max(sum(estimate_mean(column).p_below(0) < LEVEL for column in of) for of in columns.values())
    rows = ((f"{cell} trains", n, 0.75 * every) for cell, n in positive.items())
    strip = Strip.of_numbers(f"checkpoints with a positive gap, of {every}", rows, "needed")
    if fewest < 0.75 * every:
        status = NOT_REPRODUCED if negative >= 0.25 * every else UNDECIDED
        return Verdict(status, describe_sample(result), strip=strip)
    counts = " and ".join(f"{n} ({cell} trains)" for cell, n in shown.items())
    caveat = f"Shown by a t-test over seeds at {counts} of {every} checkpoints." if min(shown.values()) < every else ""
    return decide(True, describe_sample(result), caveat, strip)


@judges("mnist-gap-plateau")
def _(result: dict[str, Any]) -> Verdict:
    rows, true, contrary = list[tuple[str, float]](), [], []
    for cell, trained in result["trained_with"].items():
        gaps = checkpoint_means(result, cell)
        last, top = fmean(gaps[-3:]), max(gaps)
        steps = (result["steps"][0], result["steps"][gaps.index(top)])
        labels = (f"at step {steps[0]}", f"largest, at step {steps[1]}", "over the last three")
        rows += [(f"{cell} trains, {label}", gap) for label, gap in zip(labels, (gaps[0], top, last), strict=True)]
        if gaps.index(top) > 0 and last >= top / 4:
            true.append(cell)
        falls = estimate_mean([row[0] - max(row[1:]) for row in trained["gap"]]).p_above(0)
        vanishes = estimate_mean([max(row) / 4 - fmean(row[-3:]) for row in trained["gap"]]).p_above(0)
        contrary.append(min(adjust_by_holm([falls, vanishes])) < LEVEL)
    strip = Strip.of_numbers("mean gap", rows)
    if not true:
        return Verdict(NOT_REPRODUCED if all(contrary) else UNDECIDED, describe_sample(result), strip=strip)
    return decide(True, describe_sample(result), f"Only trained with {true[0]}." if len(true) == 1 else "", strip)
