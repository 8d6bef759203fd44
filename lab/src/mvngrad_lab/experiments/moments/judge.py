"""Verdicts on ass:stationary, on sign collapse, and on the bound of z."""

from __future__ import annotations

import math
from typing import Any

from mvngrad_lab.report.verdicts import Strip, Verdict, decide, judges

TOLERANCE = 0.05


def factor(row: dict[str, Any]) -> float:
    """E[s] / sigma^2 where the mean is known only by its average."""
    return float(2 * row["beta1"] ** 2 / (1 + row["beta1"]))


def make_ratio_strip(what: str, rows: list[dict[str, Any]], key: str) -> Strip:
    """A ratio that is 1 in the paper, of each row with the smallest sigma."""
    smallest = min(row["sigma"] for row in rows)
    shown = ((f"β = ({r['beta1']:g}, {r['beta2']:g})", r[key], 1) for r in rows if r["sigma"] == smallest)
    return Strip.of_numbers(f"{what}, σ = μ/{1 / smallest:,.0f}", shown, "paper", 3)


@judges("moments-v")
def _(result: dict[str, Any]) -> Verdict:
    rows = result["rows"]
    worst = max(abs(row["v"] - 1) for row in rows)
    strip = make_ratio_strip("v over μ² + σ²", rows, "v")
    return decide(worst <= TOLERANCE, f"off by at most {worst:.2%} at all σ", strip=strip)


@judges("moments-s")
def _(result: dict[str, Any]) -> Verdict:
    rows = result["rows"]
    strip = make_ratio_strip("s over σ²", rows, "s")
    if all(abs(row["s"] - 1) <= TOLERANCE for row in rows):
        return decide(True, "", strip=strip)
    follows = all(abs(row["s"] / factor(row) - 1) <= TOLERANCE for row in rows)
    return decide(follows, "", "It is σ² 2β₁²/(1+β₁): m contains the gradient that it is compared with.", strip)


@judges("moments-sign-collapse")
def _(result: dict[str, Any]) -> Verdict:
    rows = [row for row in result["rows"] if row["sigma"] <= 0.01]
    worst = max(row["sign_error"] for row in rows)
    strip = Strip.of_numbers("mean of ||z| − 1|, %", [("largest, σ ≤ μ/100", 100 * worst, 2)])
    return decide(worst <= 0.02, "", strip=strip)


@judges("moments-preconditioner")
def _(result: dict[str, Any]) -> Verdict:
    rows = [row for row in result["rows"] if row["sigma"] <= 0.01]
    strip = make_ratio_strip("median of z over μ/σ", rows, "z")
    if all(abs(row["z"] - 1) <= TOLERANCE for row in rows):
        return decide(True, "", strip=strip)
    follows = all(abs(row["z"] * math.sqrt(factor(row)) - 1) <= TOLERANCE for row in rows)
    return decide(follows, "", "Up to the constant √((1+β₁)/2)/β₁, which s brings.", strip)


@judges("moments-z-bound")
def _(result: dict[str, Any]) -> Verdict:
    shares = [row["largest"] / row["bound"] for row in result["largest"]]
    label = f"four sequences, {len(shares)} pairs of betas"
    strip = Strip.of_numbers("largest |z|, of G/ε", [(label, max(shares), 1)], "bound")
    return decide(max(shares) <= 1, "", strip=strip)
