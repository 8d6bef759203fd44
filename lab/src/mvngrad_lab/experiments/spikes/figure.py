"""The excess of the loss after a bad batch, what is left of it at the end, and what clipping gains without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from math import inf, isfinite
from typing import Any

from mvngrad_lab.experiments.spikes import recipes
from mvngrad_lab.experiments.spikes.compare import FINAL, TOLERANCE, WINDOW, average
from mvngrad_lab.experiments.spikes.judge import LAST_AND_FIRST, get_number, index_rows
from mvngrad_lab.recipe import NAMES
from mvngrad_lab.report.figures.style import (
    BOUND,
    LIGHT,
    MARKS,
    NARROW,
    SIZE,
    draw_curve,
    label_rows,
    make_axes,
    number,
)
from mvngrad_lab.report.figures.svg import Figure, Table, make_panel
from mvngrad_lab.report.statistics import quantile
from mvngrad_lab.report.verdicts import CAVEAT, NOT_REPRODUCED, REPRODUCED, Verdict


def draw(result: dict[str, Any], task: str) -> list[Figure]:
    """The excess of the loss at both rates; the betas distinguish the figures of a page."""
    panels, where, excesses = [], f", betas {_format_betas(result)}", _get_mean_excess(result)
    y, size = f"loss above the run without it, mean over {WINDOW} steps", NARROW if len(excesses) > 4 else SIZE
    for title, by_cell in excesses.items():
        at = make_axes("steps after a bad batch", y, size=size)
        for cell, excess in by_cell.items():
            draw_curve(at, MARKS[NAMES[cell]], range(len(excess)), excess)
        at.axhline(0, color=LIGHT["muted"], linewidth=0.8)
        at.axhline(TOLERANCE, **BOUND.stroke)
        ends = (f"{NAMES[cell]} {number(of[0])} at first, {number(of[-1])} at last" for cell, of in by_cell.items())
        panel = make_panel(at, f"{title}{where}", f"{'; '.join(ends)}.")
        panels.append(dataclasses.replace(panel, title=title))  # the figure's title has the betas
    runs, rows = index_rows(result), []
    for injection, protection, rate in dict.fromkeys((key.injection, key.protection, key.rate) for key in runs):
        cells = []
        for cell in NAMES:
            wanted: dict[str, Any] = {"cell": cell, "injection": injection, "protection": protection, "rate": rate}
            some = [row for key, row in runs.items() if key._replace(**wanted) == key]
            middle = [quantile([get_number(row, name) for row in some], 0.5) for name in MEASURES if some]
            cells.append(", ".join(number(value) if isfinite(value) else "diverged" for value in middle))
        rows.append((recipes.INJECTION_NAMES[injection], protection, rate, *cells))
    what = "events" if "mean_excess" in result else "events and kinds of bad batches"
    caption = (
        f"{result['done']} of {result['of']} runs are done. Each run with bad batches is compared with the run of the "
        f"same seed, data and settings without them. Lines: median over {what} of runs without clipping that did not "
        f"diverge; a run has recovered once it stays below the dashed line, {TOLERANCE}. Table: median steps to "
        "recovery, which are all steps to the next bad batch if a run does not recover, and damage to the final "
        f"{FINAL[task][0].replace('_', ' ')}."
    )
    head = ("bad batch", "clipping", "rate", *NAMES.values())
    table = Table("Median steps to recovery, damage", head, tuple(rows))
    return [Figure(f"After a bad batch{where}", caption, tuple(panels), tuple(MARKS.values()), table)]


def _get_mean_excess(result: Mapping[str, Any]) -> dict[str, Mapping[str, list[float]]]:
    """Title of a panel -> optimizer -> mean excess of the loss over WINDOW steps, from each step on.

    Results of older versions have medians of single steps, of all kinds of bad batches together, in `excess`.
    """
    if "mean_excess" not in result:
        return {
            f"{rate} the best rate": {cell: average(excess) for cell, excess in cells.items()}
            for rate, cells in sorted(result["excess"].items())
        }
    return {
        f"{recipes.INJECTION_NAMES[injection].capitalize()}, {rate} the best rate": cells
        for injection, rates in result["mean_excess"].items()
        for rate, cells in sorted(rates.items())
    }


def draw_mnist(result: dict[str, Any]) -> list[Figure]:
    """A figure for each regime of betas."""
    figures = []
    for part in result["regimes"].values():
        (figure,) = draw(part, "mnist")
        rates = ", ".join(f"{NAMES[cell]} {number(rate)}" for cell, rate in part["best"].items())
        caption = (
            f"A two-layer network, seeds {', '.join(map(str, result['seeds']))}. {result['data']}. {figure.caption}"
        )
        caption += f" Best rates, by validation loss with seed 0: {rates}."
        figures.append(dataclasses.replace(figure, caption=caption))
    return figures


def draw_unclipped(result: dict[str, Any]) -> list[Figure]:
    """The final loss of each run, without clipping and with it, and the medians of each optimizer."""
    at, parts = make_axes("final validation loss, nats (lower is better)", "", size=(4.7, 2.6), left=0.86), []
    for row, (cell, name) in enumerate(NAMES.items()):
        mark, medians = MARKS[name], _get_medians(result, cell)
        for kind, median in medians.items():
            losses = [loss for loss in result["losses"][cell][kind].values() if loss is not None]
            fill = LIGHT["paper" if kind == "clipped" else mark.color]
            at.plot(losses, [row] * len(losses), "|", color=LIGHT[mark.color], alpha=0.5)
            at.plot(median, row, **{**mark.points, "markersize": 8, "markerfacecolor": fill})
        parts.append(f"{name} {', '.join(f'{kind} {median:.3f}' for kind, median in medians.items())}")
    label_rows(at, list(NAMES.values()))
    caption = (
        f"GPT-2 30M on a stand-in text, 500 steps, betas {recipes.TEXT_BETAS}, {_count_seeds(result)} seeds; "
        f"{result['done']} of {result['of']} runs are done. Filled: median without clipping. Hollow: median with the "
        "norm of the gradient clipped at 1. Thin lines: seeds."
    )
    title = "What clipping the norm gains without bad batches"
    return [Figure(title, caption, (make_panel(at, title, f"{'; '.join(parts)}."),))]


def _get_medians(result: Mapping[str, Any], cell: str) -> dict[str, float]:
    """Of an optimizer's final losses, clipped and unclipped, as far as there are runs; a diverged one is infinite."""
    return {
        kind: quantile([inf if loss is None else loss for loss in losses.values()], 0.5)
        for kind, losses in result["losses"].get(cell, {}).items()
        if losses
    }


def _count_seeds(result: Mapping[str, Any]) -> int:
    return len({seed for by_kind in result["losses"].values() for losses in by_kind.values() for seed in losses})


def describe_unclipped(result: dict[str, Any], verdicts: Mapping[str, Verdict]) -> str:
    """What momentum last is worth to a language model without clipping, if the rules say that it is worth something."""
    if any(verdicts[f"spikes-text-unclipped-{name}"].status != REPRODUCED for name in ("loss", "gain")):
        return ""
    medians = {cell: _get_medians(result, cell) for cell in NAMES}
    losses = ", ".join(
        f"{medians[last]['unclipped']:.2f} with {NAMES[last]} and {medians[first]['unclipped']:.2f} with {NAMES[first]}"
        for last, first in LAST_AND_FIRST
    )
    low, *_, high = sorted(of["clipped"] for of in medians.values())
    return (
        f"**Without gradient clipping a language model ends lower with momentum last**: GPT-2 30M at {losses}; with "
        f"the norm clipped at 1 all four end at {low:.2f} to {high:.2f} (rates chosen without clipping, betas "
        f"{recipes.TEXT_BETAS}, 500 steps of a stand-in text, {_count_seeds(result)} seeds)."
    )


def describe_text(result: dict[str, Any], verdicts: Mapping[str, Verdict]) -> str:
    """What bad batches cost a language model, at the betas at which the theory separates the cells."""
    if verdicts["spikes-text-short-damage"].strip is None:
        return ""
    words = _choose_words(verdicts["spikes-text-short-damage"], "loses less by bad batches")
    shown = [row for key, row in index_rows(result).items() if (key.injection, key.rate) == ("scaled", "1x")]
    by_cell = {
        name: [get_number(row, "damage") for row in shown if row["cell"] == cell] for cell, name in NAMES.items()
    }
    damages = {name: quantile(values, 0.5) for name, values in by_cell.items() if values}
    costs = ", ".join(
        f"{damages[name]:.2f} with {name}" for name in sorted(damages, key=damages.__getitem__, reverse=True)
    )
    return (
        f"At betas {_format_betas(result)}, where the theory separates LaProp and MVN-Grad from Adam, {words}: a loss "
        f"times {recipes.SCALE:,.0f} in one step of {recipes.EVERY} costs GPT-2 30M, in nats, {costs} "
        f"({len({row['seed'] for row in shown})} seeds).{_describe_usual_text(verdicts)}"
    )


def _describe_usual_text(verdicts: Mapping[str, Verdict]) -> str:
    """The same at the usual betas, and what clipping does there; empty if that is not run."""
    damage, clipping = (verdicts[f"spikes-text-{name}"] for name in ("damage", "clipping"))
    if damage.strip is None or clipping.strip is None:
        return ""
    words = {
        REPRODUCED: "momentum last helps, too",
        CAVEAT: "momentum last helps, too",
        NOT_REPRODUCED: "momentum last does not help",
    }
    clipped, free = (row.value for row in clipping.strip.rows[:2])
    return (
        f" At {recipes.TEXT_BETAS} {words.get(damage.status, 'that is undecided')}; bad batches cost {free:.2f} nats "
        f"there without clipping, {clipped:.2f} with the norm clipped."
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
        betas = _format_betas(result["regimes"]["usual"])
        # All steps up to the next bad batch stand for a run that does not recover.
        text += f"; at {betas} "
        text += f"all four take {low:.0f} to {high:.0f}" if high > low else f"none recovers within {high:.0f} steps"
    return f"{text}."


def _choose_words(verdict: Verdict, what: str) -> str:
    """What the verdict says of momentum last; `what` is a verb and its object."""
    verb, _, rest = what.partition(" ")
    return {
        REPRODUCED: f"**momentum last {what}**",
        CAVEAT: f"**momentum last {what}** (with a caveat)",
        NOT_REPRODUCED: f"**momentum last does not {verb.removesuffix('s')} {rest}**",
    }.get(verdict.status, f"it is **undecided** whether momentum last {what}")


def _format_betas(result: Mapping[str, Any]) -> str:
    first, second = result["betas"]
    return f"({first:g}, {second:g})"


MEASURES = ("recovery", "damage")
FINDINGS = {
    "spikes-text-unclipped": (19, describe_unclipped),
    "spikes-text-short": (20, describe_text),
    "spikes-mnist": (45, describe_mnist),
}
FIGURES = {
    "spikes-text-unclipped": draw_unclipped,
    "spikes-text": partial(draw, task="text"),
    "spikes-text-short": partial(draw, task="text"),
    "spikes-images": partial(draw, task="images"),
    "spikes-mnist": draw_mnist,
}
