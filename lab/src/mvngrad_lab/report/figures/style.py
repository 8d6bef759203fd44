"""How every figure looks: a colour, dash and marker for each optimizer, for light and dark screens and paper.

No two of the four optimizers share a dash or a marker, so colour is never needed to tell them apart. Figures are drawn
in the light colours, which `svg` replaces by variables of the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

LIGHT = {
    "paper": "#fcfbf9",
    "ink": "#1c1e21",
    "muted": "#5c626b",
    "line": "#d9dadd",
    "adam": "#3a414d",
    "adabelief": "#099990",
    "laprop": "#2646cf",
    "mvngrad": "#c83e0b",
}
DARK = {
    "paper": "#15171b",
    "ink": "#eceef1",
    "muted": "#a2a8b3",
    "line": "#363a42",
    "adam": "#a9b1bf",
    "adabelief": "#79eadf",
    "laprop": "#6c8ff8",
    "mvngrad": "#ff7148",
}

RC: dict[Any, Any] = {
    "font.size": 9.5,
    "svg.fonttype": "none",
    "text.parse_math": False,
    "text.color": LIGHT["ink"],
    "axes.edgecolor": LIGHT["muted"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.titlecolor": LIGHT["muted"],
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.7,
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.dash_capstyle": "round",
    "lines.scale_dashes": False,
}

FEW = 14
"""Points of a curve that each get a marker."""

SIZE = (5.0, 3.2)
"""Inches: about as wide as a phone, so that text stays readable there."""
NARROW = (3.9, 3.1)
"""For three panels side by side."""


@dataclass(frozen=True)
class Mark:
    """A label, and how its line or points are drawn."""

    label: str
    color: str
    """A key of LIGHT and DARK."""
    dash: tuple[float, ...] = ()
    marker: str = ""
    """matplotlib's letter: o, s, ^ or D."""
    width: float = 1.8
    line: bool = True
    """Whether points are joined by a line."""

    def with_label(self, label: str) -> Mark:
        return replace(self, label=label)

    @property
    def stroke(self) -> dict[str, Any]:
        """For `Axes.plot`, without marker."""
        style: Any = (0, self.dash) if self.dash else "-"
        return {"color": LIGHT[self.color], "linestyle": style, "linewidth": self.width}

    @property
    def points(self) -> dict[str, Any]:
        """For `Axes.plot`, without line."""
        size = 5.6 if self.marker in "^D" else 5
        return {"color": LIGHT[self.color], "marker": self.marker, "markersize": size, "linestyle": "none"}


ADAM = Mark("Adam", "adam", dash=(5, 2.4), marker="s")
ADABELIEF = Mark("AdaBelief", "adabelief", dash=(1.2, 2.2), marker="^", width=2.2)
LAPROP = Mark("LaProp", "laprop", dash=(7, 2, 1.2, 2), marker="o")
MVNGRAD = Mark("MVN-Grad", "mvngrad", marker="D", width=3.0)
MARKS = {mark.label: mark for mark in (ADAM, ADABELIEF, LAPROP, MVNGRAD)}

BOUND = Mark("bound", "ink", dash=(2.5, 2.5), width=1.1)
CLIPPED = Mark("MVN-Grad with z_clip", "mvngrad", dash=(1.2, 2.2), width=1.5)


def cell_mark(label: str) -> Mark:
    """The mark of the optimizer whose name `label` starts with, with that label."""
    return next((mark for name, mark in MARKS.items() if label.startswith(name)), BOUND).with_label(label)


def make_axes(
    x: str, y: str, log: str = "", size: tuple[float, float] = SIZE, left: float = 0.56, bottom: float = 0.44
) -> Axes:
    """The axes of one panel; `log` names those that are logarithmic. The label of y is above them, not turned.

    Margins are fixed, those at the left and the bottom in inches, so that panels side by side are aligned.
    """
    width, height = size
    margins = {"left": left / width, "right": 1 - 0.1 / width, "bottom": bottom / height, "top": 1 - 0.3 / height}
    axes = Canvas(figsize=size).subplots(gridspec_kw=margins)
    axes.set_xlabel(x, loc="right")
    axes.set_title(y, loc="left", x=-(left - 0.04) / (width - left - 0.1), fontsize=RC["font.size"], pad=9)
    axes.grid(visible=False, axis="x")
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if name in log:
            getattr(axes, f"set_{name}scale")("log")
            axis.set_major_locator(LogLocator(numticks=7))
            axis.set_minor_locator(NullLocator())
            axis.set_minor_formatter(NullFormatter())
            axis.set_major_formatter(FuncFormatter(lambda value, _: power(value)))
        else:
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
            axis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 5)))
    return axes


def label_rows(axes: Axes, names: Sequence[str], top: float = 0.5) -> None:
    """Name the rows of horizontal marks, the first at the top, with so much room above it."""
    axes.yaxis.set_major_locator(FixedLocator(range(len(names))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda row, _: names[round(row)]))
    axes.grid(visible=False)
    axes.set_ylim(len(names) - 0.5, -top)


def label_columns(axes: Axes, names: Sequence[str], side: float = 0.5) -> None:
    """Name the columns of marks, with so much room at either side."""
    axes.xaxis.set_major_locator(FixedLocator(range(len(names))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda column, _: names[round(column)]))
    axes.set_xlim(-side, len(names) - 1 + side)


def add_ticks(axes: Axes) -> None:
    """Add ticks between powers of ten to a logarithmic axis that spans little more than one of them."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        if axis.get_scale() == "log" and high < 30 * low:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def number(value: float, digits: int = 3) -> str:
    """A number as text: 0.05, 12,500, 1.3×10⁵.

    >>> number(0.05), number(1522.8), number(131072), number(-2e-7), number(99999.9), number(-math.inf)
    ('0.05', '1,523', '1.31×10⁵', '−2×10⁻⁷', '10⁵', '−∞')
    """
    if not math.isfinite(value):  # a setting can be infinite
        return str(value).replace("-", "−").replace("inf", "∞")
    if value == 0 or 1e-3 <= abs(float(f"{value:.{digits}g}")) < 1e5:
        return (f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.{digits}g}").replace("-", "−")
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}×10{superscript(int(exponent))}".replace("-", "−").replace("1×10", "10", mantissa in ("1", "-1"))


def power(value: float) -> str:
    """A power of ten on an axis.

    >>> power(1.0), power(100.0), power(1e-8)
    ('1', '100', '10⁻⁸')
    """
    return number(value) if 1e-2 <= value <= 1e3 else number(value, 1)


def superscript(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def draw_curve(axes: Axes, mark: Mark, x: Any, y: Any) -> None:
    """Draw a line with markers: on every point, or about eight of them if there are many points.

    A solid line is below dashed ones and wider, and markers are above all lines, so that equal curves are all visible.
    """
    axes.plot(x, y, **mark.stroke, zorder=2.2 if mark.dash else 2)
    if mark.marker:
        axes.plot(x, y, **mark.points, markevery=None if len(x) <= FEW else (0.04, 0.14), zorder=2.4)


def draw_band(axes: Axes, mark: Mark, x: Any, low: Any, high: Any) -> None:
    axes.fill_between(x, low, high, color=LIGHT[mark.color], alpha=0.16, linewidth=0)


def draw_level(axes: Axes, y: float, label: str, x: float = 0.99, above: bool = True) -> None:
    """Draw a horizontal line with a label at `x`, from 0 to 1: a bound or a level, not a measurement."""
    axes.axhline(y, **BOUND.stroke)
    axes.annotate(
        label,
        (x, y),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3 if above else -4),
        textcoords="offset points",
        ha="right" if x > 0.5 else "left",
        va="bottom" if above else "top",
    )


def draw_vertical(axes: Axes, x: float, label: str, y: float = 0.97, side: str = "left") -> None:
    """Draw a vertical line with a label at `y`, from 0 to 1."""
    axes.axvline(x, **BOUND.stroke)
    axes.annotate(
        label,
        (x, y),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if side == "left" else 4, 0),
        textcoords="offset points",
        ha="right" if side == "left" else "left",
        va="top",
    )
