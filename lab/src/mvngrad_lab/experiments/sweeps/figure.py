"""A sweep: all its runs as boxes, the effect of each setting, what was selected, and what it cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from mvngrad_lab.experiments.sweeps.boxes import draw_boxes, draw_medians
from mvngrad_lab.experiments.sweeps.records import LABELS, Row, SweepExport, get_label
from mvngrad_lab.report.figures.style import BOUND, Mark, cell_mark, number
from mvngrad_lab.report.figures.svg import Figure, Table, make_panel
from mvngrad_lab.report.statistics import quantile
from mvngrad_lab.sweep.records import CODE, DONE, OPEN

SETTINGS = {"lr": "learning rate", "beta1": "β₁", "beta2": "β₂", "eps_s": "ε_s"}
FAILURES = "A run that diverged or failed is a cross at the edge, and counts as worse than any other in box and median."


def draw(export: SweepExport) -> list[Figure]:
    metrics = [export.metric, *filter(None, [export.train_metric])]
    figures = [_draw_runs(export, metrics)]
    if export.varied:
        figures.append(_draw_settings(export, metrics[0]))
    return [*figures, _make_selection(export, metrics), _make_budget(export)]


def get_mark(optimizer: str) -> Mark:
    """Its own for a cell of the paper; all others look alike, and are named below them or in words."""
    return cell_mark(optimizer) if optimizer in LABELS.values() else replace(BOUND, label=optimizer, marker="o")


def format_metric(metric: str) -> str:
    return metric.replace("_", " ") + (", %" if metric.endswith("accuracy") else "")


def format_value(value: float, otherwise: str = "failed") -> str:
    return number(value, 4) if math.isfinite(value) else otherwise


def describe_progress(export: SweepExport) -> str:
    """How far it is; nothing if it is done."""
    done = sum(row["status"] not in OPEN for row in export.swept)
    return (
        f"A partial sweep: {done} of at least {done + export.left} runs are done, and what ran first is not a fair "
        "sample. "
        if export.left
        else ""
    )


def describe_failures(rows: Sequence[Row]) -> str:
    counts = Counter(row["status"] for row in rows)
    named = {"diverged": counts["diverged"], "failed": counts["raised"]}
    return ", ".join(f"{count} {name}" for name, count in named.items() if count)


def describe_metric(export: SweepExport) -> str:
    because = f", of test data, because {export.test_because}" if export.test_because else ""
    return f"Chosen by {export.metric.replace('_', ' ')}, {'highest' if export.higher else 'lowest'}{because}."


def _draw_runs(export: SweepExport, metrics: Sequence[str]) -> Figure:
    panels, table = [], []
    failures = {optimizer: describe_failures(export.rows_of(optimizer)) for optimizer in export.optimizers}
    for metric in metrics:
        values = {name: of for name in export.optimizers if (of := export.values(export.rows_of(name), metric))}
        if not any(math.isfinite(value) for of in values.values() for value in of):
            continue
        quartiles = {name: [quantile(of, share) for share in (0.25, 0.5, 0.75)] for name, of in values.items()}
        marked = {get_mark(name): of for name, of in values.items()}
        axes = draw_boxes(format_metric(metric), marked, quartiles, export.higher, failures)
        texts = []
        for name, of in values.items():
            low, median, high = quartiles[name]
            texts.append(
                f"{name}: median {format_value(median)}, quartiles {format_value(low)} and {format_value(high)}, "
                f"{len(of)} runs" + (f", {failures[name]}" if failures[name] else "")
            )
            ordered = sorted(of, reverse=export.higher)
            numbers = map(format_value, (ordered[0], low, median, high, ordered[-1]))
            row = (metric.replace("_", " "), name, str(len(of)), failures[name] or "0", *numbers)
            table.append((*row, format_value(high - low, "not finite")))
        title = f"{format_metric(metric).capitalize()}, all runs of {export.sweep}"
        panels.append(make_panel(axes, title, "; ".join(texts) + "."))
    outside = len(export.swept) - sum(len(export.judged(name)) for name in export.optimizers)
    caption = (
        f"{describe_progress(export)}Every run of the sweep, one mark each, without those that repeat a selected "
        "configuration. Box: median and quartiles; whiskers: to the farthest run within 1.5 interquartile ranges of "
        f"the box. {FAILURES} {describe_metric(export)}"
        + (f" {outside} runs are not of the grid as this version has it, and decide nothing." if outside else "")
    )
    quantities = ("best", "lower quartile", "median", "upper quartile", "worst", "IQR")
    head = ("metric", "optimizer", "runs", "failed", *quantities)
    title = f"All runs of {export.sweep}; a run without a result is the worst"
    marks = tuple(map(get_mark, export.optimizers))
    return Figure(f"Sweep {export.sweep}: all runs", caption, tuple(panels), marks, Table(title, head, tuple(table)))


def _draw_settings(export: SweepExport, metric: str) -> Figure:
    panels = []
    for field in export.varied:
        tried = {repr(value): value for row in export.swept if (value := row["settings"].get(field)) is not None}
        settings = sorted(tried.values(), key=_order)
        medians: dict[Mark, list[float | None]] = {}
        for name in export.optimizers:
            rows = [[row for row in export.rows_of(name) if row["settings"].get(field) == value] for value in settings]
            values = [export.values(group, metric) for group in rows]
            medians[get_mark(name)] = [quantile(of, 0.5) if of else None for of in values]
        if not any(value is not None and math.isfinite(value) for row in medians.values() for value in row):
            continue
        title = SETTINGS.get(field, field)
        ticks = [number(value) if isinstance(value, int | float) else str(value) for value in settings]
        text = "; ".join(
            f"{mark.label}: "
            + ", ".join(f"{format_value(y)} at {x}" for x, y in zip(ticks, row, strict=True) if y is not None)
            for mark, row in medians.items()
        )
        axes = draw_medians(title, f"median {format_metric(metric)}", ticks, medians, export.higher)
        panels.append(make_panel(axes, f"Against {title}, {export.sweep}", f"Medians. {text}."))
    caption = (
        f"{describe_progress(export)}Median over all runs with the value, whatever their other settings. {FAILURES}"
    )
    marks = tuple(map(get_mark, export.optimizers))
    return Figure(f"Sweep {export.sweep}: what each setting does", caption, tuple(panels), marks)


def _order(value: Any) -> tuple[bool, float, str]:
    """Numbers first, then text."""
    numeric = isinstance(value, int | float)
    return not numeric, float(value) if numeric else 0.0, str(value)


def _make_selection(export: SweepExport, metrics: Sequence[str]) -> Figure:
    test = f"test_{export.metric.partition('_')[2]}"
    shown = [*metrics, *([test] if test != export.metric and export.measures(test) else [])]
    table = []
    for name in export.optimizers:
        if (selected := export.selected_row(name)) is None:
            table.append((name, *("" for _ in export.varied), "no run has a result", *("" for _ in shown)))
            continue
        settings = [selected["settings"].get(field) for field in export.varied]
        seeds = export.seeds_of(selected)
        finished = [row for row in seeds if row["status"] == "finished"]
        left = sum(row["status"] in OPEN for row in seeds)
        counts = filter(None, [str(len(finished)), describe_failures(seeds), f"{left} to come" if left else ""])
        means = [format_mean(export.values(finished, metric)) for metric in shown]
        table.append((name, *("–" if value is None else str(value) for value in settings), ", ".join(counts), *means))
    fields = (SETTINGS.get(field, field) for field in export.varied)
    head = ("optimizer", *fields, "seeds", *map(format_metric, shown))
    caption = (
        f"{describe_progress(export)}The best configuration of each optimizer, and mean ± standard deviation over its "
        f"seeds, including that of the sweep. {describe_metric(export)}"
    )
    title = f"Sweep {export.sweep}: selected"
    return Figure(title, caption, (), (), Table(f"Selected in {export.sweep}", head, tuple(table)))


def format_mean(values: Sequence[float]) -> str:
    """Mean and deviation, to four digits.

    >>> format_mean([1.0, 2.0]), format_mean([0.5])
    ('1.5 ± 0.7071', '0.5')
    """
    return number(fmean(values), 4) + (f" ± {number(stdev(values), 4)}" if len(values) > 1 else "")


def _make_budget(export: SweepExport) -> Figure:
    table = []
    for name in (*export.optimizers, "all"):
        rows = export.swept if name == "all" else export.rows_of(name)
        seeds = [row for row in export.repeated if name in ("all", get_label(row))]
        counts = Counter(row["status"] for row in rows)
        left = sum(counts[status] for status in OPEN)
        hours = sum(row.get("seconds") or 0.0 for row in (*rows, *seeds)) / 3600
        statuses = (str(counts[status]) for status in DONE)
        table.append((name, str(len(rows)), *statuses, str(left), str(len(seeds)), number(hours)))
    head = ("optimizer", "configurations", "finished", "diverged", "failed", "to come", "more seeds", "hours")
    notes = ["Hours are of one worker, all runs one after another."]
    if export.share_trained:
        notes.append(
            f"Workers trained {export.share_trained:.0%} of their time, from their first run to the end of their last."
        )
    for field in CODE:  # results of different code should not be compared
        counts = Counter(row[field] for row in export.rows if row.get(field))
        if len(counts) > 1:
            named = ", ".join(f"{value} ({count} runs)" for value, count in counts.most_common())
            notes.append(f"Workers of {len(counts)} different {field}: {named}.")
    caption = describe_progress(export) + " ".join(notes)
    title = f"Sweep {export.sweep}: budget"
    return Figure(title, caption, (), (), Table(f"Runs of {export.sweep}", head, tuple(table)))


def draw_engine(result: dict[str, Any]) -> list[Figure]:
    rows = []
    for row in result["rows"]:
        times = f"{row['milliseconds']:.0f}", f"{row['milliseconds_95']:.0f}", f"{row['runs_per_second']:.0f}"
        rows.append((row["store"], str(row["workers"]), str(row["runs"]), *times, str(row["errors"])))
    caption = "Runs that return at once: what passes in a worker from the end of one to the start of the next."
    head = ("store", "workers", "runs", "of a run, ms", "95% below, ms", "runs a second", "errors")
    return [Figure("What the sweep engine adds to a run", caption, (), (), Table("Engine", head, tuple(rows)))]


FIGURES = {"sweep-*": draw, "engine": draw_engine}
