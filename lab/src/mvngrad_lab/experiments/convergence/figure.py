"""thm:mvngrad_convergence: the rate in T, and the floor that a fixed beta2 leaves."""

from __future__ import annotations

from typing import Any

import numpy as np

from mvngrad_lab.report.figures.style import BOUND, LIGHT, MVNGRAD, Mark, axes, curve, level, number
from mvngrad_lab.report.figures.svg import Figure, panel

PROOF = Mark("proof's last display", "ink", (6, 2), width=1.1)
NOISES = {
    "symmetric": Mark("symmetric noise", "adam", (5, 2.4), "s"),
    "skewed": Mark("skewed noise", "mvngrad", (), "D", 2.2),
    "rare": Mark("rare spikes", "laprop", (7, 2, 1.2, 2), "o"),
}


def draw(result: dict[str, Any]) -> list[Figure]:
    return [_rate(result["rate"]), _floors(result["floors"])]


def _rate(rate: dict[str, Any]) -> Figure:
    at = axes("number of steps T", "average |∇F|² over T steps", log="xy")
    T, measured, half = (np.array(rate[key]) for key in ("T", "measured", "half_width"))
    curve(at, MVNGRAD, T, measured)
    at.vlines(T, measured - half, measured + half, color=LIGHT["mvngrad"], linewidth=1.8)
    at.plot(T, rate["display"], **PROOF.stroke)
    at.plot(T, rate["bound"], **BOUND.stroke)
    level(at, rate["trivial"], "no run can exceed this", x=0.99)
    ratio = float((np.array(rate["bound"]) / measured).min())
    return Figure(
        "The rate, with β₂ = 1 − 1/T and η ~ 1/√T",
        f"Measured: T^{rate['exponent']:.3f}; the theorem's rate is T^−0.5. The bound, with the proof's own constants, "
        f"is at least {number(ratio)} times what is measured; it says something from where it falls below the level "
        "that no run can exceed.",
        (
            panel(
                at,
                "Average squared gradient",
                f"From {number(float(measured[0]))} at T = {T[0]} to {number(float(measured[-1]))} at T = {T[-1]}; the "
                f"bound goes from {number(rate['bound'][0])} to {number(rate['bound'][-1])}.",
            ),
        ),
        (MVNGRAD.named("MVN-Grad, 99% interval"), BOUND.named("eq:general_rate"), PROOF),
    )


def _floors(floors: dict[str, Any]) -> Figure:
    left = axes("1 − β₂", "squared gradient that is left", log="xy")
    right = axes("1 − β₂", "largest |Cov(ξ, w)|", log="xy")
    drawn = {name: NOISES.get(name, BOUND.named(name)) for name in floors}
    slopes, shares = [], []
    for name, mark in drawn.items():
        floor = floors[name]
        faint = {**mark.stroke, "linewidth": 0.9, "alpha": 0.7}
        if floor["exponent"] is not None:  # otherwise there is none, and what is seen is Monte Carlo error
            curve(left, mark, floor["rest"], floor["floor"])
            left.plot(floor["rest"], floor["bound"], **faint)
            slopes.append(f"as (1−β₂)^{floor['exponent']:.2f} with {mark.label}")
        share = float((np.array(floor["covariance"]) / np.array(floor["covariance_bound"])).max())
        shares.append(f"at most {share:.0%} of its bound with {mark.label}")
        curve(right, mark, floor["rest"], floor["covariance"])
        right.plot(floor["rest"], floor["covariance_bound"], **faint)
    return Figure(
        "The floor at a fixed β₂",
        "Noise and normalizer are correlated, so that the method rests where the gradient is not zero. Thick with "
        f"markers: measured. Thin: the proof's bounds. The floor goes {', '.join(slopes)}; the bound's exponent is 1. "
        "With symmetric noise there is no floor: the two signs of every past cancel.",
        (
            panel(left, "What is left as η → 0", f"The measured floor goes {', '.join(slopes)}."),
            panel(right, "The covariance behind it", f"The covariance is {', '.join(shares)}."),
        ),
        tuple(drawn.values()),
    )


FIGURES = {"convergence": draw}
