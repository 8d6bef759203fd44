"""Verdicts on Table 1 and on fig:thm_vgap_ada_prop_cifar."""

from __future__ import annotations

from functools import partial
from statistics import fmean, median
from typing import Any

from mvngrad_lab.report.claims import load_claims
from mvngrad_lab.report.statistics import welch
from mvngrad_lab.report.tables import SECOND_MOMENT, VARIANCE, check_rows, describe
from mvngrad_lab.report.verdicts import COMPARED, NOT_RUN, UNDECIDED, Verdict, decided, judges

NEAR = 0.6
"""Points of accuracy."""
ERRORS = 2
"""Standard errors by which a gap must be above 0."""


def near(result: dict[str, Any], kind: str, batch: str) -> Verdict:
    values, at_once = check_rows(result["cells"][batch], f"{kind}_accuracy")
    if at_once:
        return at_once
    expected = next(each.values for each in load_claims() if each.id == f"cifar-{kind}-{batch}")
    off = {cell: fmean(found) - expected[cell] for cell, found in values.items()}
    text = f"{describe(values)}; off by " + ", ".join(f"{cell} {by:+.2f}" for cell, by in off.items())
    outside = [cell for cell, by in off.items() if abs(by) > NEAR]
    return decided(len(outside) < len(off), text, f"Outside {NEAR} points: {', '.join(outside)}." if outside else "")


def order(result: dict[str, Any], batch: str) -> Verdict:
    """Whether variance is above second moment; and MVN-Grad near AdaBelief at batch 128, or above it at 1024."""
    values, at_once = check_rows(result["cells"][batch], "test_accuracy")
    if at_once:
        return at_once
    p = [welch(values[low], values[high]) for low in SECOND_MOMENT for high in VARIANCE]
    lead = {cell: fmean(values["MVN-Grad"]) - fmean(found) for cell, found in values.items()}
    above = ", ".join(f"{cell} by {lead[cell]:.2f}" for cell in SECOND_MOMENT)
    text = f"{describe(values)}; MVN-Grad above {above}; largest p {max(p):.2g}, one-sided"
    if batch == "128":
        return decided(max(p) < 0.01 and abs(lead["AdaBelief"]) <= NEAR, text)
    best = welch(values["AdaBelief"], values["MVN-Grad"])
    caveat = f"MVN-Grad less AdaBelief: {lead['AdaBelief']:+.2f}, p = {best:.2g}."
    return decided(max(p) < 0.01, text, caveat if best >= 0.05 else "")


@judges("time-cifar")
def _(result: dict[str, Any]) -> Verdict:
    times = {
        batch: [seconds for row in cells.values() for seconds in row["seconds"] if seconds is not None]
        for batch, cells in result["cells"].items()
    }
    if not all(times.values()):
        return Verdict(NOT_RUN, "", "No run of one batch size had the GPU to itself yet.")
    text = "; ".join(f"{median(found):.0f} s at batch {batch} (n={len(found)})" for batch, found in times.items())
    return Verdict(UNDECIDED, f"medians without compilation: {text}", COMPARED)


for batch in ("128", "1024"):
    judges(f"cifar-order-{batch}")(partial(order, batch=batch))
    for kind in ("test", "train"):
        judges(f"cifar-{kind}-{batch}")(partial(near, kind=kind, batch=batch))


@judges("cifar-gap")
def _(result: dict[str, Any]) -> Verdict:
    every, positive, texts = len(result["epochs"]), [], []
    for cell, row in result["trained_with"].items():
        clear = [gap > ERRORS * error for gap, error in zip(row["gap"], row["error"], strict=True)]
        positive.append(sum(clear))
        shares = [gap / before for gap, before in zip(row["gap"], row["before"], strict=True)]
        texts.append(
            f"trained with {cell}: positive at {sum(clear)} of {every} checkpoints, "
            f"{min(shares):.2%} to {max(shares):.2%} of AdaBelief's variance"
        )
    text = f"{'; '.join(texts)} (n = 1 run each, K = {result['K']}; {result['data']})"
    fewest = min(positive)
    return decided(fewest >= 0.75 * every, text, "Not at every checkpoint." if fewest < every else "")
