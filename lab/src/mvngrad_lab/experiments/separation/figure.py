"""Figures on thm:separation_MVN-Grad_LaProp_smallvar: steps against the dimension, and the lemmas of the proof."""

from __future__ import annotations

from typing import Any

import numpy as np

from mvngrad_lab.report.figures.style import (
    BOUND,
    LAPROP,
    MVNGRAD,
    NARROW,
    Mark,
    draw_curve,
    draw_level,
    draw_vertical,
    make_axes,
    number,
)
from mvngrad_lab.report.figures.svg import Figure, Table, make_panel

READINGS = {
    "LaProp, signs": LAPROP,
    "LaProp, beta2 = 0.99": Mark("", "laprop", (1.2, 2.2), "s", 1.4),
    "LaProp, signs, tuned constant rate": Mark("", "laprop", (4, 2), "^", 1.4),
    "MVN-Grad, s fixed": MVNGRAD,
    "MVN-Grad, beta2 = 0.99": Mark("", "mvngrad", (1.2, 2.2), "s", 1.4),
    "MVN-Grad, the theorem's count": Mark("", "mvngrad", (4, 2), "^", 1.4),
}
"""Each reading of the theorem in the colour of its optimizer; the theorem's limits have the optimizer's own mark."""

STARTS = {
    "proofs_start": "From the proof's start",
    "one_start": "From one start for all",
    "fixed_gap": "From starts of one F(x₀)",
}


def draw(result: dict[str, Any]) -> list[Figure]:
    return [_draw_steps(result), _draw_lemmas(result["stable"], result["resting"])]


def _growth(counted: dict[str, Any], name: str) -> str:
    return f"d^{counted['exponents'][name]:.2f}" if name in counted["exponents"] else ""


def _draw_steps(result: dict[str, Any]) -> Figure:
    panels, marks = [], dict[str, Mark]()
    for key, title in STARTS.items():
        counted = result[key]
        at = make_axes("dimension d", "steps", log="xy", size=NARROW)
        for name, steps in counted["steps"].items():
            marks[name] = READINGS.get(name, BOUND).with_label(name.replace("beta2", "β₂"))
            draw_curve(at, marks[name], counted["dimensions"], [count or np.nan for count in steps])
        growth = ", ".join(f"{_growth(counted, name)} for {marks[name].label}" for name in counted["exponents"])
        panels.append(make_panel(at, f"{title}, |∇F| ≤ {counted['target']:g}", f"Steps grow as {growth}."))
    laprop, mvngrad = (_growth(result["proofs_start"], name) for name in ("LaProp, signs", "MVN-Grad, s fixed"))
    return Figure(
        "Steps until the gradient is small, against the dimension",
        f"From the start that the proof builds, LaProp on signs takes {laprop} steps, MVN-Grad with s fixed {mvngrad}. "
        "Other readings of the theorem: its own count for MVN-Grad, LaProp with a longer memory, LaProp with a rate "
        "chosen for d, MVN-Grad with an s that changes.",
        tuple(panels),
        tuple(marks[name] for name in READINGS if name in marks),
        Table(
            "Growth of the steps with d, over the upper half of the dimensions",
            ("", *STARTS.values()),
            tuple((mark.label, *(_growth(result[key], name) for key in STARTS)) for name, mark in marks.items()),
        ),
    )


def _draw_lemmas(lemmas: dict[str, Any], rest: dict[str, Any]) -> Figure:
    bound, ratios, observed = lemmas["bound"], rest["ratios"], rest["observed"]
    sums = make_axes("step t", "sum of |∇F|² so far")
    draw_curve(sums, MVNGRAD, range(1, len(lemmas["sums"]) + 1), lemmas["sums"])
    sums.set_ylim(0, 1.2 * bound)
    draw_level(sums, bound, f"2 (F(x₀)−F*) / (α (1−δ²)) = {number(bound)}")
    noise = make_axes("|∇F| / σ, on the way down", "s, over its value from noise alone", log="xy")
    draw_curve(noise, MVNGRAD, ratios, observed)
    noise.invert_xaxis()
    draw_level(noise, 1.0, "s from noise alone", x=0.9)
    draw_vertical(noise, rest["limit"], f"K = {number(rest['limit'])}", y=0.5)
    sums_text = f"The sum ends at {number(lemmas['sums'][-1])}, under its bound of {number(bound)}."
    noise_text = (
        f"s is up to {number(max(observed))} times its value from noise alone, and {number(observed[-1])} times where "
        f"the gradient is {number(ratios[-1])} σ."
    )
    return Figure(
        "The two lemmas, step by step",
        f"Heavy Ball (`lem:mvn_to_hb_stoch`) holds along the run to {number(lemmas['heavy_ball_error'])} of |x₀|, and "
        "the potential decreases at every step by at least what `eq:one_step_descent` requires (least slack "
        f"{number(min(lemmas['slack']))} of Φ₀). But if s changes, m lags behind a gradient that shrinks, and s counts "
        f"the lag as noise: where the gradient is down to {number(ratios[-1])} σ, s is still {number(observed[-1])} "
        "times its value from noise alone.",
        (make_panel(sums, "Potential descent", sums_text), make_panel(noise, "Does s come to rest at σ²?", noise_text)),
        (MVNGRAD, BOUND),
    )


FIGURES = {"separation": draw}
