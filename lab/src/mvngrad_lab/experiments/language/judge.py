"""Verdicts on Table 2, as far as a stand-in text can decide it, and on how long runs take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import stdev
from typing import Any

from mvngrad_lab.experiments.language.records import table2
from mvngrad_lab.report import Row
from mvngrad_lab.report.claims import find_values
from mvngrad_lab.report.statistics import LEVEL, adjust_by_holm, p_variance_above, welch
from mvngrad_lab.report.tables import (
    OPTIMIZERS,
    SECOND_MOMENT,
    VARIANCE,
    check_rows,
    describe,
    describe_counts,
    get_values,
    judge_deviations,
    judge_means,
    make_mean_strip,
)
from mvngrad_lab.report.verdicts import (
    CAVEAT,
    COMPARED,
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

STAND_IN = (
    "On the stand-in and for 3,000 steps, not on the paper's text for 100,000: optimizer with optimizer, no number "
    "with the paper's."
)
SHORT = "On the stand-in and for 1,000 steps, not on the paper's text for 100,000, where lower rates may be better."
NEAR = 0.03
"""In validation loss: about twice the deviation of a difference of two runs."""
NOT_BEST = "These runs are not at the best rate of the sweep for each, or the sweep is not done."
CUT_SHORT = Verdict(NOT_RUN, "", "`python -m benchmarks.language` was cut short before this part.")
COMMON_RATE = f"{table2()[0].lr:g}"
"""The learning rate at which all four are compared."""
OTHERS = [cell for cell in OPTIMIZERS if cell != "MVN-Grad"]


def get_losses(rows: dict[str, Row]) -> dict[str, list[float]]:
    return {cell: get_values(row, "validation_loss") for cell, row in rows.items()}


def describe_losses(losses: dict[str, list[float]]) -> str:
    return f"validation loss on the stand-in: {describe(losses, 4) or 'none yet'}"


def make_loss_strip(losses: dict[str, list[float]]) -> Strip:
    return make_mean_strip("validation loss on the stand-in", losses, digits=4)


def check_runs(table: dict[str, Row], better: Sequence[str], others: Sequence[str]) -> Verdict | None:
    """The verdict if runs of these are missing, or have diverged and so have no loss to compare."""
    rows, text = {cell: table[cell] for cell in (*better, *others)}, describe_losses(get_losses(table))
    if left := describe_counts(rows, "to_come"):
        return Verdict(NOT_RUN, text, f"Runs on the stand-in to come: {left}.")
    if lost := describe_counts(rows, "diverged"):
        status = NOT_REPRODUCED if any(rows[cell]["diverged"] for cell in better) else UNDECIDED
        return Verdict(status, f"{text}; diverged: {lost}", STAND_IN)
    return None


def describe_rates(result: dict[str, Any]) -> str:
    """Which optimizers would do better at another rate than the common one."""
    best = result["best_rate"]
    other = [f"{cell} at {best[cell]}" for cell in OPTIMIZERS if best[cell] not in (None, COMMON_RATE)]
    unknown = [cell for cell in OPTIMIZERS if best[cell] is None]
    sentences = [f"In the sweep of rates {', '.join(other)} did better than at {COMMON_RATE}."] if other else []
    if unknown:
        sentences.append(f"The sweep of rates has no best one for {', '.join(unknown)}.")
    return " ".join(sentences)


def judge_below(result: dict[str, Any], low: Sequence[str], high: Sequence[str], table: str = "cells") -> Verdict:
    """Whether each of `low` has a lower mean loss than each of `high`: at one rate, or in `tuned` each at its best."""
    if (verdict := check_runs(result[table], low, high)) is not None:
        return verdict
    losses = get_losses(result[table])
    if table == "tuned" and result["best_rate"] != result["tuned_rate"]:
        return Verdict(NOT_RUN, describe_losses(losses), NOT_BEST)
    pairs = [(losses[one], losses[other]) for one in low for other in high]
    p_for = max(welch(*pair) for pair in pairs)
    p_against = min(adjust_by_holm([welch(*reversed(pair)) for pair in pairs]))
    text = f"largest p for the claim {p_for:.2g}, smallest p against it {p_against:.2g}"
    note = f"{STAND_IN} {describe_rates(result) if table == 'cells' else ''}".strip()
    return decide_transferred(p_for < LEVEL, p_against < LEVEL, text, note, make_loss_strip(losses))


judges("stand-in-adam")(partial(judge_below, low=["MVN-Grad"], high=["Adam"]))
judges("stand-in-order")(partial(judge_below, low=["MVN-Grad"], high=OTHERS))
judges("stand-in-variance")(partial(judge_below, low=VARIANCE, high=SECOND_MOMENT))
judges("stand-in-tuned-order")(partial(judge_below, low=["MVN-Grad"], high=OTHERS, table="tuned"))
judges("stand-in-tuned-variance")(partial(judge_below, low=VARIANCE, high=SECOND_MOMENT, table="tuned"))


@judges("stand-in-selected")
def judge_selected_rate(result: dict[str, Any]) -> Verdict:
    """Whether the paper's learning rate is near the best of those tried, for each optimizer."""
    rows, far = list[Estimate](), list[str]()
    for cell, tried in result["rates"].items():
        if left := describe_counts(tried, "to_come"):
            return Verdict(NOT_RUN, "", f"Runs of {cell} to come: {left}.")
        losses = {rate: values[0] for rate, values in get_losses(tried).items() if values}
        if COMMON_RATE not in losses:
            return Verdict(UNDECIDED, "", f"{cell} diverged at {COMMON_RATE}.")
        best = min(losses.values())
        rows.append(Estimate(cell, losses[COMMON_RATE], None, 1, best))
        if losses[COMMON_RATE] - best > NEAR:
            far.append(cell)
    best_rates = ", ".join(f"{cell} {rate}" for cell, rate in result["best_rate"].items())
    strip = Strip(f"validation loss on the stand-in at {COMMON_RATE}", tuple(rows), 4, "best")
    return decide_transferred(not far, len(far) >= 2, f"best rates: {best_rates}", f"{SHORT} One seed.", strip)


@judges("stand-in-spread")
def judge_spread(result: dict[str, Any]) -> Verdict:
    if (verdict := check_runs(result["cells"], (), list(OPTIMIZERS))) is not None:
        return verdict
    losses = get_losses(result["cells"])
    p = p_variance_above(losses["LaProp"], [losses[cell] for cell in OPTIMIZERS if cell != "LaProp"])
    text = f"test for a larger variance of LaProp: p = {p:.2g}"
    return decide_transferred(p < LEVEL, 1 - p < LEVEL, text, STAND_IN, make_loss_strip(losses))


# The paper's texts


def check_official(result: dict[str, Any], text: str, metric: str) -> tuple[dict[str, list[float]], Verdict | None]:
    """The values of a table on the paper's text, and the verdict if runs are missing or have diverged."""
    rows = result[text]
    if text == "wikitext103":
        rows = {cell: {**row, metric: list(map(_to_perplexity, row[metric]))} for cell, row in rows.items()}
    return check_rows(rows, metric)


def _to_perplexity(loss: float | None) -> float | None:
    return None if loss is None else math.exp(loss)


def judge_official(result: dict[str, Any], claim: str, text: str, metric: str) -> Verdict:
    """Means within a margin of the paper's, or deviations within a factor of 2."""
    values, verdict = check_official(result, text, metric)
    if verdict:
        return verdict
    paper = find_values(claim)
    if "deviation" in claim:
        verdict = judge_deviations(values, paper, 4 if text == "wikitext103" else 3)
        most = max(values, key=lambda cell: stdev(values[cell]))
        if claim == "wikitext-deviation-validation" and verdict.status == REPRODUCED and most != "LaProp":
            return replace(verdict, status=CAVEAT, note=f"{most} varies most, not LaProp.")
        return verdict
    return judge_means(name_metric(text, metric), values, paper, *((2.0, 2) if text == "wikitext103" else (0.02, 3)))


def name_metric(text: str, metric: str) -> str:
    """What `check_official` returns of a metric: perplexity for WikiText-103, loss for OpenWebText."""
    kind = metric.removesuffix("_loss")
    return f"{kind} {'perplexity' if text == 'wikitext103' else 'loss'} on {text}"


def judge_official_order(result: dict[str, Any], text: str, metric: str) -> Verdict:
    """Whether MVN-Grad has a lower mean than each other."""
    values, verdict = check_official(result, text, metric)
    if verdict:
        lost = any(row["diverged"] for cell, row in result[text].items() if cell.startswith("MVN-Grad"))
        return replace(verdict, status=NOT_REPRODUCED) if lost and verdict.status == UNDECIDED else verdict
    ours, *others = sorted(values, key=lambda cell: not cell.startswith("MVN-Grad"))
    p_for = max(welch(values[ours], values[other]) for other in others)
    p_against = min(adjust_by_holm([welch(values[other], values[ours]) for other in others]))
    status = REPRODUCED if p_for < LEVEL else NOT_REPRODUCED if p_against < LEVEL else UNDECIDED
    strip = make_mean_strip(name_metric(text, metric), values, digits=3)
    return Verdict(status, f"largest p for the claim {p_for:.2g}, smallest p against it {p_against:.2g}", strip=strip)


for name, text in (("wikitext", "wikitext103"), ("openwebtext", "openwebtext")):
    judges(f"{name}-order")(partial(judge_official_order, text=text, metric="validation_loss"))
    for kind in ("validation", "train"):
        for claim in (f"{name}-{kind}", f"{name}-deviation-{kind}"):
            judges(claim)(partial(judge_official, claim=claim, text=text, metric=f"{kind}_loss"))


# Time


@judges("time-openwebtext")
def compare_step_times(result: dict[str, Any]) -> Verdict:
    rows = {row["name"]: row for row in result["overhead"].get("124M", {}).get("rows", [])}
    names = {cell: f"{cell.replace('-', '')} float32" for cell in ("AdamW", "MVN-GradW", "LaPropW", "AdaBeliefW")}
    if not set(names.values()) <= rows.keys():
        return CUT_SHORT
    paper = find_values("time-openwebtext")
    steps = {cell: rows[name]["step_seconds"] for cell, name in names.items()}
    of_adamw = [Estimate(c, s / steps["AdamW"], None, None, paper[c] / paper["AdamW"]) for c, s in steps.items()]
    strip = Strip("time of a training step, of AdamW's", tuple(of_adamw), 3)
    own = ", ".join(f"{cell} {1e3 * rows[name]['optimizer_seconds']:.2f} ms" for cell, name in names.items())
    hours, theirs = steps["AdamW"] * 120_000 / 3600, paper["AdamW"] / 3600
    whole = result["overhead"]["124M"].get("whole_ratio")
    text = (
        f"a step with AdamW takes {steps['AdamW']:.4f} s, 120k of them {hours:.1f} h (the paper's {theirs:.1f} h); the "
        f"optimizer's own part: {own}"
    )
    text += f"; a whole step with MVN-GradW takes {whole:.4f} of one with torch's AdamW" if whole else ""
    return Verdict(COMPARED, text, "Another GPU and another loop.", strip)


@judges("time-wikitext")
def compare_hours(result: dict[str, Any]) -> Verdict:
    ours = next((row for row in result["throughput"].get("30M", []) if row["name"] == "ours"), None)
    if ours is None:
        return CUT_SHORT
    row = Estimate("100k steps", ours["projected_seconds"] / 3600, reference=4.0)
    return Verdict(COMPARED, "", "Another GPU and another loop.", Strip("hours, evaluations not counted", (row,)))
