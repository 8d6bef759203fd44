"""Boxes over many runs, every run visible, and lines of medians; what has no finite value is a cross at the edge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter

from mvngrad_lab.report.figures.style import LIGHT, NARROW, SIZE, Mark, axes

GOLDEN = 0.6180339887498949
"""Its multiples lie evenly on a circle, however many: marks of one box are spread by them, and not at random."""
WIDE = 20
"""Positive values that span more than this factor are drawn on a logarithmic axis."""


def boxes(
    y: str,
    values: Mapping[Mark, Sequence[float]],
    quartiles: Mapping[str, Sequence[float]],
    higher: bool,
    lost: Mapping[str, str],
) -> Axes:
    """One box for each optimizer, its runs beside each other on it; `lost` says in words what lies at the edge."""
    at = _axes("", y, [v for of in values.values() for v in of], higher, [mark.label for mark in values])
    for place, (mark, of) in enumerate(values.items()):
        low, median, high = (_inside(at, value) for value in quartiles[mark.label])
        known = sorted(value for value in of if math.isfinite(value))
        # Without a finite box there is no length to measure whiskers with: they reach to where the runs do.
        reach = 1.5 * (high - low) if all(map(math.isfinite, quartiles[mark.label])) else math.inf
        near = [value for value in known if low - reach <= value <= high + reach]
        color = LIGHT[mark.color]
        at.bxp(
            [{"med": median, "q1": low, "q3": high, "whislo": min([low, *near]), "whishi": max([high, *near])}],
            positions=[place],
            widths=0.62,
            showfliers=False,
            boxprops={"color": color, "linewidth": 1.2},
            whiskerprops={"color": color, "linewidth": 1.0},
            capprops={"color": color, "linewidth": 1.0},
            medianprops={"color": color, "linewidth": 2.8},
            manage_ticks=False,
        )
        spread = [place + 0.5 * ((GOLDEN * i) % 1 - 0.5) for i in range(len(known))]
        at.plot(spread, known, **{**mark.points, "markersize": 3.2, "alpha": 0.65})
        _crosses(at, mark, [place + 0.5 * ((GOLDEN * i) % 1 - 0.5) for i in range(len(of) - len(known))], higher)
        if lost[mark.label]:
            at.annotate(
                lost[mark.label].replace(", ", ",\n"),
                (place, _edge(higher)),
                xycoords=at.get_xaxis_transform(),
                xytext=(0, 7 if higher else -7),
                textcoords="offset points",
                ha="center",
                va="bottom" if higher else "top",
                fontsize=8,
            )
    return at


def lines(x: str, y: str, ticks: Sequence[str], medians: Mapping[Mark, Sequence[float | None]], higher: bool) -> Axes:
    """One line for each optimizer over the values of a setting, equally far apart; None where it has no run."""
    at = _axes(x, y, [v for of in medians.values() for v in of if v is not None], higher, ticks, size=NARROW)
    for number_of, (mark, of) in enumerate(medians.items()):
        known = [(place, value) for place, value in enumerate(of) if value is not None]
        at.plot(
            [place for place, _ in known],
            [value if math.isfinite(value) else math.nan for _, value in known],
            **{**mark.points, **mark.stroke},
        )
        side = 0.09 * (number_of - (len(medians) - 1) / 2)
        _crosses(at, mark, [place + side for place, value in known if not math.isfinite(value)], higher)
    return at


def _axes(
    x: str,
    y: str,
    values: Sequence[float],
    higher: bool,
    ticks: Sequence[str],
    size: tuple[float, float] = SIZE,
) -> Axes:
    known = [value for value in values if math.isfinite(value)]
    log = min(known) > 0 and max(known) > WIDE * min(known)
    at = axes(x, y, log="y" if log else "", size=size)
    low, high = (math.log10(v) if log else v for v in (min(known), max(known)))
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
    # At the edge where lost runs lie, room for them and for their number.
    room = 4.5 * margin if len(known) < len(values) else margin
    low, high = low - (room if higher else margin), high + (margin if higher else room)
    at.set_ylim(*((10**low, 10**high) if log else (low, high)))
    at.xaxis.set_major_locator(FixedLocator(range(len(ticks))))
    at.xaxis.set_major_formatter(FuncFormatter(lambda place, _: ticks[round(place)]))
    at.set_xlim(-0.5, len(ticks) - 0.5)
    return at


def _edge(higher: bool) -> float:
    """Where the worst lies, from 0 to 1 of the height."""
    return 0.03 if higher else 0.97


def _crosses(at: Axes, mark: Mark, places: Sequence[float], higher: bool) -> None:
    at.plot(
        places,
        [_edge(higher)] * len(places),
        transform=at.get_xaxis_transform(),
        color=LIGHT[mark.color],
        marker="x",
        markersize=5,
        linestyle="none",
    )


def _inside(at: Axes, value: float) -> float:
    low, high = at.get_ylim()
    return min(max(value, low), high)
