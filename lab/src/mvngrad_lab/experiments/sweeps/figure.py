"""A sweep: all its runs as boxes, what each setting does, what was selected, and what it cost."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from mvngrad_lab.report.exports import CODE, OPEN
from mvngrad_lab.report.figures.boxes import boxes, lines
from mvngrad_lab.report.figures.style import BOUND, Mark, cell, number
from mvngrad_lab.report.figures.svg import Figure, Table, panel
from mvngrad_lab.report.statistics import quantile
from mvngrad_lab.report.swept import LABELS, Row, Swept, label

SETTINGS = {"lr": "learning rate", "beta1": "β₁", "beta2": "β₂", "eps_s": "ε_s"}
LOST = "A run that diverged or failed is a cross at the edge, and counts as worse than any other in box and median."


def draw(result: dict[str, Any]) -> list[Figure]:
    swept = Swept(result)
    metrics = [swept.metric, *filter(None, [swept.train_metric])]
    shown = [_all_runs(swept, metrics)]
    if swept.varied:
        shown.append(_settings(swept, metrics[0]))
    return [*shown, _selected(swept, metrics), _budget(swept)]


def mark(optimizer: str) -> Mark:
    """Its own for a cell of the paper; all others look alike, and have their names below them or in words."""
    known = optimizer in LABELS.values()
    return cell(optimizer) if known else replace(BOUND, label=optimizer, marker="o")


def words(metric: str) -> str:
    return metric.replace("_", " ") + (", %" if metric.endswith("accuracy") else "")


def told(value: float) -> str:
    return number(value, 4) if math.isfinite(value) else "lost"


def partial(swept: Swept) -> str:
    """How far it is, where it is not done."""
    done, left = sum(row["status"] not in OPEN for row in swept.swept), swept.result["left"]
    return (
        f"A partial sweep: {done} of at least {done + left} runs are done, and what ran first is not a fair sample. "
        if left
        else ""
    )


def _lost(rows: Sequence[Row]) -> str:
    counts = Counter(row["status"] for row in rows)
    named = {"diverged": counts["diverged"], "failed": counts["raised"]}
    return ", ".join(f"{count} {name}" for name, count in named.items() if count)


def _all_runs(swept: Swept, metrics: Sequence[str]) -> Figure:
    panels, table = [], []
    lost = {optimizer: _lost(swept.rows(optimizer)) for optimizer in swept.optimizers}
    for metric in metrics:
        values = {name: found for name in swept.optimizers if (found := swept.values(swept.rows(name), metric))}
        quartiles = {name: [quantile(found, share) for share in (0.25, 0.5, 0.75)] for name, found in values.items()}
        if not any(math.isfinite(value) for found in values.values() for value in found):
            continue
        at = boxes(
            words(metric), {mark(name): found for name, found in values.items()}, quartiles, swept.higher, lost=lost
        )
        described = [
            f"{name}: median {told(median)}, quartiles {told(low)} and {told(high)}, {len(values[name])} runs"
            + (f", {lost[name]}" if lost[name] else "")
            for name, (low, median, high) in quartiles.items()
        ]
        title = f"{words(metric).capitalize()}, all runs of {swept.sweep}"
        panels.append(panel(at, title, "; ".join(described) + "."))
        for name, (low, median, high) in quartiles.items():
            ends = sorted(values[name], reverse=swept.higher)
            spread = told(high - low) if math.isfinite(high - low) else "not finite"
            numbers = (told(ends[0]), told(low), told(median), told(high), told(ends[-1]), spread)
            table.append((metric.replace("_", " "), name, str(len(values[name])), lost[name] or "0", *numbers))
    outside = len(swept.swept) - sum(len(swept.judged(name)) for name in swept.optimizers)
    caption = (
        f"{partial(swept)}Every run of the sweep, one mark each, without those that repeat a selected configuration. "
        "Box: median and quartiles; whiskers: to the farthest run within 1.5 interquartile ranges of the box. "
        f"{LOST} {_direction(swept)}"
        + (f" {outside} runs are not of the grid as this version has it, and decide nothing." if outside else "")
    )
    head = ("metric", "optimizer", "runs", "lost", "best", "lower quartile", "median", "upper quartile", "worst", "IQR")
    return Figure(
        f"Sweep {swept.sweep}: all runs",
        caption,
        tuple(panels),
        tuple(map(mark, swept.optimizers)),
        Table(f"All runs of {swept.sweep}; a run without a result is the worst", head, tuple(table)),
    )


def _direction(swept: Swept) -> str:
    because = swept.result.get("test_because")
    return (
        f"Chosen by {swept.metric.replace('_', ' ')}, {'highest' if swept.higher else 'lowest'}"
        + (f", of test data, because {because}" if because else "")
        + "."
    )


def _settings(swept: Swept, metric: str) -> Figure:
    panels = []
    for field in swept.varied:
        tried = {json.dumps(row["settings"].get(field)): row["settings"].get(field) for row in swept.swept}
        places = sorted((value for value in tried.values() if value is not None), key=_order)
        medians: dict[Mark, list[float | None]] = {}
        for name in swept.optimizers:
            of = [[row for row in swept.rows(name) if row["settings"].get(field) == value] for value in places]
            found = [swept.values(rows, metric) for rows in of]
            medians[mark(name)] = [quantile(values, 0.5) if values else None for values in found]
        if not any(value is not None and math.isfinite(value) for row in medians.values() for value in row):
            continue
        name_of = SETTINGS.get(field, field)
        ticks = [number(value) if isinstance(value, int | float) else str(value) for value in places]
        described = "; ".join(
            f"{drawn.label}: "
            + ", ".join(f"{told(y)} at {x}" for x, y in zip(ticks, row, strict=True) if y is not None)
            for drawn, row in medians.items()
        )
        at = lines(name_of, f"median {words(metric)}", ticks, medians, swept.higher)
        panels.append(panel(at, f"Against {name_of}, {swept.sweep}", f"Medians. {described}."))
    caption = f"{partial(swept)}Median over all runs that have the value, whatever their other settings. {LOST}"
    return Figure(
        f"Sweep {swept.sweep}: what each setting does", caption, tuple(panels), tuple(map(mark, swept.optimizers))
    )


def _order(value: Any) -> tuple[bool, float, str]:
    numeric = isinstance(value, int | float)
    return not numeric, float(value) if numeric else 0.0, str(value)


def _selected(swept: Swept, metrics: Sequence[str]) -> Figure:
    kind = swept.metric.partition("_")[2]
    tested = [f"test_{kind}"] if swept.metric != f"test_{kind}" and swept.measured(f"test_{kind}") else []
    shown, rows = [*metrics, *tested], []
    for name in swept.optimizers:
        chosen = swept.chosen(name)
        if chosen is None:
            rows.append((name, *("" for _ in swept.varied), "no run has a result", *("" for _ in shown)))
            continue
        settings = [chosen["settings"].get(field) for field in swept.varied]
        seeds = swept.seeds(chosen)
        finished = [row for row in seeds if row["status"] == "finished"]
        lost, left = _lost(seeds), sum(row["status"] in OPEN for row in seeds)
        counted = ", ".join(filter(None, [str(len(finished)), lost, f"{left} to come" if left else ""]))
        means = [over_seeds(swept.values(finished, metric)) for metric in shown]
        rows.append((name, *("–" if value is None else str(value) for value in settings), counted, *means))
    head = ("optimizer", *(SETTINGS.get(field, field) for field in swept.varied), "seeds", *map(words, shown))
    caption = (
        f"{partial(swept)}The best configuration of each optimizer, and mean ± standard deviation over its seeds, that "
        f"of the sweep among them. {_direction(swept)}"
    )
    return Figure(
        f"Sweep {swept.sweep}: selected", caption, (), (), Table(f"Selected in {swept.sweep}", head, tuple(rows))
    )


def over_seeds(values: Sequence[float]) -> str:
    """Mean and deviation, to four digits.

    >>> over_seeds([1.0, 2.0]), over_seeds([0.5])
    ('1.5 ± 0.7071', '0.5')
    """
    return number(fmean(values), 4) + (f" ± {number(stdev(values), 4)}" if len(values) > 1 else "")


def _budget(swept: Swept) -> Figure:
    statuses = ("finished", "diverged", "raised")
    rows = []
    for name in (*swept.optimizers, "all"):
        tried = swept.swept if name == "all" else swept.rows(name)
        again = [row for row in swept.repeated if name in ("all", label(row))]
        counts = Counter(row["status"] for row in tried)
        left = sum(counts[status] for status in OPEN)
        hours = sum(row.get("seconds") or 0.0 for row in (*tried, *again)) / 3600
        rows.append(
            (name, str(len(tried)), *(str(counts[s]) for s in statuses), str(left), str(len(again)), number(hours))
        )
    head = ("optimizer", "configurations", "finished", "diverged", "failed", "to come", "more seeds", "hours")
    notes = [_busy(swept), *(_mixed(swept, field) for field in CODE)]
    caption = f"{partial(swept)}Hours are of one worker, all runs one after another. {' '.join(filter(None, notes))}"
    return Figure(
        f"Sweep {swept.sweep}: budget", caption.strip(), (), (), Table(f"Runs of {swept.sweep}", head, tuple(rows))
    )


def _busy(swept: Swept) -> str:
    """How much of their time workers trained, where the export says so."""
    share = swept.result.get("occupied")
    return f"Workers trained {share:.0%} of their time, from their first run to the end of their last." if share else ""


def _mixed(swept: Swept, field: str) -> str:
    """Where workers were of different code, whose results should not be compared."""
    counts = Counter(row[field] for row in (*swept.swept, *swept.repeated) if row.get(field))
    if len(counts) < 2:
        return ""
    named = ", ".join(f"{value} ({count} runs)" for value, count in counts.most_common())
    return f"Workers of {len(counts)} different {field}: {named}."


def draw_engine(result: dict[str, Any]) -> list[Figure]:
    rows = []
    for row in result["rows"]:
        times = f"{row['milliseconds']:.0f}", f"{row['milliseconds_95']:.0f}", f"{row['runs_per_second']:.0f}"
        rows.append((row["store"], str(row["workers"]), str(row["runs"]), *times, str(row["errors"])))
    caption = "Runs that return at once: what passes in a worker from the end of one to the start of the next."
    head = ("store", "workers", "runs", "of a run, ms", "95% below, ms", "runs a second", "errors")
    return [Figure("What the sweep engine adds to a run", caption, (), (), Table("Engine", head, tuple(rows)))]


FIGURES = {"sweep-*": draw, "engine": draw_engine}
