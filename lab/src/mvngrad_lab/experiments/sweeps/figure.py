"""A sweep: all its runs as boxes, the effect of each setting, what was selected, and what it cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from mvngrad_lab.experiments.sweeps.boxes import Cell, draw_boxes, draw_cells
from mvngrad_lab.experiments.sweeps.records import LABELS, Row, SweepExport, get_label
from mvngrad_lab.report.figures.style import BOUND, Mark, cell_mark, number
from mvngrad_lab.report.figures.svg import Figure, Table, make_panel
from mvngrad_lab.report.statistics import quantile
from mvngrad_lab.report.verdicts import CAVEAT, NOT_RUN, Verdict
from mvngrad_lab.sweep.grids import format_duration
from mvngrad_lab.sweep.records import CODE, DONE, OPEN

SETTINGS = {"lr": "learning rate", "beta1": "β₁", "beta2": "β₂", "eps_s": "ε_s"}
MOST_ROWS = 40
"""Combinations of settings up to which every run is shown at its own."""
TRANSFERRED = ("sweep-scaled-", "sweep-mnist-")
"""Start the ids of claims of the paper that are transferred to sweeps of ours."""
SELECTED = "sweep-scaled-selected"
"""The one of them that is not about robustness."""
FAILURES = "A run that diverged or failed is a cross at the edge, and counts as worse than any other in box and median."


def draw(export: SweepExport) -> list[Figure]:
    metrics = [export.metric, *filter(None, [export.train_metric])]
    settings = _draw_settings(export, metrics[0]) if export.varied else []
    return [_draw_runs(export, metrics), *settings, _make_selection(export, metrics), _make_budget(export)]


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


def _draw_settings(export: SweepExport, metric: str) -> list[Figure]:
    """Every run at its settings. No average over other settings: in a grid that is not complete, a setting may change
    together with another, and a line over one of them would show what the other does.
    """
    column = "lr" if "lr" in export.varied else export.varied[-1]
    fields = [field for field in export.varied if field != column]

    def get_settings(names: Sequence[str]) -> list[tuple[Any, ...]]:
        tried = {repr(key): key for key in (_pick(row, names) for row in export.swept)}
        return sorted(tried.values(), key=lambda key: [_order(value) for value in key])

    columns, combinations = get_settings([column]), get_settings(fields)
    if len(combinations) > MOST_ROWS:
        return []
    finite = list(filter(math.isfinite, export.values(export.swept, metric)))
    panels = []
    for name in export.optimizers:
        rows = export.rows_of(name)
        values = [
            [
                _format_median(export, [r for r in rows if _pick(r, [column, *fields]) == (*x, *y)], metric, finite)
                for x in columns
            ]
            for y in combinations
        ]
        labels = [", ".join(map(_format_setting, key)) for key in combinations]
        ticks = [_format_setting(key[0]) for key in columns]
        heads = [SETTINGS.get(field, field) for field in (column, *fields)]
        axes = draw_cells(get_mark(name), heads[0], ", ".join(heads[1:]), ticks, labels, values)
        best = max((cell for row in values for cell in row), key=lambda cell: cell[1])[0]
        panels.append(make_panel(axes, f"{name}, {export.sweep}", f"Best {metric.replace('_', ' ')}: {best}."))
    caption = (
        f"{describe_progress(export)}{format_metric(metric).capitalize()} of each run at its settings. The stronger a "
        "shade, the better among all runs of the sweep; bold: the best of each optimizer; ×: diverged or failed."
    )
    return [Figure(f"Sweep {export.sweep}: every setting", caption, tuple(panels))]


def _pick(row: Row, fields: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row["settings"].get(field) for field in fields)


def _format_setting(value: Any) -> str:
    return "–" if value is None else number(value) if isinstance(value, int | float) else str(value)


def _format_median(export: SweepExport, rows: Sequence[Row], metric: str, finite: Sequence[float]) -> Cell:
    """Of the runs that are done; and which share of the values that are `finite` it is better than."""
    values = export.values(rows, metric)
    value = quantile(values, 0.5) if values else math.nan
    if not math.isfinite(value):
        return "×" if values else "", -1.0
    worse = sum((other < value) if export.higher else (other > value) for other in finite)
    text = f"{value:.2f}" if metric.endswith("accuracy") else number(value, 4)
    return text, worse / max(1, len(finite) - 1)


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
        seconds = sum(row.get("seconds") or 0.0 for row in (*rows, *seeds))
        statuses = (str(counts[status]) for status in DONE)
        table.append((name, str(len(rows)), *statuses, str(left), str(len(seeds)), format_duration(seconds)))
    head = ("optimizer", "configurations", "finished", "diverged", "failed", "to come", "more seeds", "time")
    notes = ["Times are of one worker, all runs one after another."]
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


def describe(export: SweepExport, verdicts: Mapping[str, Verdict]) -> str:
    """The finding on robustness, from all claims of the paper that are transferred to sweeps of ours."""
    of_sweeps = {c: v.status for c, v in verdicts.items() if c.startswith(TRANSFERRED) and c != SELECTED}
    counts = Counter(status for status in of_sweeps.values() if status != NOT_RUN)
    if not counts:
        return ""
    is_shown = bool(counts[CAVEAT])
    head = "On robustness to settings" if is_shown else "MVN-Grad is **not shown to be more robust** to its settings"
    claims = f"{counts.total()} claims about sweeps, on CIFAR-100 with 30 epochs and on MNIST"
    if len(counts) == 1:
        return f"{head}: all {claims}, are {next(iter(counts))}."
    return f"{head}: of {claims}, {', '.join(f'{n} are {status}' for status, n in counts.most_common())}."


FINDINGS = {"sweep-cifar100-bs1024-scaled": (50, describe)}
FIGURES = {"sweep-*": draw, "engine": draw_engine}
