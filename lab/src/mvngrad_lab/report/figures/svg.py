"""A matplotlib figure as SVG inside a page: in the page's colours, with a description, small, with unique ids."""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass
from typing import cast
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from mvngrad_lab.report.figures.style import LIGHT, Mark, add_ticks

NAMESPACE = "http://www.w3.org/2000/svg"
LINK = "{http://www.w3.org/1999/xlink}href"
NUMBERS = re.compile(r"-?\d+\.\d+")
COLORS = re.compile("|".join(LIGHT.values()))
VARIABLES = {color: f"var(--{name},{color})" for name, color in LIGHT.items()}
"""Variables of the page, with the light colour as default."""


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str
    svg: str


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """Panels that share a legend and a caption."""

    title: str
    caption: str
    panels: tuple[Panel, ...] = ()
    legend: tuple[Mark, ...] = ()
    table: Table | None = None


def make_panel(axes: Axes, title: str, description: str) -> Panel:
    """The panel of `axes`. Ids in it depend on `title` and on the salt that `page.draw` sets for each record."""
    add_ticks(axes)
    text, salt = io.StringIO(), f"{matplotlib.rcParams['svg.hashsalt']} {title}"
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        cast(Canvas, axes.figure).savefig(text, format="svg", transparent=True)
    name = "t" + hashlib.sha256(salt.encode()).hexdigest()[:10]
    return Panel(title, clean_svg(text.getvalue(), name, title, description))


def clean_svg(text: str, name: str, title: str, description: str) -> str:
    """matplotlib's file without what a page does not need, with a title and a description for screen readers."""
    ElementTree.register_namespace("", NAMESPACE)
    root = ElementTree.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", text))
    used = set(re.findall(r"url\(#([^)]*)\)", text)) | set(re.findall(r'xlink:href="#([^"]*)"', text))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("metadata", "}style")):
                parent.remove(child)
    for element in root.iter():
        _clean_element(element, used)
        element.text, element.tail = (element.text or "").strip(), None
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-labelledby": f"{name} {name}d"}
    for index, (tag, own_id, content) in enumerate((("title", name, title), ("desc", f"{name}d", description))):
        words = ElementTree.Element(f"{{{NAMESPACE}}}{tag}", {"id": own_id})
        words.text = content
        root.insert(index, words)
    return ElementTree.tostring(root, encoding="unicode")


def _clean_element(element: ElementTree.Element, used: set[str]) -> None:
    attributes = element.attrib
    if attributes.get("id") not in used:
        attributes.pop("id", None)
    if LINK in attributes:
        attributes["href"] = attributes.pop(LINK)
    if "style" in attributes:
        style = re.sub(r"font: ([\d.]+px) [^;]*", r"font-size: \1", attributes["style"])
        style = re.sub(r"font-family: [^;]*; ?", "", style)
        attributes["style"] = COLORS.sub(lambda match: VARIABLES[match[0]], style).replace(": ", ":").replace("; ", ";")
    if attributes.get("transform", "").startswith("rotate(-0 "):
        del attributes["transform"]
    for name in attributes.keys() & {"d", "x", "y", "width", "height", "transform"}:
        attributes[name] = " ".join(NUMBERS.sub(_round, attributes[name]).split())


def _round(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")
