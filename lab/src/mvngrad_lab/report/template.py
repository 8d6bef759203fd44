"""What both pages share: templates, where everything from data is escaped, and mathematics as one writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mvngrad_lab.report.figures import style

WORDS = {
    "alpha": "α",
    "beta": "β",
    "beta1": "β₁",
    "beta2": "β₂",
    "delta": "δ",
    "eps": "ε",
    "eta": "η",
    "mu": "μ",
    "Phi": "Φ",
    "sigma": "σ",
    "sqrt": "√",
    "xi": "ξ",
    "grad F": "∇F",
    "+-": "±",
}
WORD = re.compile("|".join(rf"(?<![\w`]){re.escape(word)}(?![^\W_])" for word in sorted(WORDS, key=len, reverse=True)))
LABEL = re.compile(r"(?<![\w`])(?:app|ass|cor|eq|fig|lem|prop|rem|subsec|tab|thm):[\w-]+")
"""Of the paper."""
MARKERS = {
    "s": "M10 2h6v6h-6z",
    "^": "M13 1.4l3.6 6.6h-7.2z",
    "o": "M13 1.7a3.3 3.3 0 1 0 .01 0z",
    "D": "M13 1l4 4-4 4-4-4z",
}


def spelled(text: str) -> Markup:
    """Escaped, then with Greek letters, exponents and `code`.

    >>> spelled("|z| <= 2/(beta1 sqrt(1-beta2)) for M = 1e8, T^-1/2 & `mvngrad report`")
    Markup('|z| ≤ 2/(β₁ √(1−β₂)) for M = 10<sup>8</sup>, T<sup>−1/2</sup> &amp; <code>mvngrad report</code>')
    >>> spelled("x_0 in eq:a_1, E[Phi_{t-1}] at beta1^2/beta2")
    Markup('x<sub>0</sub> in <code>eq:a_1</code>, E[Φ<sub>t−1</sub>] at β₁<sup>2</sup>/β₂')
    """
    parts = LABEL.sub(r"`\g<0>`", str(escape(text))).split("`")
    parts[::2] = map(_mathematics, parts[::2])
    parts[1::2] = [f"<code>{part}</code>" for part in parts[1::2]]
    return Markup("".join(parts))


def _mathematics(text: str) -> str:
    text = WORD.sub(lambda found: WORDS[found[0]], text.replace("&gt;=", "≥").replace("&lt;=", "≤"))
    text = re.sub(r"(?<![\w.])1e([+-]?\d+)\b", lambda found: f"10<sup>{_minus(str(int(found[1])))}</sup>", text)
    text = re.sub(r"(\d)e([+-]?\d+)\b", lambda found: f"{found[1]}×10<sup>{_minus(str(int(found[2])))}</sup>", text)
    text = re.sub(r"\^(-?\d+(?:\.\d+)?(?:/\d+)?|\w\*?)", lambda found: f"<sup>{_minus(found[1])}</sup>", text)
    text = re.sub(
        r"(?<=\w)_(?:\{([^}]*)\}|([\dst])\b)", lambda found: f"<sub>{_minus(found[1] or found[2])}</sub>", text
    )
    text = re.sub(r"(?<=\d\d)-(?=\d\d)", "–", text)
    return re.sub(r"(?<=[\d)β₁₂ ])-(?=[\dβ ])|(?<=[(= ,])-(?=\d)", "−", text)


def _minus(text: str) -> str:
    return text.replace("-", "−")


def listed(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A recipe as lines: nested names joined by points, values as JSON.

    >>> list(listed({"lr": 0.1, "data": {"name": "mnist"}}))
    [('lr', '0.1'), ('data.name', 'mnist')]
    """
    for name, value in values.items():
        if isinstance(value, dict):
            yield from listed(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value)


ENVIRONMENT = Environment(
    loader=PackageLoader("mvngrad_lab.report", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {"spelled": spelled, "listed": listed}
ENVIRONMENT.globals |= {"cells": style.CELLS, "light": style.LIGHT, "dark": style.DARK, "markers": MARKERS}
