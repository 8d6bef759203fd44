"""Verdicts on bad batches in real trainings: signed-rank tests on pairs of runs, a sign test on divergences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

from scipy import stats

from mvngrad_lab.experiments.spikes import recipes
from mvngrad_lab.experiments.spikes.recipes import INJECTION_NAMES
from mvngrad_lab.recipe import NAMES
from mvngrad_lab.report.statistics import OUR_LEVEL, adjust_by_holm, quantile, signed_rank
from mvngrad_lab.report.verdicts import (
    CAVEAT,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    UNDECIDED,
    Estimate,
    Strip,
    Verdict,
    judges,
)

LAST_AND_FIRST = (("laprop", "adam"), ("mvngrad", "adabelief"))
"""Momentum after normalizing, and before it, by the same normalizer."""
VERSUS = " against "
"""Between the two sides of a comparison in its name."""
NOMINAL = "Pairs of one seed are not independent, so p is nominal."

Row = Mapping[str, Any]
Pairs = list[tuple[float, float]]


class Key(NamedTuple):
    """What identifies a run."""

    cell: str
    protection: str
    rate: str
    injection: str
    seed: int


def find_obstacle(result: Mapping[str, Any]) -> Verdict | None:
    if result["done"] < result["of"]:
        return Verdict(NOT_RUN, "", f"{result['done']} of {result['of']} runs are done.")
    return None


def get_number(row: Row, measure: str) -> float:
    """A measured number; infinite if the run diverged."""
    return math.inf if row["diverged"] else float(row[measure])


def index_rows(result: Mapping[str, Any]) -> dict[Key, Row]:
    """The runs whose run without bad batches did not diverge."""
    return {Key(*(row[name] for name in Key._fields)): row for row in result["rows"] if row["comparable"]}


def pair_runs(
    rows: Mapping[Key, Row], first: Mapping[str, Any], second: Mapping[str, Any], measure: str, by_seed: bool
) -> Pairs:
    """The measure of each run with the settings `first`, and of the run that has `second` and is otherwise the same.

    With `by_seed` there is one pair for each seed, of means over all else: pairs of one seed are not independent.
    """
    keys = [key for key in rows if key._replace(**first) == key and key._replace(**second) in rows]
    pairs = {key: (get_number(rows[key], measure), get_number(rows[key._replace(**second)], measure)) for key in keys}
    if not by_seed:
        return list(pairs.values())
    seeds = sorted({key.seed for key in keys})
    of_seeds = ([pair for key, pair in pairs.items() if key.seed == seed] for seed in seeds)
    return [(fmean(a for a, _ in of), fmean(b for _, b in of)) for of in of_seeds]


def judge_pairs(all_pairs: Mapping[str, Pairs], what: str, *caveats: str) -> Verdict:
    """Whether in each comparison the first of its pairs is smaller; with `caveats`, not without one."""
    if not all(all_pairs.values()):
        return Verdict(UNDECIDED, "", "Runs without bad batches diverged: there is nothing to compare with.")
    for_it, against = (
        dict(zip(all_pairs, adjust_by_holm(p_values), strict=True))
        for p_values in (
            [signed_rank(pairs) for pairs in all_pairs.values()],
            [signed_rank([pair[::-1] for pair in pairs]) for pairs in all_pairs.values()],
        )
    )
    rows = []
    for name, pairs in all_pairs.items():
        for label, column in zip(name.split(VERSUS), zip(*pairs, strict=True), strict=True):
            low, middle, high = (quantile(column, share) for share in (0.25, 0.5, 0.75))
            rows.append(Estimate(label, middle, (low, high), len(pairs)))
    strip = Strip(f"{what}, median over pairs and quartiles", tuple(rows), None)
    p_values = (f"{name}, p = {for_it[name]:.2g} and {against[name]:.2g}" for name in all_pairs)
    differ = [f"{sum(a != b for a, b in pairs)} of {len(pairs)}" for pairs in all_pairs.values()]
    text = f"tests for less and for more (Holm): {'; '.join(p_values)}"
    text += f"; pairs that differ: {', '.join(differ)}"
    if shown := [name for name in all_pairs if for_it[name] < OUR_LEVEL]:
        partly = [] if len(shown) == len(all_pairs) else [f"Shown only for {', '.join(shown)}."]
        partly += [f"The other way round for {name}." for name in all_pairs if against[name] < OUR_LEVEL]
        notes = [*partly, *caveats]
        return Verdict(CAVEAT if notes else REPRODUCED, text, " ".join(notes), strip)
    status = NOT_REPRODUCED if min(against.values()) < OUR_LEVEL else UNDECIDED
    return Verdict(status, text, " ".join(caveats), strip)


def judge_order(result: Mapping[str, Any], measure: str, what: str, by_seed: bool = False) -> Verdict:
    """Whether momentum last has less of the measure than momentum first, without clipping."""
    if obstacle := find_obstacle(result):
        return obstacle
    rows, none = index_rows(result), "no clipping"
    pairs = {
        f"{NAMES[last]}{VERSUS}{NAMES[first]}": pair_runs(
            rows, {"cell": last, "protection": none}, {"cell": first}, measure, by_seed
        )
        for last, first in LAST_AND_FIRST
    }
    return judge_pairs(pairs, what, *([] if by_seed else [NOMINAL]))


def judge_clipping(result: Mapping[str, Any], by_seed: bool = False) -> Verdict:
    """Whether damage is less with norm clipping, and with z_clip, than without."""
    if obstacle := find_obstacle(result):
        return obstacle
    rows, none, names = index_rows(result), {"protection": "no clipping"}, ("norm clipping", "z_clip")
    pairs = {f"{name}{VERSUS}none": pair_runs(rows, {"protection": name}, none, "damage", by_seed) for name in names}
    return judge_pairs(pairs, "damage", *([] if by_seed else [NOMINAL, *_find_harm(rows, names)]))


def _find_harm(rows: Mapping[Key, Row], protections: Sequence[str]) -> Iterator[str]:
    """The kinds of bad batches that cost more with a protection than without."""
    for injection, name in product(sorted({key.injection for key in rows}), protections):
        some = {key: row for key, row in rows.items() if key.injection == injection}
        pairs = pair_runs(some, {"protection": name}, {"protection": "no clipping"}, "damage", by_seed=False)
        if pairs and (p := signed_rank([pair[::-1] for pair in pairs])) < OUR_LEVEL:
            yield f"Damage by {INJECTION_NAMES[injection]} is larger with {name} (p = {p:.2g})."


def judge_divergence(result: Mapping[str, Any]) -> Verdict:
    """Whether fewer runs diverge with momentum last than with momentum first, without clipping."""
    if obstacle := find_obstacle(result):
        return obstacle
    rows = {key: row for key, row in index_rows(result).items() if key.protection == "no clipping"}
    lost = {cell: [row["diverged"] for key, row in rows.items() if key.cell == cell] for cell in NAMES}
    counts = (Estimate(NAMES[cell], sum(of), None, len(of)) for cell, of in lost.items())
    strip = Strip("runs that diverged", tuple(counts), 0)
    pairs = [
        (row["diverged"], rows[key._replace(cell=first)]["diverged"])
        for last, first in LAST_AND_FIRST
        for key, row in rows.items()
        if key.cell == last and key._replace(cell=first) in rows
    ]
    only_last, only_first = pairs.count((True, False)), pairs.count((False, True))
    if not only_last + only_first:
        return Verdict(UNDECIDED, "", f"None of {len(pairs)} pairs of runs differs.", strip)
    p_for, p_against = (
        float(stats.binomtest(count, only_last + only_first, alternative="greater").pvalue)
        for count in (only_first, only_last)
    )
    text = (
        f"of {len(pairs)} pairs only momentum first diverged in {only_first}, only last in {only_last}; p = {p_for:.2g}"
    )
    if p_for < OUR_LEVEL:
        return Verdict(CAVEAT, text, NOMINAL, strip)
    return Verdict(NOT_REPRODUCED if p_against < OUR_LEVEL else UNDECIDED, text, NOMINAL, strip)


def judge_unclipped(result: Mapping[str, Any], gain: bool) -> Verdict:
    """Whether momentum last ends at a lower loss than momentum first without clipping, or gains less by clipping."""
    if obstacle := find_obstacle(result):
        return obstacle
    losses = result["losses"]
    if gain and any(loss is None for cell in losses.values() for loss in cell["clipped"].values()):
        return Verdict(UNDECIDED, "", "A run with clipping diverged: there is nothing to compare with.")

    def measure(cell: str, seed: str) -> float:
        loss = losses[cell]["unclipped"][seed]
        return math.inf if loss is None else loss - (losses[cell]["clipped"][seed] if gain else 0.0)

    pairs = {
        f"{NAMES[last]}{VERSUS}{NAMES[first]}": [
            (measure(last, seed), measure(first, seed)) for seed in losses[last]["unclipped"]
        ]
        for last, first in LAST_AND_FIRST
    }
    return judge_pairs(pairs, "loss gained by clipping" if gain else "final validation loss")


judges("spikes-text-unclipped-loss")(partial(judge_unclipped, gain=False))
judges("spikes-text-unclipped-gain")(partial(judge_unclipped, gain=True))


def judge_regime(result: Mapping[str, Any], regime: str, judge: Callable[..., Verdict], **options: Any) -> Verdict:
    """A verdict on MNIST with the betas of one regime; `--quick` runs the other only."""
    part = result["regimes"].get(regime)
    return judge(part, **options) if part else Verdict(NOT_RUN, "", "Not run with --quick.")


RULES_BY_CLAIM: dict[str, Callable[..., Verdict]] = {
    "recovery": partial(judge_order, measure="recovery", what="steps to recovery"),
    "damage": partial(judge_order, measure="damage", what="damage"),
    "clipping": judge_clipping,
    "divergence": judge_divergence,
}
for claim, rule in RULES_BY_CLAIM.items():
    for task, queue in recipes.TASKS.items():
        if queue.clipped or claim != "clipping":
            judges(f"spikes-{task}-{claim}")(rule)
    for regime in ("usual", "short"):
        options: dict[str, Any] = {} if claim == "divergence" else {"by_seed": True}
        judges(f"spikes-mnist-{regime}-{claim}")(partial(judge_regime, regime=regime, judge=rule, **options))
