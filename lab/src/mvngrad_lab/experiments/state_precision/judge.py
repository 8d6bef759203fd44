"""The verdicts on state in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from mvngrad_lab.experiments.state_precision.arms import (
    ADAMW_SEEDS,
    IMAGE_ARMS,
    IMAGE_SEEDS,
    INT8,
    OURS,
    PEERS,
    TORCH,
)  # fmt: skip
from mvngrad_lab.report.statistics import (
    OUR_LEVEL,
    Contrast,
    adjust_by_holm,
    estimate_contrast,
    find_common_seeds,
    worse_by_at_most,
)
from mvngrad_lab.report.tables import check_rows, make_mean_strip
from mvngrad_lab.report.verdicts import (
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    UNDECIDED,
    UNDERPOWERED,
    Estimate,
    Strip,
    Verdict,
    decide,
    judges,
)  # fmt: skip

MARGIN = 0.3
"""Points of accuracy."""
LOSS_MARGIN = 0.02
"""Nats of validation loss."""


@judges("cifar-state-precision")
def judge_state_precision(result: dict[str, Any]) -> Verdict:
    values, verdict = check_rows(result["states"], "test_accuracy", link="with")
    if verdict:
        small_lost = verdict.status == UNDECIDED and not result["states"]["float32"]["diverged"]
        return replace(verdict, status=NOT_REPRODUCED) if small_lost else verdict
    texts, reference, within, beyond, widths = list[str](), values["float32"], list[str](), list[str](), list[float]()
    for state in ("bf16", "int8"):
        most, least = worse_by_at_most(values[state], reference), -worse_by_at_most(reference, values[state])
        loss = fmean(reference) - fmean(values[state])
        texts.append(f"{state} worse by {loss:+.2f}, at most {most:+.2f}")
        widths.append(most - loss)
        if most <= MARGIN:
            within.append(state)
        if least > MARGIN:
            beyond.append(state)
    caveat, strip = f"Only {within[0]}." if len(within) == 1 else "", make_mean_strip("test accuracy, %", values)
    if within or beyond:
        return decide(bool(within), "; ".join(texts), caveat, strip)
    return Verdict(UNDECIDED, "; ".join(texts), UNDERPOWERED if min(widths) > MARGIN else "", strip)


# The queues

Arms = Mapping[str, Mapping[str, float | None]]


def compute_loss(arms: Arms, compared: Sequence[str], arm: str, other: str, sign: int) -> Contrast | None:
    """How much worse an arm is than another, with the residual of the compared arms and seeds as blocks.

    `sign` is 1 if larger values are better, else -1. None with fewer than two seeds, or if a run diverged.
    """
    seeds = find_common_seeds(arms, compared)
    values = {each: [arms[each][seed] for seed in seeds] for each in compared}
    if len(seeds) < 2 or any(None in row for row in values.values()):
        return None
    return estimate_contrast(values, {other: float(sign), arm: -float(sign)})  # type: ignore[arg-type]


def judge_not_worse(
    result: dict[str, Any],
    compared: Sequence[str],
    pairs: Sequence[tuple[str, str]],
    count: int,
    margin: float,
    sign: int,
) -> Verdict:
    """Whether in each pair the first is worse than the second by less than the margin."""
    arms, unit, digits = result["arms"], "points" if sign > 0 else "nats", 2 if sign > 0 else 4
    if waiting := [f"{arm} {len(arms[arm])}" for arm in compared if len(arms[arm]) < count]:
        return Verdict(NOT_RUN, "", f"Seeds done, of {count}: {', '.join(waiting)}.")
    if lost := [arm for arm in compared if None in arms[arm].values()]:
        against = any(arm in lost and other not in lost for arm, other in pairs)
        return Verdict(NOT_REPRODUCED if against else UNDECIDED, f"diverged: {', '.join(lost)}")
    losses = {pair: compute_loss(arms, compared, *pair, sign) for pair in pairs}
    found = {pair: loss for pair, loss in losses.items() if loss is not None}
    below = max(loss.p_below(margin) for loss in found.values())
    above = min(adjust_by_holm([loss.p_above(margin) for loss in found.values()]))
    rows = tuple(
        Estimate(f"{arm} against {other}", loss.estimate, loss.interval(), count, margin)
        for (arm, other), loss in found.items()
    )
    strip = Strip(f"{unit} lost, mean over seeds and 95% interval", rows, digits, "limit")
    status = REPRODUCED if below < OUR_LEVEL else NOT_REPRODUCED if above < OUR_LEVEL else UNDECIDED
    text = f"p for less than {margin:g} {unit} {below:.2g}, for more {above:.2g}"
    return Verdict(status, text, strip=strip)


_judge_images = partial(
    judge_not_worse, compared=tuple(IMAGE_ARMS), count=len(IMAGE_SEEDS), margin=MARGIN, sign=1
)  # fmt: skip
_judge_adamw = partial(judge_not_worse, count=len(ADAMW_SEEDS), margin=LOSS_MARGIN, sign=-1)
EIGHT_BITS = tuple(f"{package}, 8 bits" for package in PEERS)
for _arm in ("bf16", "int8", "lean"):
    judges(f"images-{_arm}")(partial(_judge_images, pairs=((_arm, "float32"),)))
judges("adamw-float32")(partial(_judge_adamw, compared=(TORCH, OURS, INT8), pairs=((OURS, TORCH),)))
judges("adamw-int8")(partial(_judge_adamw, compared=(TORCH, OURS, INT8), pairs=((INT8, TORCH),)))
judges("adamw-int8-peers")(
    partial(_judge_adamw, compared=(INT8, *EIGHT_BITS), pairs=tuple((INT8, peer) for peer in EIGHT_BITS))
)
