"""Verdicts on the robustness figures, fig:robust-val: on the paper's grids, and transferred to sweeps of ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from mvngrad_lab.experiments.sweeps.records import SweepExport
from mvngrad_lab.report.statistics import LEVEL, adjust_by_holm, interquartile, p_narrower, quantile, signed_rank
from mvngrad_lab.report.tables import OPTIMIZERS, SECOND_MOMENT, VARIANCE
from mvngrad_lab.report.verdicts import (
    CAVEAT,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    UNDECIDED,
    Estimate,
    Strip,
    Verdict,
    decide_transferred,
    judges,
)
from mvngrad_lab.tasks.cifar100 import recipe as cifar100
from mvngrad_lab.tasks.language import recipe as language

MOMENTUM_LAST_AND_FIRST = (("LaProp", "Adam"), ("MVN-Grad", "AdaBelief"))
"""Momentum after normalizing, and before it, by the same normalizer."""
EQUALITY_LEVEL = 0.05
"""Of each of two one-sided tests that two optimizers are within a margin."""

Statistic = Callable[[Sequence[float]], float]


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def find_obstacle(export: SweepExport, cells: Sequence[str]) -> Verdict | None:
    """The reason why a sweep decides nothing yet, as a verdict.

    A run that raised, even twice, shows something about its machine and nothing about its optimizer: figures count it
    as the worst, and while the grid has one there is no verdict.
    """
    name = export.sweep
    if missing := [cell for cell in cells if not export.judged(cell)]:
        return Verdict(NOT_RUN, "", f"The sweep {name} has no run of {', '.join(missing)}.")
    if export.left:
        return Verdict(NOT_RUN, "", f"The sweep {name} is not done: at least {export.left} runs are to come.")
    if raised := sum(row["status"] == "raised" for cell in cells for row in export.judged(cell)):
        remedy = f"fix its cause, then `mvngrad sweep retry {name}`"
        return Verdict(NOT_RUN, "", f"{raised} runs of the sweep {name} raised an error: {remedy}.")
    return None


def needs(cells: Iterable[str]) -> Callable[[Callable[..., Verdict]], Callable[..., Verdict]]:
    """Judge only a sweep that has all runs of these optimizers."""

    def decorate(judge: Callable[..., Verdict]) -> Callable[..., Verdict]:
        return lambda export, **options: find_obstacle(export, list(cells)) or judge(export, **options)

    return decorate


def compute(export: SweepExport, cells: Sequence[str], statistic: Statistic, metric: str = "") -> dict[str, float]:
    """A statistic of each optimizer's values, by default of the sweep's metric."""
    return {cell: statistic(export.values(export.judged(cell), metric or export.metric)) for cell in cells}


def make_sweep_strip(export: SweepExport, values: dict[str, float], what: str, metric: str = "") -> Strip:
    """A number of each optimizer; with `metric`, which a median is of, the quartiles too."""
    rows = []
    for cell, value in values.items():
        judged = export.judged(cell)
        diverged = sum(row["status"] == "diverged" for row in judged)
        runs = export.values(judged, metric) if metric else []
        quartiles = (quantile(runs, 0.25), quantile(runs, 0.75)) if runs else None
        label = f"{cell}, {diverged} diverged" if diverged else cell
        rows.append(Estimate(label, value, quartiles, len(judged)))
    digits = 2 if export.metric.endswith("accuracy") else 4
    return Strip(f"{what} over {export.sweep}" + (", and quartiles" if metric else ""), tuple(rows), digits)


# Rules


def judge_pairs(export: SweepExport, pairs: Sequence[tuple[str, str]], note: str = "", train: bool = False) -> Verdict:
    """Whether the first of each pair of optimizers is better than the second, setting by setting and in the median."""
    cells = list(dict.fromkeys([one for one, _ in pairs] + [other for _, other in pairs]))
    if (obstacle := find_obstacle(export, cells)) is not None:
        return obstacle
    if (metric := export.train_metric if train else export.metric) is None:
        return Verdict(NOT_RUN, "", f"The sweep {export.sweep} has no train metric.")
    medians = compute(export, cells, median, metric)
    sign, p_for, p_against = -1 if export.higher else 1, [], []
    for one, other in pairs:
        values = [(sign * first, sign * second) for first, second in export.pairs(one, other, metric)]
        ahead, behind = sign * medians[one] < sign * medians[other], sign * medians[one] > sign * medians[other]
        p_for.append(signed_rank(values) if ahead else 1.0)
        p_against.append(signed_rank([pair[::-1] for pair in values]) if behind else 1.0)
    strip = make_sweep_strip(export, medians, f"median {metric.replace('_', ' ')}", metric)
    return _decide(p_for, p_against, strip, note)


def judge_ranges(export: SweepExport, pairs: Sequence[tuple[str, str]], note: str = "") -> Verdict:
    """Whether the first of each pair of optimizers has the narrower interquartile range."""
    cells = list(dict.fromkeys(cell for pair in pairs for cell in reversed(pair)))
    if (obstacle := find_obstacle(export, cells)) is not None:
        return obstacle
    ranges = compute(export, cells, interquartile)
    strip = make_sweep_strip(export, ranges, f"interquartile range of {export.metric.replace('_', ' ')}")
    if not all(map(math.isfinite, ranges.values())):
        return Verdict(UNDECIDED, "", f"Where a quarter of the runs diverged there is no range. {note}".strip(), strip)
    p_for, p_against = zip(*(p_narrower(export.pairs(*pair, export.metric)) for pair in pairs), strict=True)
    return _decide(p_for, p_against, strip, note)


def _decide(p_for: Sequence[float], p_against: Sequence[float], strip: Strip, note: str) -> Verdict:
    """For the claim if all tests are, against it if one is after Holm's correction, else undecided.

    A claim with a note is transferred: reproduced with a caveat at best.
    """
    against = min(adjust_by_holm(p_against))
    text = f"largest p for the claim {max(p_for):.2g}, smallest p against it {against:.2g} (Holm)"
    if max(p_for) < LEVEL:
        return Verdict(CAVEAT if note else REPRODUCED, text, note, strip)
    return Verdict(NOT_REPRODUCED if against < LEVEL else UNDECIDED, text, note, strip)


@judges("sweep-cifar-128")
@needs(OPTIMIZERS)
def judge_batch_128(export: SweepExport) -> Verdict:
    """Whether the medians of MVN-Grad and AdaBelief are within POINT, and MVN-Grad has no longer left tail."""
    ours, other = cells = ("MVN-Grad", "AdaBelief")
    medians, tails = compute(export, cells, median), compute(export, cells, partial(quantile, share=0.1))
    gap, longer = medians[ours] - medians[other], tails[ours] < tails[other]
    pairs = export.pairs(ours, other, export.metric)
    above, below = ([(one - by, two) for one, two in pairs] for by in (POINT, -POINT))
    p_for = [signed_rank(above), signed_rank([pair[::-1] for pair in below])]
    p_against = adjust_by_holm(
        [
            signed_rank([pair[::-1] for pair in above]) if gap > POINT else 1.0,
            signed_rank(below) if gap < -POINT else 1.0,
            signed_rank(pairs) if longer else 1.0,
        ]
    )
    near = abs(gap) <= POINT and max(p_for) < EQUALITY_LEVEL
    status = REPRODUCED if near and not longer else NOT_REPRODUCED if min(p_against) < LEVEL else UNDECIDED
    text = "10th percentile: " + ", ".join(f"{cell} {tail:.2f}" for cell, tail in tails.items())
    text += f"; largest p for the claim {max(p_for):.2g}, smallest p against it {min(p_against):.2g} (Holm)"
    return Verdict(status, text, strip=make_sweep_strip(export, medians, "median test accuracy", export.metric))


BEST_FIRST = tuple(("MVN-Grad", cell) for cell in OPTIMIZERS if cell != "MVN-Grad")
VARIANCE_FIRST = tuple(product(VARIANCE, SECOND_MOMENT))
IN_ORDER = (("MVN-Grad", "AdaBelief"), *(("AdaBelief", cell) for cell in SECOND_MOMENT))


def decouple(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The same optimizers with decoupled decay."""
    return [(f"{one}W", f"{other}W") for one, other in pairs]


# The paper's own grids

judges("sweep-cifar-1024-test")(partial(judge_pairs, pairs=IN_ORDER))
judges("sweep-cifar-1024-train")(partial(judge_pairs, pairs=IN_ORDER, train=True))
judges("openwebtext-sweep")(partial(judge_pairs, pairs=decouple(VARIANCE_FIRST)))
judges("openwebtext-sweep-train")(partial(judge_pairs, pairs=decouple(VARIANCE_FIRST), train=True))
judges("openwebtext-quartiles")(partial(judge_ranges, pairs=decouple(MOMENTUM_LAST_AND_FIRST)))


# Transferred to sweeps that are not the paper's

NOTES = {
    "mnist": "A small network on digits, with a grid of ours: not the paper's task, and no number is the paper's.",
    "scaled": "30 epochs for the paper's 200, 16 of its 36 configurations: no number is the paper's.",
}
for name, note in NOTES.items():
    judges(f"sweep-{name}-best")(partial(judge_pairs, pairs=BEST_FIRST, note=note))
    judges(f"sweep-{name}-variance")(partial(judge_pairs, pairs=VARIANCE_FIRST, note=note))
    judges(f"sweep-{name}-quartiles")(partial(judge_ranges, pairs=MOMENTUM_LAST_AND_FIRST, note=note))
judges("sweep-scaled-train")(partial(judge_pairs, pairs=VARIANCE_FIRST, note=NOTES["scaled"], train=True))


def get_selected(select: Callable[..., Any], *options: Any, w: str = "") -> dict[str, tuple[Any, ...]]:
    """The settings that the paper selected, by the name of the optimizer; `w` is for decoupled decay."""
    recipes = {f"{cell}{w.upper()}": select(f"{name}{w}", *options) for cell, name in OPTIMIZERS.items()}
    return {cell: tuple(getattr(recipe, name) for name in SELECTED) for cell, recipe in recipes.items()}


SELECTED = ("lr", "beta1", "beta2", "eps_s")
POINT, NATS = 1.0, 0.03
"""How far from the best a selected configuration may be, in test accuracy and in validation loss: about twice the
deviation of a difference of two runs."""


def judge_selected(export: SweepExport, selected: Mapping[str, tuple[Any, ...]], margin: float, note: str) -> Verdict:
    """Whether the settings that the paper selected are near the best of the sweep, for each optimizer."""
    if (obstacle := find_obstacle(export, list(selected))) is not None:
        return obstacle
    rows, ranks, far = list[Estimate](), list[str](), list[str]()
    for cell, settings in selected.items():
        values = {
            tuple(row["settings"].get(name) for name in SELECTED): value
            for row in export.judged(cell)
            if (value := export.value(row, export.metric)) is not None
        }
        if (chosen := values.get(settings)) is None:
            return Verdict(UNDECIDED, "", f"The sweep {export.sweep} has no run of {cell} at the paper's settings.")
        ordered = sorted(values.values(), reverse=export.higher)
        rows.append(Estimate(cell, chosen, None, 1, ordered[0]))
        ranks.append(f"{cell} {ordered.index(chosen) + 1} of {len(ordered)}")
        if not abs(ordered[0] - chosen) <= margin:  # nan if all diverged
            far.append(cell)
    note = f"{note} One seed." + (f" Farther than {margin:g}: {', '.join(far)}." if far else "")
    strip = Strip(
        f"{export.metric.replace('_', ' ')} at the paper's settings", tuple(rows), 2 if export.higher else 4, "best"
    )
    return decide_transferred(not far, len(far) >= 2, f"rank: {', '.join(ranks)}", note.strip(), strip)


for claim, chosen, margin, note in (
    ("sweep-scaled-selected", get_selected(cifar100.paper, 1024), POINT, NOTES["scaled"]),
    ("sweep-cifar-1024-selected", get_selected(cifar100.paper, 1024), POINT, ""),
    ("sweep-cifar-128-selected", get_selected(cifar100.paper, 128), POINT, ""),
    ("sweep-wikitext-selected", get_selected(language.wikitext103), NATS, ""),
    ("sweep-openwebtext-selected", get_selected(language.openwebtext, w="w"), NATS, ""),
):
    judges(claim)(partial(judge_selected, selected=chosen, margin=margin, note=note))
