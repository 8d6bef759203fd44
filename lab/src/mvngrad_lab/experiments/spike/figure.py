"""thm:spike and cor:multi_spike: what is left of one spike, and of many."""

from __future__ import annotations

from typing import Any

import numpy as np

from mvngrad_lab.report.figures.style import (
    ADAM,
    BOUND,
    CLIPPED,
    LAPROP,
    MARKS,
    MVNGRAD,
    axes,
    curve,
    level,
    number,
    upright,
)
from mvngrad_lab.report.figures.svg import Figure, Panel, panel

UPDATE = "largest |update| over the horizon"
SIZE = "size of the spike, M"


def draw(result: dict[str, Any]) -> list[Figure]:
    panels = result["panels"]
    return [_peaks(panels), _carry_over(panels), _trains(result["trains"])]


def _setting(curves: dict[str, Any]) -> str:
    panel = curves["panel"]
    return f"β₁ = {panel['beta1']:g}, β₂ = {panel['beta2']:g}, u = {panel['u']:g}"


def _peaks(panels: dict[str, Any]) -> Figure:
    drawn = []
    for name, curves in panels.items():
        at = axes(SIZE, UPDATE, log="xy")
        for cell, mark in reversed(MARKS.items()):  # solid under broken: cells that agree are both seen
            curve(at, mark, curves["sizes"], curves["peaks"][cell])
        curve(at, CLIPPED, curves["sizes"], curves["clipped"])
        plateau, early = curves["plateau"], curves["resonance"] > 1e3
        at.set_ylim(top=plateau * 30)
        level(at, plateau, f"|u|/ε = {number(plateau)}", x=0.01 if early else 0.99)
        upright(at, curves["resonance"], f"M = 1/(1−β₁) = {number(curves['resonance'])}", y=0.72, side="right")
        drawn.append(
            panel(
                at,
                f"{name.capitalize()}: {_setting(curves)}",
                "Logarithmic axes. At M = 10⁸ the largest update is "
                + ", ".join(f"{number(curves['peaks'][cell][-1])} for {cell}" for cell in MARKS)
                + f" and {number(curves['clipped'][-1])} for MVN-Grad with z_clip. At the resonance it is "
                + ", ".join(f"{number(value)} for {cell}" for cell, value in curves["at_resonance"].items())
                + ".",
            )
        )
    clip = next(iter(panels.values()))["z_clip"]
    return Figure(
        "One spike of size M on a constant gradient u",
        "The bound of LaProp, AdaBelief and MVN-Grad is free of M, as the theorem says; that of the last two is |u|/ε, "
        "and where the gradient is constant for long enough they reach it, because s forgets. Where M = 1/(1−β₁) the "
        f"spike leaves m equal to u, and s empties at once. A bound of {clip:g} on the normalized gradient (z_clip, "
        "ours) holds through both. Adam has no bound here: it grows with M.",
        tuple(drawn),
        (*MARKS.values(), CLIPPED.named(f"MVN-Grad, z_clip = {clip:g}"), BOUND.named("bound, resonance")),
    )


def _carry_over(panels: dict[str, Any]) -> Figure:
    drawn: list[Panel] = []
    for name, curves in panels.items():
        at = axes(SIZE, "Adam's |update| at t*", log="xy")
        for mark, key in ((ADAM, "adam_at_forgetting"), (BOUND, "carry_over")):
            curve(at, mark, curves["sizes"], curves[key])
        ratio = np.array(curves["adam_at_forgetting"]) / np.array(curves["carry_over"])
        growth = f"grows as M^{curves['adam_growth']:.2f}, expected M^{curves['adam_growth_expected']:.2f}"
        words = f"The update at t* is at least {number(float(ratio.min()))} times the bound; the peak {growth}."
        drawn.append(panel(at, f"{name.capitalize()}: {growth.replace('grows', 'peak grows')}", words))
    return Figure(
        "Adam when it has forgotten the spike",
        "t* is the first step at which v has forgotten the spike. What m still remembers of it then moves Adam by at "
        "least (1−β₁) β₁^t* M |u| / D.",
        tuple(drawn),
        (ADAM, BOUND.named("lower bound of the proof")),
    )


def _trains(trains: dict[str, Any]) -> Figure:
    x = trains["sizes"]
    many = axes("typical size of a spike, M", "largest |z|, normalized gradient", log="x")
    curve(many, LAPROP, x, trains["laprop"])
    curve(many, MVNGRAD, x, trains["mvngrad"])
    many.set_ylim(0, 1.25 * trains["mvngrad_bound"])
    level(many, trains["mvngrad_bound"], f"2/(β₁√(1−β₂)) = {number(trains['mvngrad_bound'])}, MVN-Grad")
    level(many, trains["laprop_bound"], f"1/√(1−β₂) = {number(trains['laprop_bound'])}, LaProp", above=False)
    shift = axes("size of the jump, M", "largest |z|, normalized gradient", log="xy")
    curve(shift, MVNGRAD, x, trains["shifted"])
    curve(shift, BOUND, x, trains["shifted_expected"])
    curve(shift, CLIPPED, x, trains["shifted_clipped"])
    return Figure(
        "Many spikes, and a gradient that jumps and stays",
        f"Random spikes: {number(min(trains['spikes']))} to {number(max(trains['spikes']))} of either sign in a run; "
        "MVN-Grad is followed at the spikes, LaProp at every step. A jump that stays: where the gradient goes to M u "
        "and stays there, m follows, the corollary's condition fails, and z tends to M |u|/ε; with z_clip it does not.",
        (
            panel(
                many,
                "Random spikes",
                f"LaProp at most {number(max(trains['laprop']))}, bound {number(trains['laprop_bound'])}; MVN-Grad at "
                f"most {number(max(trains['mvngrad']))}, bound {number(trains['mvngrad_bound'])}.",
            ),
            panel(
                shift,
                "A jump that stays",
                f"MVN-Grad rises in proportion to M, to {number(trains['shifted'][-1])}; with z_clip it stays at "
                f"{number(max(trains['shifted_clipped']))}.",
            ),
        ),
        (LAPROP, MVNGRAD, CLIPPED.named(f"MVN-Grad, z_clip = {trains['z_clip']:g}"), BOUND.named("bound, or M |u|/ε")),
    )


FIGURES = {"spike": draw}
