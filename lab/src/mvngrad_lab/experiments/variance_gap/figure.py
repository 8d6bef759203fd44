"""Figures on thm:var_adabelief_mvngrad and prop:approx_mean: which order of momentum varies less."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import FuncFormatter

from mvngrad_lab.report.figures.style import (
    BOUND,
    LIGHT,
    Mark,
    draw_curve,
    draw_level,
    draw_vertical,
    label_columns,
    make_axes,
    number,
)
from mvngrad_lab.report.figures.svg import Figure, Table, make_panel

GAP = "Var(AdaBelief's update) − Var(MVN-Grad's)"
MEASURED = Mark("Monte Carlo, 99% interval", "mvngrad", marker="D", line=False)
EXACT = Mark("gap, by quadrature", "mvngrad", width=2.2)
DIRECTIONS = {"against m": "overestimates", "along m": "underestimates"}
SHARP = Mark("our sharper bound", "laprop", dash=(7, 2, 1.2, 2))


def draw(result: dict[str, Any]) -> list[Figure]:
    return [_draw_symmetric(result["symmetric"]), _draw_errors(result["tracking"]), _draw_pasts(result["stationary"])]


def _draw_interval(at: Any, x: float, estimate: dict[str, Any], unit: float = 1.0) -> None:
    value, low, high = (estimate[key] / unit for key in ("value", "low", "high"))
    at.vlines(x, low, high, color=LIGHT["mvngrad"], linewidth=1.8)
    at.plot([x], [value], **MEASURED.points)


def _draw_symmetric(noises: list[dict[str, Any]]) -> Figure:
    at = make_axes("", "gap by Monte Carlo / closed form")
    positive = [noise for noise in noises if noise["closed_form"] > 0]
    for x, noise in enumerate(positive):
        _draw_interval(at, x, noise["estimate"], noise["closed_form"])
    draw_level(at, 1.0, "the theorem")
    label_columns(at, [f"{noise['noise']} noise" for noise in positive], side=0.7)
    reach = 1.5 * max(abs(end - 1) for end in at.get_ylim())
    at.set_ylim(1 - reach, 1 + reach)
    rows = []
    for noise in noises:
        value, low, high = (number(noise["estimate"][key], 4) for key in ("value", "low", "high"))
        rows.append((noise["noise"], number(noise["closed_form"], 4), value, f"{low} to {high}"))
    return Figure(
        "The gap where m is the mean",
        f"From one fixed past, {noises[0]['estimate']['samples']:,} draws of the next gradient for each distribution "
        "of the noise, and the theorem's closed form. With random signs |g − m| is always the same, and so is s: both "
        "orders vary equally.",
        (make_panel(at, "Symmetric noise", "; ".join(f"{row[0]}: {row[2]} against {row[1]}" for row in rows)),),
        (MEASURED, BOUND.with_label("closed form")),
        Table(GAP, ("noise", "closed form", "Monte Carlo", "99% interval"), tuple(rows)),
    )


def _draw_errors(tracking: dict[str, Any]) -> Figure:
    at = make_axes("error of m as an estimate of the mean, in σ", GAP)
    draw_curve(at, EXACT, tracking["errors"], tracking["gaps"])
    draw_curve(at, SHARP, tracking["errors"], tracking["sharp"])
    at.axhline(0, color=LIGHT["muted"], linewidth=0.8)
    places = []
    for name, turn in tracking["turning"].items():
        place = "never" if turn is None else f"at {number(turn)}"
        places.append(f"{place} where m {DIRECTIONS[name]} the mean")
        if turn is not None:
            draw_vertical(at, turn, f"turns at {number(turn)}", y=0.99, side="right")
            for side, factor in (("before", 0.8), ("after", 1.25)):
                _draw_interval(at, factor * turn, tracking["around"][f"{name}, {side}"])
    lowest = min(value for value in tracking["bound"] if value is not None)
    low, high = number(min(tracking["gaps"])), number(max(tracking["gaps"]))
    turns = f"turns negative {', '.join(places)}"
    return Figure(
        "The gap where m misses the mean",
        f"The sign of the error matters: the gap {turns}. The proposition's bound is as low as {number(lowest)} with "
        "this ε, because it uses σ/ε²; our sharper version of the same proof uses a bound on s.",
        (make_panel(at, "Over the tracking error", f"The gap ranges from {low} to {high}. It {turns}."),),
        (EXACT, MEASURED, SHARP, BOUND.with_label("turning point")),
    )


def _draw_pasts(pasts: list[dict[str, Any]]) -> Figure:
    at = make_axes("size of the mean, μ/σ", "share of pasts with a negative gap", log="x")
    marks = (Mark("", "mvngrad", marker="D", width=2.2), Mark("", "laprop", (7, 2, 1.2, 2), "o"))
    legend = []
    for mark, beta2 in zip(marks, sorted({past["beta2"] for past in pasts}), strict=False):
        chosen = [past for past in pasts if past["beta2"] == beta2]
        draw_curve(at, mark, [past["mu"] for past in chosen], [past["negative"] for past in chosen])
        legend.append(mark.with_label(f"β₂ = {beta2:g}"))
    at.set_ylim(-0.02, 1)
    at.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    rows = []
    for past in pasts:
        mean, low, high = (number(past[key]) for key in ("mean", "low", "high"))
        rows.append((f"{past['beta2']:g}", f"{past['mu']:g}", mean, f"{low} to {high}", f"{past['negative']:.0%}"))
    text = "; ".join(f"β₂ {row[0]}, μ {row[1]}: {row[4]}" for row in rows) + "."
    return Figure(
        "The gap where m is an average of noisy gradients",
        "As in training: m averages independent gradients μ + ξ, and its error has either sign. The mean gap is "
        f"positive in {sum(past['low'] > 0 for past in pasts)} of {len(pasts)} settings with 99% confidence, but from "
        f"up to {max(past['negative'] for past in pasts):.0%} of the single pasts the gap is negative.",
        (make_panel(at, "How often the gap is negative", text),),
        tuple(legend),
        Table("Mean gap over pasts", ("β₂", "μ/σ", "mean gap", "99% interval", "negative"), tuple(rows)),
    )


FIGURES = {"variance-gap": draw}
