"""Verdicts on thm:var_adabelief_mvngrad and prop:approx_mean."""

from __future__ import annotations

from typing import Any

from mvngrad_lab.report.verdicts import UNDECIDED, Estimate, Strip, Verdict, decide, judges


@judges("gap-closed-form")
def _(result: dict[str, Any]) -> Verdict:
    rows, holds = [], True
    for row in result["symmetric"]:
        estimate, closed = row["estimate"], row["closed_form"]
        holds &= estimate["low"] - 1e-12 <= closed <= estimate["high"] + 1e-12
        holds &= abs(row["quadrature"] - closed) <= 1e-9
        middle = (estimate["low"] + estimate["high"]) / 2
        interval = estimate["low"], estimate["high"]
        rows.append(Estimate(f"{row['noise']} noise", middle, interval, estimate["samples"], closed))
    strip = Strip("the gap by Monte Carlo and its 99% interval", tuple(rows), 5, "closed form")
    return decide(holds, "", strip=strip)


@judges("gap-nonnegative")
def _(result: dict[str, Any]) -> Verdict:
    gaps = {row["noise"]: row["closed_form"] for row in result["symmetric"]}
    holds = all(gap >= 0 for gap in gaps.values()) and gaps["normal"] > 0 and gaps["uniform"] > 0
    rows = tuple(Estimate(f"{noise} noise", gap) for noise, gap in gaps.items())
    return decide(
        holds, "with signs, (g−m)² and the normalizer are not random", strip=Strip("the closed form", rows, 4)
    )


@judges("gap-lower-bound")
def _(result: dict[str, Any]) -> Verdict:
    tracking, turning = result["tracking"], result["tracking"]["turning"]["along m"]
    slack = [gap - bound for gap, bound in zip(tracking["gaps"], tracking["bound"], strict=True)]
    largest = max(tracking["bound"])
    strip = Strip.of_numbers("the gap less its bound", [(f"smallest of {len(slack)} errors", min(slack), 0)])
    caveat = "The bound is negative for every error, because of σ/ε², and says nothing here."
    if turning:
        caveat += f" The gap itself becomes negative where m underestimates the mean by {turning:.2f} σ."
    return decide(min(slack) >= 0, "", caveat if largest < 0 else "", strip)


@judges("gap-beyond")
def _(result: dict[str, Any]) -> Verdict:
    rows = result["stationary"]
    worst = max(row["negative"] for row in rows)
    estimates = (Estimate(f"β₂ {r['beta2']:g}, μ/σ {r['mu']:g}", r["mean"], (r["low"], r["high"])) for r in rows)
    caveat = f"On average, not at every step: up to {worst:.0%} of the pasts have a negative gap."
    holds = all(row["low"] > 0 for row in rows)
    return decide(holds, "", caveat if worst > 0.05 else "", Strip("mean gap and 99% interval", tuple(estimates), None))


@judges("gap-condition")
def _(result: dict[str, Any]) -> Verdict:
    condition = result["condition"]
    text = f"the condition holds at {condition['holds']} of {condition['settings']} settings"
    if condition["smallest_gap"] is None:
        return Verdict(UNDECIDED, text)
    needed = ", ".join(
        f"ε = {eps}: {'none tried' if m is None else f'{m:.2g} σ'}" for eps, m in condition["smallest_m"].items()
    )
    caveat = f"It holds only where |m| is far above the noise; smallest |m| with {needed}."
    smallest = min((m for m in condition["smallest_m"].values() if m is not None), default=0.0)
    strip = Strip.of_numbers("the gap", [("smallest where it holds", condition["smallest_gap"], 0)])
    return decide(condition["smallest_gap"] >= 0, text, caveat if smallest > 10 else "", strip)
