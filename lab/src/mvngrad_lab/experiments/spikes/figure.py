"""The excess of the loss after a bad batch, and what is left of it at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import isfinite
from typing import Any

from mvngrad_lab.experiments.spikes import recipes
from mvngrad_lab.experiments.spikes.judge import NAMES, get_number, index_rows
from mvngrad_lab.report.figures.style import LIGHT, MARKS, draw_curve, make_axes, number
from mvngrad_lab.report.figures.svg import Figure, Table, make_panel
from mvngrad_lab.report.statistics import quantile
from mvngrad_lab.report.verdicts import CAVEAT, NOT_REPRODUCED, REPRODUCED, Verdict


def draw(result: dict[str, Any]) -> list[Figure]:
    """The excess of the loss at both rates; the betas distinguish the figures of a page."""
    panels, where = [], f", betas {_format_betas(result)}"
    for rate, cells in sorted(result["excess"].items()):
        at = make_axes("steps after a bad batch", "loss above the run without it")
        for cell, excess in cells.items():
            draw_curve(at, MARKS[NAMES[cell]], range(len(excess)), excess)
        at.axhline(0, color=LIGHT["muted"], linewidth=0.8)
        words = "; ".join(f"{NAMES[cell]} {number(excess[0])} at first" for cell, excess in cells.items())
        panels.append(make_panel(at, f"{rate} the best rate{where}", f"{words}."))
    runs, rows = index_rows(result), []
    for injection, protection, rate in dict.fromkeys((key.injection, key.protection, key.rate) for key in runs):
        cells = []
        for cell in NAMES:
            wanted: dict[str, Any] = {"cell": cell, "injection": injection, "protection": protection, "rate": rate}
            some = [row for key, row in runs.items() if key._replace(**wanted) == key]
            middle = [quantile([get_number(row, name) for row in some], 0.5) for name in MEASURES if some]
            cells.append(", ".join(number(value) if isfinite(value) else "diverged" for value in middle))
        rows.append((injection, protection, rate, *cells))
    caption = (
        f"{result['done']} of {result['of']} runs are done. Each run with bad batches is compared with the run of the "
        "same seed, data and settings without them. Lines: median over events, kinds of bad batches and seeds, without "
        "clipping. Table: median steps to recovery, and damage at the end."
    )
    head = ("bad batch", "clipping", "rate", *NAMES.values())
    table = Table("Median steps to recovery, damage", head, tuple(rows))
    return [Figure(f"After a bad batch{where}", caption, tuple(panels), tuple(MARKS.values()), table)]


def draw_mnist(result: dict[str, Any]) -> list[Figure]:
    """A figure for each regime of betas."""
    figures = []
    for part in result["regimes"].values():
        (figure,) = draw(part)
        rates = ", ".join(f"{NAMES[cell]} {number(rate)}" for cell, rate in part["best"].items())
        caption = (
            f"A two-layer network, seeds {', '.join(map(str, result['seeds']))}. {result['data']}. {figure.caption}"
        )
        caption += f" Best rates, by validation loss with seed 0: {rates}."
        figures.append(dataclasses.replace(figure, caption=caption))
    return figures


def describe_text(result: dict[str, Any], verdicts: Mapping[str, Verdict]) -> str:
    """What bad batches cost a language model, at the betas at which the theory separates the cells."""
    if verdicts["spikes-text-short-damage"].strip is None:
        return ""
    words = _choose_words(verdicts["spikes-text-short-damage"], "loses less by bad batches")
    shown = [row for row in result["rows"] if (row["injection"], row["rate"]) == ("scaled", "1x")]
    damages = {
        name: quantile([get_number(row, "damage") for row in shown if row["cell"] == cell], 0.5)
        for cell, name in NAMES.items()
    }
    costs = ", ".join(f"{name} {damages[name]:.2f}" for name in sorted(damages, key=damages.__getitem__, reverse=True))
    return (
        f"In GPT-2 30M {words} at betas {_format_betas(result)}, where the theory separates LaProp and MVN-Grad from "
        f"Adam: a loss times {recipes.SCALE:,.0f} in one step of {recipes.EVERY} costs {costs} nats "
        f"({len({row['seed'] for row in shown})} seeds)."
    )


def describe_mnist(result: dict[str, Any], verdicts: Mapping[str, Verdict]) -> str:
    """How fast each cell recovers at the betas at which the theory separates them, and at usual ones."""
    short, usual = (verdicts[f"spikes-mnist-{regime}-recovery"] for regime in ("short", "usual"))
    if short.strip is None:
        return ""
    words = _choose_words(short, "recovers in fewer steps")
    steps = ", ".join(f"{row.label} {row.value:.0f}" for row in short.strip.rows)
    text = (
        f"After a bad batch on MNIST {words} at betas {_format_betas(result['regimes']['short'])}, where the theory "
        f"separates LaProp and MVN-Grad from Adam: {steps} (n\u00a0=\u00a0{short.strip.rows[0].n})"
    )
    if usual.strip is not None:
        low, *_, high = sorted(row.value for row in usual.strip.rows)
        text += f"; at {_format_betas(result['regimes']['usual'])} all four take {low:.0f}"
        text += f" to {high:.0f}" * (high > low)
    return f"{text}."


def _choose_words(verdict: Verdict, what: str) -> str:
    """What the verdict says of momentum after normalizing; `what` is a verb and its object."""
    verb, _, rest = what.partition(" ")
    return {
        REPRODUCED: f"**momentum after normalizing {what}**",
        CAVEAT: f"**momentum after normalizing {what}**, with a caveat,",
        NOT_REPRODUCED: f"**momentum after normalizing does not {verb.removesuffix('s')} {rest}**",
    }.get(verdict.status, f"it is **undecided** whether momentum after normalizing {what}")


def _format_betas(result: Mapping[str, Any]) -> str:
    first, second = result["betas"]
    return f"({first:g}, {second:g})"


MEASURES = ("recovery", "damage")
FINDINGS = {"spikes-text-short": (20, describe_text), "spikes-mnist": (45, describe_mnist)}
FIGURES = {"spikes-text": draw, "spikes-text-short": draw, "spikes-images": draw, "spikes-mnist": draw_mnist}
