"""What an optimizer keeps for each byte of the model."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import FixedLocator, FuncFormatter

from mvngrad_lab.report.figures.style import LIGHT, MVNGRAD, axes, cell, number
from mvngrad_lab.report.figures.svg import Figure, panel


def draw(result: dict[str, Any]) -> list[Figure]:
    ours = {f"MVN-GradW, {name}": times for name, times in result["smaller"].items()}
    kept = {**result["state"], **ours}
    at = axes("bytes of state / bytes of float32 parameters", "", left=1.5)
    for place, (name, times) in enumerate(kept.items()):
        mark = MVNGRAD if name in ours else cell(name)
        at.barh(place, times, height=0.62, color=LIGHT[mark.color], alpha=0.55 if name in ours else 1.0)
        at.annotate(number(times), (times, place), xytext=(4, 0), textcoords="offset points", va="center")
    at.yaxis.set_major_locator(FixedLocator(range(len(kept))))
    at.yaxis.set_major_formatter(FuncFormatter(lambda place, _: list(kept)[round(place)]))
    at.grid(visible=False)
    at.set_xlim(0, 1.12 * max(kept.values()))
    at.invert_yaxis()
    words = ", ".join(f"{name} {number(times)}" for name, times in kept.items())
    return [
        Figure(
            "State of an optimizer",
            "Measured after one step. MVN-Grad keeps a third tensor; pale: ours, ways to keep less.",
            (panel(at, "Times the model, in float32", words),),
        )
    ]


FIGURES = {"memory": draw}
