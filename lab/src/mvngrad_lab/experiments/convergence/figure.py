"""Figures on thm:mvngrad_convergence: the rate in T, and the floor at a fixed beta2."""

from __future__ import annotations

from typing import Any

import numpy as np

from mvngrad_lab.report.figures.style import BOUND, LIGHT, MVNGRAD, Mark, draw_curve, draw_level, make_axes, number
from mvngrad_lab.report.figures.svg import Figure, make_panel

PROOF = Mark("proof's last display", "ink", (6, 2), width=1.1)
NOISES = {
    "symmetric": Mark("symmetric noise", "adam", (5, 2.4), "s"),
    "skewed": Mark("skewed noise", "mvngrad", (), "D", 2.2),
    "rare": Mark("rare spikes", "laprop", (7, 2, 1.2, 2), "o"),
}


def draw(result: dict[str, Any]) -> list[Figure]:
    return [_draw_rate(result["rate"]), _draw_floors(result["floors"])]


def _draw_rate(rate: dict[str, Any]) -> Figure:
    at = make_axes("number of steps T", "average |∇F|² over T steps", log="xy")
    T, measured, half, bound = (np.array(rate[key]) for key in ("T", "measured", "half_width", "bound"))
    draw_curve(at, MVNGRAD, T, measured)
    at.vlines(T, measured - half, measured + half, color=LIGHT["mvngrad"], linewidth=1.8)
    at.plot(T, rate["display"], **PROOF.stroke)
    at.plot(T, bound, **BOUND.stroke)
    draw_level(at, rate["trivial"], "no run can exceed this", x=0.99)
    text = (
        f"From {number(measured[0])} at T = {T[0]} to {number(measured[-1])} at T = {T[-1]}; the bound goes from "
        f"{number(bound[0])} to {number(bound[-1])}."
    )
    return Figure(
        "The rate, with β₂ = 1 − 1/T and η ~ 1/√T",
        f"Measured: T^{rate['exponent']:.3f}; the theorem's rate is T^−0.5. The bound, with the proof's own constants, "
        f"is at least {number((bound / measured).min())} times the measured value; it is informative only below the "
        "level that no run can exceed.",
        (make_panel(at, "Average squared gradient", text),),
        (MVNGRAD.with_label("MVN-Grad, 99% interval"), BOUND.with_label("eq:general_rate"), PROOF),
    )


def _draw_floors(floors: dict[str, Any]) -> Figure:
    left = make_axes("1 − β₂", "squared gradient that remains", log="xy")
    right = make_axes("1 − β₂", "largest |Cov(ξ, w)|", log="xy")
    marks = {name: NOISES.get(name, BOUND.with_label(name)) for name in floors}
    slopes, shares = [], []
    for name, mark in marks.items():
        floor = floors[name]
        faint = {**mark.stroke, "linewidth": 0.9, "alpha": 0.7}
        if floor["exponent"] is not None:  # otherwise there is no floor, only Monte Carlo error
            draw_curve(left, mark, floor["rest"], floor["floor"])
            left.plot(floor["rest"], floor["bound"], **faint)
            slopes.append(f"as (1−β₂)^{floor['exponent']:.2f} with {mark.label}")
        draw_curve(right, mark, floor["rest"], floor["covariance"])
        right.plot(floor["rest"], floor["covariance_bound"], **faint)
        share = (np.array(floor["covariance"]) / floor["covariance_bound"]).max()
        shares.append(f"at most {share:.0%} of its bound with {mark.label}")
    return Figure(
        "The floor at a fixed β₂",
        "Noise and normalizer are correlated, so the method comes to rest where the gradient is not zero. Thick with "
        f"markers: measured. Thin: the proof's bounds. The floor falls {', '.join(slopes)}; the bound's exponent is 1. "
        "With symmetric noise there is no floor: the two signs of every past cancel.",
        (
            make_panel(left, "What remains as η → 0", f"The measured floor falls {', '.join(slopes)}."),
            make_panel(right, "The covariance that causes it", f"The covariance is {', '.join(shares)}."),
        ),
        tuple(marks.values()),
    )


FIGURES = {"convergence": draw}
