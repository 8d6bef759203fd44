"""The excess of the loss after a bad batch, and what is left of it at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from mvngrad_lab.experiments.spikes.judge import NAMES, get_number, index_rows
from mvngrad_lab.report.figures.style import LIGHT, MARKS, draw_curve, make_axes, number
from mvngrad_lab.report.figures.svg import Figure, Table, make_panel
from mvngrad_lab.report.statistics import quantile
from mvngrad_lab.report.verdicts import CAVEAT, NOT_REPRODUCED, REPRODUCED, Verdict


def draw(result: dict[str, Any], where: str = "") -> list[Figure]:
    """`where` distinguishes the figures of one record."""
    panels = []
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
        (figure,) = draw(part, f", betas {part['betas'][0]:g} and {part['betas'][1]:g}")
        rates = ", ".join(f"{NAMES[cell]} {number(rate)}" for cell, rate in part["best"].items())
        caption = (
            f"A two-layer network, seeds {', '.join(map(str, result['seeds']))}. {result['data']}. {figure.caption}"
        )
        caption += f" Best rates, by validation loss with seed 0: {rates}."
        figures.append(dataclasses.replace(figure, caption=caption))
    return figures


def describe_text(result: dict[str, Any], verdicts: Mapping[str, Verdict]) -> str:
    """How fast each cell recovers in a language model, at the betas at which the theory separates them."""
    seeds = len({row["seed"] for row in result["rows"]})
    recovery, usual = verdicts["spikes-text-short-recovery"], verdicts["spikes-mnist-usual-recovery"]
    return _describe_recovery(recovery, "in GPT-2 30M", result["betas"], f"pairs, {seeds} seeds", usual, "on MNIST")


def describe_mnist(result: dict[str, Any], verdicts: Mapping[str, Verdict]) -> str:
    """How fast each cell recovers at the betas at which the theory separates them, and at usual ones."""
    short, usual = (verdicts[f"spikes-mnist-{regime}-recovery"] for regime in ("short", "usual"))
    return _describe_recovery(short, "on MNIST", result["regimes"]["short"]["betas"], "seeds", usual)


def _describe_recovery(
    verdict: Verdict, where: str, betas: Sequence[float], of_what: str, usual: Verdict, where_usual: str = ""
) -> str:
    """The median steps of each cell, and those at usual betas; empty if nothing was compared."""
    if verdict.strip is None:
        return ""
    words = {
        REPRODUCED: "**momentum after normalizing recovers in fewer steps**",
        CAVEAT: "**momentum after normalizing recovers in fewer steps**, in part",
        NOT_REPRODUCED: "**momentum after normalizing does not recover in fewer steps**",
    }.get(verdict.status, "it is **undecided** whether momentum after normalizing recovers in fewer steps")
    steps = ", ".join(f"{row.label} {row.value:.0f}" for row in verdict.strip.rows)
    text = (
        f"After a bad batch {where} {words} at betas ({betas[0]:g}, {betas[1]:g}), where the theory separates LaProp "
        f"and MVN-Grad from Adam: {steps} ({verdict.strip.rows[0].n} {of_what})"
    )
    if usual.strip is not None:
        low, *_, high = sorted(row.value for row in usual.strip.rows)
        text += f"; at usual betas all four take {low:.0f}{f' to {high:.0f}' * (high > low)} {where_usual}".rstrip()
    return f"{text}."


MEASURES = ("recovery", "damage")
FINDINGS = {"spikes-text-short": (20, describe_text), "spikes-mnist": (45, describe_mnist)}
FIGURES = {"spikes-text": draw, "spikes-text-short": draw, "spikes-images": draw, "spikes-mnist": draw_mnist}
