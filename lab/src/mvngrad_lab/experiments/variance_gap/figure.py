"""thm:var_adabelief_mvngrad and prop:approx_mean: which order of momentum varies less."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import FixedLocator, FuncFormatter

from mvngrad_lab.report.figures.style import BOUND, LIGHT, Mark, axes, curve, level, number, upright
from mvngrad_lab.report.figures.svg import Figure, Table, panel

GAP = "Var(AdaBelief's update) − Var(MVN-Grad's)"
MEASURED = Mark("Monte Carlo, 99% interval", "mvngrad", marker="D", line=False)
EXACT = Mark("gap, by quadrature", "mvngrad", width=2.2)
SHARP = Mark("our sharper bound", "laprop", dash=(7, 2, 1.2, 2))


def draw(result: dict[str, Any]) -> list[Figure]:
    return [_symmetric(result["symmetric"]), _tracking(result["tracking"]), _stationary(result["stationary"])]


def _interval(at: Any, x: float, estimate: dict[str, Any]) -> None:
    at.vlines(x, estimate["low"], estimate["high"], color=LIGHT["mvngrad"], linewidth=1.8)
    at.plot([x], [estimate["value"]], **MEASURED.points)


def _symmetric(noises: list[dict[str, Any]]) -> Figure:
    at = axes("", "gap by Monte Carlo / closed form")
    spread = [noise for noise in noises if noise["closed_form"] > 0]
    for place, noise in enumerate(spread):
        _interval(at, place, {key: noise["estimate"][key] / noise["closed_form"] for key in ("value", "low", "high")})
    level(at, 1.0, "the theorem")
    at.xaxis.set_major_locator(FixedLocator(range(len(spread))))
    at.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{spread[round(place)]['noise']} noise"))
    at.set_xlim(-0.7, len(spread) - 0.3)
    reach = 1.5 * max(abs(end - 1) for end in at.get_ylim())
    at.set_ylim(1 - reach, 1 + reach)
    rows = tuple(
        (
            noise["noise"],
            number(noise["closed_form"], 4),
            number(noise["estimate"]["value"], 4),
            f"{number(noise['estimate']['low'], 4)} to {number(noise['estimate']['high'], 4)}",
        )
        for noise in noises
    )
    samples = noises[0]["estimate"]["samples"]
    return Figure(
        "The gap where m is the mean",
        f"From one frozen past, {samples:,} draws of the next gradient for each distribution of the noise, against the "
        "theorem's closed form. With random signs |g − m| is always the same, and so is s: both orders vary alike.",
        (panel(at, "Symmetric noise", "; ".join(f"{row[0]}: {row[2]} against {row[1]}" for row in rows)),),
        (MEASURED, BOUND.named("closed form")),
        Table(GAP, ("noise", "closed form", "Monte Carlo", "99% interval"), rows),
    )


def _tracking(tracking: dict[str, Any]) -> Figure:
    at = axes("error of m as a guess of the mean, in σ", GAP)
    curve(at, EXACT, tracking["errors"], tracking["gaps"])
    curve(at, SHARP, tracking["errors"], tracking["sharp"])
    at.axhline(0, color=LIGHT["muted"], linewidth=0.8)
    turns = {name: turn for name, turn in tracking["turning"].items() if turn is not None}
    for name, turn in turns.items():
        upright(at, turn, f"turns at {number(turn)}", y=0.99, side="right")
        for side, factor in (("before", 0.8), ("after", 1.25)):
            _interval(at, factor * turn, tracking["around"][f"{name}, {side}"])
    lowest = min(value for value in tracking["bound"] if value is not None)
    where = {name: "never" if turn is None else f"at {number(turn)}" for name, turn in tracking["turning"].items()}
    words = ", ".join(f"{place} {name}" for name, place in where.items())
    return Figure(
        "The gap where m misses the mean",
        f"The error has a sign, and the gap turns negative {words}. The proposition's bound is as low as "
        f"{number(lowest)} with this ε, because it puts σ/ε² where our sharper reading of the "
        "same proof keeps what s itself bounds.",
        (
            panel(
                at,
                "Over the tracking error",
                f"The gap runs from {number(min(tracking['gaps']))} to {number(max(tracking['gaps']))}. It turns "
                f"negative {words}.",
            ),
        ),
        (EXACT, MEASURED, SHARP, BOUND.named("turning point")),
    )


def _stationary(pasts: list[dict[str, Any]]) -> Figure:
    at = axes("size of the mean, μ/σ", "share of pasts with a negative gap", log="x")
    marks = (Mark("", "mvngrad", marker="D", width=2.2), Mark("", "laprop", (7, 2, 1.2, 2), "o"))
    drawn = []
    for mark, beta2 in zip(marks, sorted({past["beta2"] for past in pasts}), strict=False):
        chosen = [past for past in pasts if past["beta2"] == beta2]
        x, y = [past["mu"] for past in chosen], [past["negative"] for past in chosen]
        curve(at, mark, x, y)
        drawn.append(mark.named(f"β₂ = {beta2:g}"))
    at.set_ylim(-0.02, 1)
    at.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    rows = tuple(
        (
            f"{past['beta2']:g}",
            f"{past['mu']:g}",
            number(past["mean"]),
            f"{number(past['low'])} to {number(past['high'])}",
            f"{past['negative']:.0%}",
        )
        for past in pasts
    )
    return Figure(
        "The gap where m is an average of noisy gradients",
        "As in training: m follows independent gradients μ + ξ and misses μ to either side alike. The mean gap is "
        f"positive in {sum(past['low'] > 0 for past in pasts)} of {len(pasts)} settings with 99% confidence, but from "
        f"up to {max(past['negative'] for past in pasts):.0%} of the single pasts the gap is negative.",
        (
            panel(
                at, "How often the order hurts", "; ".join(f"β₂ {row[0]}, μ {row[1]}: {row[4]}" for row in rows) + "."
            ),
        ),
        tuple(drawn),
        Table("Mean gap over pasts", ("β₂", "μ/σ", "mean gap", "99% interval", "negative"), rows),
    )


FIGURES = {"variance-gap": draw}
