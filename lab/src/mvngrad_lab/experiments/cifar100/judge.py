"""Verdicts on Table 1 and on fig:thm_vgap_ada_prop_cifar."""

from __future__ import annotations

from functools import partial
from statistics import fmean, median
from typing import Any

from mvngrad_lab.report.claims import load_claims
from mvngrad_lab.report.statistics import welch
from mvngrad_lab.report.tables import SECOND_MOMENT, VARIANCE, check_rows, describe
from mvngrad_lab.report.verdicts import COMPARED, NOT_RUN, UNDECIDED, Verdict, decide, judges

MARGIN = 0.6
"""Points of accuracy."""
ERRORS = 2
"""Standard errors by which a gap must be above 0."""


def judge_accuracy(result: dict[str, Any], kind: str, batch: str) -> Verdict:
    """Whether the means are within MARGIN of the paper's."""
    values, verdict = check_rows(result["cells"][batch], f"{kind}_accuracy")
    if verdict:
        return verdict
    paper = next(claim.values for claim in load_claims() if claim.id == f"cifar-{kind}-{batch}")
    off = {cell: fmean(accuracies) - paper[cell] for cell, accuracies in values.items()}
    text = f"{describe(values)}; off by " + ", ".join(f"{cell} {by:+.2f}" for cell, by in off.items())
    outside = [cell for cell, by in off.items() if abs(by) > MARGIN]
    return decide(len(outside) < len(off), text, f"Outside {MARGIN} points: {', '.join(outside)}." if outside else "")


def judge_order(result: dict[str, Any], batch: str) -> Verdict:
    """Whether variance is above second moment; and MVN-Grad near AdaBelief at batch 128, or above it at 1024."""
    values, verdict = check_rows(result["cells"][batch], "test_accuracy")
    if verdict:
        return verdict
    p = [welch(values[low], values[high]) for low in SECOND_MOMENT for high in VARIANCE]
    lead = {cell: fmean(values["MVN-Grad"]) - fmean(accuracies) for cell, accuracies in values.items()}
    above = ", ".join(f"{cell} by {lead[cell]:.2f}" for cell in SECOND_MOMENT)
    text = f"{describe(values)}; MVN-Grad above {above}; largest p {max(p):.2g}, one-sided"
    if batch == "128":
        return decide(max(p) < 0.01 and abs(lead["AdaBelief"]) <= MARGIN, text)
    best = welch(values["AdaBelief"], values["MVN-Grad"])
    caveat = f"MVN-Grad less AdaBelief: {lead['AdaBelief']:+.2f}, p = {best:.2g}."
    return decide(max(p) < 0.01, text, caveat if best >= 0.05 else "")


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
    text = "; ".join(f"{median(of):.0f} s at batch {batch} (n={len(of)})" for batch, of in times.items())
    return Verdict(UNDECIDED, f"medians without compilation: {text}", COMPARED)


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
    text = f"{'; '.join(texts)} (n = 1 run each, K = {result['K']}; {result['data']})"
    caveat = "Not at every checkpoint." if min(counts) < checkpoints else ""
    return decide(min(counts) >= 0.75 * checkpoints, text, caveat)
