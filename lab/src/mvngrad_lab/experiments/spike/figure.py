"""Figures on thm:spike and cor:multi_spike: the largest update after one spike, and after many."""

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
    draw_curve,
    draw_level,
    draw_vertical,
    make_axes,
    number,
)
from mvngrad_lab.report.figures.svg import Figure, make_panel

SIZE = "size of the spike, M"


def draw(result: dict[str, Any]) -> list[Figure]:
    panels = result["panels"]
    return [_draw_peaks(panels), _draw_carry_over(panels), _draw_trains(result["trains"])]


def _draw_peaks(panels: dict[str, Any]) -> Figure:
    drawn = []
    for name, curves in panels.items():
        at = make_axes(SIZE, "largest |update| over the horizon", log="xy")
        for cell, mark in MARKS.items():
            draw_curve(at, mark, curves["sizes"], curves["peaks"][cell])
        draw_curve(at, CLIPPED, curves["sizes"], curves["clipped"])
        plateau, resonance, settings = curves["plateau"], curves["resonance"], curves["panel"]
        at.set_ylim(top=plateau * 30)
        draw_level(at, plateau, f"|u|/ε = {number(plateau)}", x=0.01 if resonance > 1e3 else 0.99)
        draw_vertical(at, resonance, f"M = 1/(1−β₁) = {number(resonance)}", y=0.72, side="right")
        title = f"{name.capitalize()}: β₁ = {settings['beta1']:g}, β₂ = {settings['beta2']:g}, u = {settings['u']:g}"
        last = ", ".join(f"{number(curves['peaks'][cell][-1])} for {cell}" for cell in MARKS)
        at_resonance = ", ".join(f"{number(value)} for {cell}" for cell, value in curves["at_resonance"].items())
        text = (
            f"Logarithmic axes. At M = 10⁸ the largest update is {last} and {number(curves['clipped'][-1])} for "
            f"MVN-Grad with z_clip. At the resonance it is {at_resonance}."
        )
        drawn.append(make_panel(at, title, text))
    clip = next(iter(panels.values()))["z_clip"]
    return Figure(
        "One spike of size M on a constant gradient u",
        "The bounds of LaProp, AdaBelief and MVN-Grad do not depend on M, as the theorem says. For the last two the "
        "bound is |u|/ε, and they reach it if the gradient is constant for long enough, because s forgets. At "
        f"M = 1/(1−β₁) the spike makes m equal to u, and s decays from the next step on. A bound of {clip:g} on the "
        "normalized gradient (z_clip, ours) holds in both cases. Adam has no bound here: it grows with M.",
        tuple(drawn),
        (*MARKS.values(), CLIPPED.with_label(f"MVN-Grad, z_clip = {clip:g}"), BOUND.with_label("bound, resonance")),
    )


def _draw_carry_over(panels: dict[str, Any]) -> Figure:
    drawn = []
    for name, curves in panels.items():
        at = make_axes(SIZE, "Adam's |update| at t*", log="xy")
        draw_curve(at, ADAM, curves["sizes"], curves["adam_at_forgetting"])
        draw_curve(at, BOUND, curves["sizes"], curves["carry_over"])
        ratio = float((np.array(curves["adam_at_forgetting"]) / curves["carry_over"]).min())
        growth = f"grows as M^{curves['adam_growth']:.2f}, expected M^{curves['adam_growth_expected']:.2f}"
        text = f"The update at t* is at least {number(ratio)} times the bound; the peak {growth}."
        drawn.append(make_panel(at, f"{name.capitalize()}: peak {growth}", text))
    return Figure(
        "Adam when it has forgotten the spike",
        "t* is the first step at which v has forgotten the spike. m still remembers it, and moves Adam by at least "
        "(1−β₁) β₁^t* M |u| / D.",
        tuple(drawn),
        (ADAM, BOUND.with_label("lower bound of the proof")),
    )


def _draw_trains(trains: dict[str, Any]) -> Figure:
    sizes, laprop_bound, bound = trains["sizes"], trains["laprop_bound"], trains["mvngrad_bound"]
    many = make_axes("typical size of a spike, M", "largest |z|, normalized gradient", log="x")
    draw_curve(many, LAPROP, sizes, trains["laprop"])
    draw_curve(many, MVNGRAD, sizes, trains["mvngrad"])
    many.set_ylim(0, 1.25 * bound)
    draw_level(many, bound, f"2/(β₁√(1−β₂)) = {number(bound)}, MVN-Grad")
    draw_level(many, laprop_bound, f"1/√(1−β₂) = {number(laprop_bound)}, LaProp", above=False)
    text = (
        f"LaProp at most {number(max(trains['laprop']))}, bound {number(laprop_bound)}; MVN-Grad at most "
        f"{number(max(trains['mvngrad']))}, bound {number(bound)}."
    )
    jump = make_axes("size of the jump, M", "largest |z|, normalized gradient", log="xy")
    draw_curve(jump, MVNGRAD, sizes, trains["shifted"])
    draw_curve(jump, BOUND, sizes, trains["shifted_expected"])
    draw_curve(jump, CLIPPED, sizes, trains["shifted_clipped"])
    jump_text = (
        f"MVN-Grad rises in proportion to M, to {number(trains['shifted'][-1])}; with z_clip it stays at "
        f"{number(max(trains['shifted_clipped']))}."
    )
    return Figure(
        "Many spikes, and a gradient that jumps and stays",
        f"Random spikes: {number(min(trains['spikes']))} to {number(max(trains['spikes']))} of either sign in a run; "
        "MVN-Grad is measured at the spikes, LaProp at every step. A jump that stays: if the gradient jumps to M u and "
        "stays there, m follows, the corollary's condition fails, and z tends to M |u|/ε; with z_clip it does not.",
        (make_panel(many, "Random spikes", text), make_panel(jump, "A jump that stays", jump_text)),
        (
            LAPROP,
            MVNGRAD,
            CLIPPED.with_label(f"MVN-Grad, z_clip = {trains['z_clip']:g}"),
            BOUND.with_label("bound, or M |u|/ε"),
        ),
    )


FIGURES = {"spike": draw}
