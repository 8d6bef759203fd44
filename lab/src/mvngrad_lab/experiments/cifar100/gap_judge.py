"""Verdict on fig:thm_vgap_ada_prop_cifar."""

from __future__ import annotations

from typing import Any

from mvngrad_lab.report.verdicts import Verdict, decided, judges

ERRORS = 2
"""Standard errors by which a gap must be above 0."""


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
