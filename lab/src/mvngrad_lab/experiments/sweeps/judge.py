"""Verdicts on the robustness figures, fig:robust-val: on the paper's grids, and transferred to sweeps of ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from mvngrad_lab.report.figures.style import number
from mvngrad_lab.report.statistics import interquartile, narrower, quantile, signed_rank
from mvngrad_lab.report.swept import Swept
from mvngrad_lab.report.tables import OPTIMIZERS, SECOND_MOMENT, VARIANCE
from mvngrad_lab.report.verdicts import NOT_RUN, UNDECIDED, Judge, Verdict, decided, judges, transferred

LEVEL = 0.01
AFTER_AND_BEFORE = (("LaProp", "Adam"), ("MVN-Grad", "AdaBelief"))
"""Momentum after normalizing, and before it, by the same normalizer."""
POINT = 1.0


def undecidable(swept: Swept, cells: Sequence[str]) -> Verdict | None:
    """Why a sweep decides nothing. A run that failed, even twice, says something of its machine and nothing of its
    optimizer: figures have it as the worst, and while the grid has one there is no verdict.
    """
    if missing := [cell for cell in cells if not swept.judged(cell)]:
        return Verdict(NOT_RUN, "", f"The sweep {swept.sweep} has no run of {', '.join(missing)}.")
    if left := swept.result["left"]:
        return Verdict(NOT_RUN, "", f"The sweep {swept.sweep} is not done: at least {left} runs are to come.")
    if failed := sum(row["status"] == "raised" for cell in cells for row in swept.judged(cell)):
        mend = f"mend its cause, then `mvngrad sweep retry {swept.sweep}`"
        return Verdict(NOT_RUN, "", f"{failed} runs of the sweep {swept.sweep} raised an error: {mend}.")
    return None


def medians(swept: Swept, cells: Sequence[str], metric: str) -> dict[str, float]:
    return {cell: quantile(swept.values(swept.judged(cell), metric), 0.5) for cell in cells}


def told(swept: Swept, values: dict[str, float], what: str) -> str:
    """Numbers of each optimizer, with how many runs are behind them and how many of these diverged."""
    parts = []
    for cell, value in values.items():
        rows = swept.judged(cell)
        lost = sum(row["status"] == "diverged" for row in rows)
        shown = number(value, 4) if math.isfinite(value) else "not finite"
        parts.append(f"{cell} {shown} (n = {len(rows)}" + (f", {lost} diverged)" if lost else ")"))
    return f"{what} over {swept.sweep}: {', '.join(parts)}"


# The paper's own grids


@judges("sweep-cifar-128")
def _(result: dict[str, Any]) -> Verdict:
    swept, cells = Swept(result), ("MVN-Grad", "AdaBelief")
    if (verdict := undecidable(swept, list(OPTIMIZERS))) is not None:
        return verdict
    middle = medians(swept, cells, swept.metric)
    tails = {cell: quantile(swept.values(swept.judged(cell), swept.metric), 0.1) for cell in cells}
    text = f"{told(swept, middle, 'median')}; {told(swept, tails, '10th percentile')}"
    near = abs(middle["MVN-Grad"] - middle["AdaBelief"]) <= POINT
    return decided(near and tails["MVN-Grad"] >= tails["AdaBelief"], text)


def order(result: dict[str, Any], train: bool) -> Verdict:
    """MVN-Grad's median above AdaBelief's, and that above the others'."""
    swept = Swept(result)
    if (verdict := undecidable(swept, list(OPTIMIZERS))) is not None:
        return verdict
    metric = swept.train_metric if train else swept.metric
    if metric is None:
        return Verdict(NOT_RUN, "", f"The sweep {swept.sweep} has no train metric.")
    found = medians(swept, list(OPTIMIZERS), metric)
    holds = found["MVN-Grad"] > found["AdaBelief"] > max(found[cell] for cell in SECOND_MOMENT)
    return decided(holds, told(swept, found, f"median {metric.replace('_', ' ')}"))


judges("sweep-cifar-1024-test")(partial(order, train=False))
judges("sweep-cifar-1024-train")(partial(order, train=True))


@judges("openwebtext-sweep")
def _(result: dict[str, Any]) -> Verdict:
    swept, cells = Swept(result), [f"{cell}W" for cell in OPTIMIZERS]
    if (verdict := undecidable(swept, cells)) is not None:
        return verdict
    found = medians(swept, cells, swept.metric)
    holds = max(found[f"{cell}W"] for cell in VARIANCE) < min(found[f"{cell}W"] for cell in SECOND_MOMENT)
    return decided(holds, told(swept, found, "median validation loss"))


@judges("openwebtext-quartiles")
def _(result: dict[str, Any]) -> Verdict:
    swept, cells = Swept(result), [f"{cell}W" for cell in OPTIMIZERS]
    if (verdict := undecidable(swept, cells)) is not None:
        return verdict
    found = {cell: interquartile(swept.values(swept.judged(cell), swept.metric)) for cell in cells}
    holds = all(found[f"{after}W"] < found[f"{before}W"] for after, before in AFTER_AND_BEFORE)
    return decided(holds, told(swept, found, "interquartile range of validation loss"))


# Transferred to sweeps that are not the paper's


def better(
    result: dict[str, Any], ours: Sequence[str], others: Sequence[str], note: str, train: bool = False
) -> Verdict:
    """Whether each of `ours` is better than each of `others`, setting by setting and in the median."""
    swept = Swept(result)
    if (verdict := undecidable(swept, [*ours, *others])) is not None:
        return verdict
    metric = swept.train_metric if train else swept.metric
    if metric is None:
        return Verdict(NOT_RUN, "", f"The sweep {swept.sweep} has no train metric.")
    found = medians(swept, [*ours, *others], metric)
    sign, for_it, against = -1 if swept.higher else 1, [], []
    for one, other in ((one, other) for one in ours for other in others):
        pairs = [(sign * first, sign * second) for first, second in swept.pairs(one, other, metric)]
        ahead, behind = sign * found[one] < sign * found[other], sign * found[one] > sign * found[other]
        for_it.append(signed_rank(pairs) if ahead else 1.0)
        against.append(signed_rank([pair[::-1] for pair in pairs]) if behind else 1.0)
    text = (
        f"{told(swept, found, 'median ' + metric.replace('_', ' '))}; largest p for it {max(for_it):.2g}, "
        f"smallest against it {min(against):.2g}"
    )
    return transferred(max(for_it) < LEVEL, min(against) < LEVEL / len(against), text, note)


def steadier(result: dict[str, Any], note: str) -> Verdict:
    """Whether momentum after normalizing has the narrower interquartile ranges, for both normalizers."""
    swept = Swept(result)
    if (verdict := undecidable(swept, list(OPTIMIZERS))) is not None:
        return verdict
    found = {cell: interquartile(swept.values(swept.judged(cell), swept.metric)) for cell in OPTIMIZERS}
    text = told(swept, found, f"interquartile range of {swept.metric.replace('_', ' ')}")
    if not all(map(math.isfinite, found.values())):
        return Verdict(UNDECIDED, text, f"Where a quarter of the runs diverged there is no range. {note}")
    tests = [narrower(swept.pairs(after, before, swept.metric)) for after, before in AFTER_AND_BEFORE]
    for_it, against = zip(*tests, strict=True)
    text += f"; largest p for it {max(for_it):.2g}, smallest against it {min(against):.2g}"
    return transferred(max(for_it) < LEVEL, min(against) < LEVEL / len(against), text, note)


NOTES = {
    "mnist": "A small network on digits, with a grid of ours: not the paper's task, and no number is the paper's.",
    "scaled": "30 epochs for the paper's 200, 16 of its 36 configurations: no number is the paper's.",
}
ALONE = [cell for cell in OPTIMIZERS if cell != "MVN-Grad"]
for name, note in NOTES.items():
    rules: dict[str, Judge] = {
        "best": partial(better, ours=["MVN-Grad"], others=ALONE, note=note),
        "variance": partial(better, ours=VARIANCE, others=SECOND_MOMENT, note=note),
        "quartiles": partial(steadier, note=note),
    }
    for rule, judge in rules.items():
        judges(f"sweep-{name}-{rule}")(judge)
judges("sweep-scaled-train")(partial(better, ours=VARIANCE, others=SECOND_MOMENT, note=NOTES["scaled"], train=True))
