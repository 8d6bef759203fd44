"""thm:separation_MVN-Grad_LaProp_smallvar: steps against the dimension, and the lemmas on the way."""

from __future__ import annotations

from typing import Any

import numpy as np

from mvngrad_lab.report.figures.style import BOUND, LAPROP, MVNGRAD, NARROW, Mark, axes, curve, level, number, upright
from mvngrad_lab.report.figures.svg import Figure, Table, panel

READINGS = {
    "LaProp, signs": LAPROP,
    "LaProp, beta2 = 0.99": Mark("", "laprop", (1.2, 2.2), "s", 1.4),
    "LaProp, signs, tuned constant rate": Mark("", "laprop", (4, 2), "^", 1.4),
    "MVN-Grad, s fixed": MVNGRAD,
    "MVN-Grad, beta2 = 0.99": Mark("", "mvngrad", (1.2, 2.2), "s", 1.4),
    "MVN-Grad, the theorem's count": Mark("", "mvngrad", (4, 2), "^", 1.4),
}
"""How each reading of the theorem is drawn: a cell's colour, and its own mark where the theorem takes its limit."""

STARTS = {
    "proofs_start": "From the proof's start",
    "one_start": "From one start for all",
    "fixed_gap": "From starts of one F(x₀)",
}


def draw(result: dict[str, Any]) -> list[Figure]:
    return [_steps(result), _lemmas(result)]


def _spelled(name: str) -> str:
    return name.replace("beta2", "β₂")


def _steps(result: dict[str, Any]) -> Figure:
    panels, seen = [], dict[str, Mark]()
    for key, title in STARTS.items():
        counted = result[key]
        at = axes("dimension d", "steps", log="xy", size=NARROW)
        for name, steps in counted["steps"].items():
            seen[name] = READINGS.get(name, BOUND).named(_spelled(name))
            curve(at, seen[name], counted["dimensions"], [count or np.nan for count in steps])
        slopes = [f"{_growth(counted, name)} for {_spelled(name)}" for name in counted["exponents"]]
        words = "Steps grow as " + ", ".join(slopes) + "."
        panels.append(panel(at, f"{title}, |∇F| ≤ {counted['target']:g}", words))
    laprop, mvngrad = (_growth(result["proofs_start"], name) for name in ("LaProp, signs", "MVN-Grad, s fixed"))
    return Figure(
        "Steps until the gradient is small, against the dimension",
        f"From the start that the proof builds, LaProp on signs takes {laprop} steps, MVN-Grad with s fixed {mvngrad}. "
        "Other readings of the theorem are drawn as well: what it counts for MVN-Grad, LaProp with a memory in v, "
        "LaProp at a rate chosen for d, MVN-Grad with s left to itself.",
        tuple(panels),
        tuple(seen[name] for name in READINGS if name in seen),
        Table(
            "Growth of the steps with d, over the upper half of the dimensions",
            ("", *STARTS.values()),
            tuple((mark.label, *(_growth(result[key], name) for key in STARTS)) for name, mark in seen.items()),
        ),
    )


def _growth(counted: dict[str, Any], name: str) -> str:
    return f"d^{counted['exponents'][name]:.2f}" if name in counted["exponents"] else ""


def _lemmas(result: dict[str, Any]) -> Figure:
    stable, rest = result["stable"], result["resting"]
    sums = axes("step t", "sum of |∇F|² so far")
    curve(sums, MVNGRAD, range(1, len(stable["sums"]) + 1), stable["sums"])
    sums.set_ylim(0, 1.2 * stable["bound"])
    level(sums, stable["bound"], f"2 (F(x₀)−F*) / (α (1−δ²)) = {number(stable['bound'])}")
    noise = axes("|∇F| / σ, on the way down", "s, over what the noise alone makes of it", log="xy")
    ratios, observed = np.array(rest["ratios"]), np.array(rest["observed"])
    curve(noise, MVNGRAD, ratios, observed)
    noise.invert_xaxis()
    level(noise, 1.0, "s is what the noise makes of it", x=0.9)
    upright(noise, rest["limit"], f"K = {number(rest['limit'])}", y=0.5)
    return Figure(
        "The two lemmas, step by step",
        f"Heavy Ball (`lem:mvn_to_hb_stoch`) holds along the run to {number(stable['heavy_ball_error'])} of |x₀|, and "
        f"the potential falls by at least what `eq:one_step_descent` asks at every step (least slack "
        f"{number(min(stable['slack']))} of Φ₀). But with s left to itself, m lags behind a gradient that shrinks, "
        f"and s takes the lag for noise: where the gradient has come down to {number(float(ratios[-1]))} σ, s is still "
        f"{number(float(observed[-1]))} times what the noise makes of it.",
        (
            panel(
                sums,
                "Potential descent",
                f"The sum ends at {number(stable['sums'][-1])}, under its bound of {number(stable['bound'])}.",
            ),
            panel(
                noise,
                "Does s come to rest at σ²?",
                f"s is up to {number(float(observed.max()))} times the noise's, and {number(float(observed[-1]))} "
                f"times where the gradient is {number(float(ratios[-1]))} σ.",
            ),
        ),
        (MVNGRAD, BOUND),
    )


FIGURES = {"separation": draw}
