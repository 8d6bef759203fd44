"""Verdicts on thm:var_adabelief_mvngrad and prop:approx_mean."""

from __future__ import annotations

from typing import Any

from mvngrad_lab.report.verdicts import Verdict, decided, judges


@judges("gap-closed-form")
def _(result: dict[str, Any]) -> Verdict:
    texts, holds = [], True
    for row in result["symmetric"]:
        estimate, closed = row["estimate"], row["closed_form"]
        holds &= estimate["low"] - 1e-12 <= closed <= estimate["high"] + 1e-12
        holds &= abs(row["quadrature"] - closed) <= 1e-9
        texts.append(f"{row['noise']}: {closed:.5f} in [{estimate['low']:.5f}, {estimate['high']:.5f}]")
    return decided(holds, f"{'; '.join(texts)} (n = {result['symmetric'][0]['estimate']['samples']:,})")


@judges("gap-nonnegative")
def _(result: dict[str, Any]) -> Verdict:
    found = {row["noise"]: row["closed_form"] for row in result["symmetric"]}
    holds = all(gap >= 0 for gap in found.values()) and found["normal"] > 0 and found["uniform"] > 0
    text = ", ".join(f"{noise} {gap:.4f}" for noise, gap in found.items())
    return decided(holds, f"{text}. Signs leave (g−m)², and with it the normalizer, no randomness")


@judges("gap-lower-bound")
def _(result: dict[str, Any]) -> Verdict:
    tracking, turning = result["tracking"], result["tracking"]["turning"]["along m"]
    slack = [gap - bound for gap, bound in zip(tracking["gaps"], tracking["bound"], strict=True)]
    best = max(tracking["bound"])
    text = f"smallest slack over {len(slack)} errors {min(slack):.3g}; largest bound {best:.3g}"
    turned = f" The gap itself turns negative where m underrates the mean by {turning:.2f} σ." if turning else ""
    caveat = f"The bound is negative throughout, because of σ/ε², and promises nothing here.{turned}"
    return decided(min(slack) >= 0, text, caveat if best < 0 else "")


@judges("gap-beyond")
def _(result: dict[str, Any]) -> Verdict:
    rows = result["stationary"]
    worst = max(row["negative"] for row in rows)
    text = "; ".join(
        f"β₂ {r['beta2']:g}, μ/σ {r['mu']:g}: {r['mean']:.2g} [{r['low']:.2g}, {r['high']:.2g}]" for r in rows
    )
    caveat = f"On average and not step by step: up to {worst:.0%} of the pasts have a negative gap."
    return decided(
        all(row["low"] > 0 for row in rows), f"mean gap, 99% interval. {text}", caveat if worst > 0.05 else ""
    )
