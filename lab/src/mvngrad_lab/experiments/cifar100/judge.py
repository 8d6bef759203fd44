"""Verdicts on Table 1 and on fig:thm_vgap_ada_prop_cifar."""

from __future__ import annotations

from functools import partial
from statistics import fmean, median
from typing import Any

from mvngrad_lab.report.claims import load_claims
from mvngrad_lab.report.statistics import shift_to, welch
from mvngrad_lab.report.tables import SECOND_MOMENT, VARIANCE, check_rows, make_strip
from mvngrad_lab.report.verdicts import COMPARED, NOT_RUN, Estimate, Strip, Verdict, decide, judges

MARGIN = 0.6
"""Points of accuracy."""
ERRORS = 2
"""Standard errors by which a gap must be above 0."""


def get_paper(kind: str, batch: str) -> dict[str, float]:
    """The column of Table 1."""
    return next(claim.values for claim in load_claims() if claim.id == f"cifar-{kind}-{batch}")


def judge_accuracy(result: dict[str, Any], kind: str, batch: str) -> Verdict:
    """Whether the means are within MARGIN of the paper's."""
    values, verdict = check_rows(result["cells"][batch], f"{kind}_accuracy")
    if verdict:
        return verdict
    paper = get_paper(kind, batch)
    off = {cell: fmean(accuracies) - paper[cell] for cell, accuracies in values.items()}
    outside = [cell for cell, by in off.items() if abs(by) > MARGIN]
    caveat = f"Outside {MARGIN} points: {', '.join(outside)}." if outside else ""
    return decide(len(outside) < len(off), "", caveat, make_strip(f"{kind} accuracy, %", values, paper))


def judge_order(result: dict[str, Any], batch: str) -> Verdict:
    """Whether variance is above second moment; and MVN-Grad near AdaBelief at batch 128, or above it at 1024."""
    values, verdict = check_rows(result["cells"][batch], "test_accuracy")
    if verdict:
        return verdict
    p = [welch(values[low], values[high]) for low in SECOND_MOMENT for high in VARIANCE]
    paper = get_paper("test", batch)
    claimed = {cell: shift_to(accuracies, paper[cell]) for cell, accuracies in values.items()}
    could_hold = max(welch(claimed[low], claimed[high]) for low in SECOND_MOMENT for high in VARIANCE) < 0.01
    lead = {cell: fmean(values["MVN-Grad"]) - fmean(accuracies) for cell, accuracies in values.items()}
    above = ", ".join(f"{cell} by {lead[cell]:.2f}" for cell in SECOND_MOMENT)
    text = f"MVN-Grad above {above}; largest p {max(p):.2g}, one-sided"
    strip = make_strip("test accuracy, %", values, paper)
    if batch == "128":
        near = abs(lead["AdaBelief"]) <= MARGIN
        return decide(max(p) < 0.01 and near, text, strip=strip, could_hold=could_hold or not near)
    best = welch(values["AdaBelief"], values["MVN-Grad"])
    caveat = f"MVN-Grad less AdaBelief: {lead['AdaBelief']:+.2f}, p = {best:.2g}."
    return decide(max(p) < 0.01, text, caveat if best >= 0.05 else "", strip, could_hold)


for batch in ("128", "1024"):
    judges(f"cifar-order-{batch}")(partial(judge_order, batch=batch))
    for kind in ("test", "train"):
        judges(f"cifar-{kind}-{batch}")(partial(judge_accuracy, kind=kind, batch=batch))


@judges("time-cifar")
def compare_times(result: dict[str, Any]) -> Verdict:
    times = {
        batch: [seconds for row in cells.values() for seconds in row["seconds"] if seconds is not None]
        for batch, cells in result["cells"].items()
    }
    if not all(times.values()):
        return Verdict(NOT_RUN, "", "At one batch size, no run had the GPU to itself yet.")
    rows = (Estimate(f"batch {batch}", median(of), (min(of), max(of)), len(of), 4000) for batch, of in times.items())
    strip = Strip("seconds of a run without compilation, median and range", tuple(rows), 0)
    return Verdict(COMPARED, "", "Another GPU and another loop.", strip)


@judges("cifar-gap")
def judge_gap(result: dict[str, Any]) -> Verdict:
    checkpoints, counts, texts = len(result["epochs"]), [], []
    for cell, row in result["trained_with"].items():
        positive = sum(gap > ERRORS * error for gap, error in zip(row["gap"], row["error"], strict=True))
        shares = [gap / before for gap, before in zip(row["gap"], row["before"], strict=True)]
        counts.append(positive)
        texts.append(
            f"trained with {cell}: positive at {positive} of {checkpoints} checkpoints, "
            f"{min(shares):.2%} to {max(shares):.2%} of AdaBelief's variance"
        )
    text = f"{'; '.join(texts)} (n = 1 run each, K = {result['K']})"
    caveat = "Not at every checkpoint." if min(counts) < checkpoints else ""
    return decide(min(counts) >= 0.75 * checkpoints, text, caveat)
