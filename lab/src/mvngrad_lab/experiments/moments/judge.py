"""Verdicts on ass:stationary, on sign collapse, and on the bound of z."""

from __future__ import annotations

import math
from typing import Any

from mvngrad_lab.report.verdicts import Verdict, decide, judges

TOLERANCE = 0.05


def factor(row: dict[str, Any]) -> float:
    """E[s] / sigma^2 where the mean is known only by its average."""
    return float(2 * row["beta1"] ** 2 / (1 + row["beta1"]))


def describe(rows: list[dict[str, Any]], name: str) -> str:
    return ", ".join(f"({row['beta1']:g}, {row['beta2']:g}) {row[name]:.3f}" for row in rows)


@judges("moments-v")
def _(result: dict[str, Any]) -> Verdict:
    rows = result["rows"]
    worst = max(abs(row["v"] - 1) for row in rows)
    return decide(worst <= TOLERANCE, f"v is off by at most {worst:.2%} of μ² + σ²")


@judges("moments-s")
def _(result: dict[str, Any]) -> Verdict:
    rows = [row for row in result["rows"] if row["sigma"] == min(each["sigma"] for each in result["rows"])]
    text = f"s over σ² at (β₁, β₂): {describe(rows, 's')}"
    if all(abs(row["s"] - 1) <= TOLERANCE for row in result["rows"]):
        return decide(True, text)
    follows = all(abs(row["s"] / factor(row) - 1) <= TOLERANCE for row in result["rows"])
    return decide(follows, text, "It is σ² 2β₁²/(1+β₁): m contains the gradient that it is compared with.")


@judges("moments-sign-collapse")
def _(result: dict[str, Any]) -> Verdict:
    rows = [row for row in result["rows"] if row["sigma"] <= 0.01]
    worst = max(row["sign_error"] for row in rows)
    return decide(worst <= 0.02, f"mean of ||z| − 1| at most {worst:.2%} where σ ≤ μ/100")


@judges("moments-preconditioner")
def _(result: dict[str, Any]) -> Verdict:
    rows = [row for row in result["rows"] if row["sigma"] <= 0.01]
    text = f"median z over μ/σ at (β₁, β₂), σ ≤ μ/100: {describe(rows, 'z')}"
    if all(abs(row["z"] - 1) <= TOLERANCE for row in rows):
        return decide(True, text)
    follows = all(abs(row["z"] * math.sqrt(factor(row)) - 1) <= TOLERANCE for row in rows)
    return decide(follows, text, "Up to the constant √((1+β₁)/2)/β₁, which s brings.")


@judges("moments-z-bound")
def _(result: dict[str, Any]) -> Verdict:
    shares = [row["largest"] / row["bound"] for row in result["largest"]]
    text = f"largest |z| {max(shares):.4g} of G/ε, over four sequences and {len(shares)} pairs of betas"
    return decide(max(shares) <= 1, text)
