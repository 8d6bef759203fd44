"""A sweep's progress and selection as text, and every run of it as a file."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from mvngrad.diagnostics.records import add_checksum
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.store import timestamp, write_atomic
from mvngrad_lab.sweep.grids import format_duration, get_settings_without_seed
from mvngrad_lab.sweep.queue import Queue
from mvngrad_lab.sweep.records import CODE, DONE, FAILED, Record, latest_by_key
from mvngrad_lab.sweep.stages import get_runs, select_best


def make_rows(queue: Queue) -> list[dict[str, Any]]:
    """One row for each configuration, in the order of the queue: settings, result, worker and code."""
    return [
        {
            "key": record.key,
            "stage": record.stage,
            "optimizer": record.settings.get("optimizer"),
            "status": record.status,
            "value": record.value,
            "settings": record.settings,
            "metrics": {name: v for name, v in record.outcome.items() if name not in ("status", "trace", "code")},
            "seconds": record.outcome.get("seconds", record.outcome.get("worker_seconds")),
            "reason": record.outcome.get("reason"),
            **{name: record.code.get(name) for name in ("worker", *CODE)},
        }
        for record in sorted(latest_by_key(queue.records()).values(), key=lambda record: record.number)
    ]


def export(queue: Queue, path: Path) -> int:
    """Write all runs to a .json or .csv file, whole or not at all; returns how many. Raises InvalidInput for others."""
    rows = make_rows(queue)
    if path.suffix == ".csv":
        text = _format_csv(rows)
    elif path.suffix == ".json":
        text = _format_json(queue, rows)
    else:
        raise InvalidInput(f"{path} is neither a .json nor a .csv file; name one that is")
    write_atomic(path, text)
    return len(rows)


def _format_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows with a column for each metric and each setting."""
    flat = [
        {
            **{name: value for name, value in row.items() if not isinstance(value, dict)},
            **{f"metric_{name}": value for name, value in row["metrics"].items()},
            **{f"setting_{name}": value for name, value in row["settings"].items()},
        }
        for row in rows
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in flat for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _format_json(queue: Queue, rows: Sequence[dict[str, Any]]) -> str:
    """The rows, what is selected among them and how, with a checksum."""
    notes = {name: queue.notes.get(name) for name in ("metric", "higher", "test_because", "commit", "mvngrad")}
    selected = {optimizer: record.key for optimizer, record in select_best(queue).items()}
    share = compute_share_trained(list(latest_by_key(queue.records()).values()))
    whole = {"sweep": queue.name, "made": timestamp(), **notes, "occupied": share, "selected": selected}
    return json.dumps(add_checksum({**whole, "runs": rows}), indent=1) + "\n"


def describe_status(queue: Queue) -> list[str]:
    """How far a sweep is, what failed and why, how long it will take, and whether its runs are of one code."""
    records = list(latest_by_key(queue.records()).values())
    counts = ", ".join(f"{n} {status}" for status, n in sorted(Counter(r.status for r in records).items()))
    lines = [f"{queue.name}: {counts or 'nothing is queued; run `mvngrad sweep init` again'}"]
    if (left := sum(record.status not in DONE for record in records)) and (mean := mean_seconds(records)) is not None:
        lines.append(f"{left} are left, about {format_duration(left * mean)} of one worker at {mean:.3g} s each")
    if (share := compute_share_trained(records)) is not None:
        lines.append(f"workers trained {share:.0%} of their time, each from its first run to the end of its last")
    running = [f"{record.key} ({record.worker.get('worker', '?')})" for record in records if record.status == "running"]
    lines += [f"running: {', '.join(running)}"] if running else []
    reasons = Counter(record.outcome["reason"] for record in records if "reason" in record.outcome)
    lines += [f"{count} x {reason}" for reason, count in reasons.most_common(5)]
    codes = [record.code for record in records if record.worker and record.status in DONE]
    for field in CODE:  # results of different code should not be compared
        counts_of_code = Counter(code[field] for code in codes if field in code)
        if len(counts_of_code) > 1:
            values = ", ".join(f"{value} ({count})" for value, count in counts_of_code.most_common())
            lines.append(f"warning: runs of different {field}: {values}")
    return lines


def mean_seconds(records: Sequence[Record]) -> float | None:
    """Mean duration of a run in a worker, without the first run of each, which also compiles and reads data.

    If there are only first runs, the mean of their own seconds, which exclude that; None if there is no run. Runs that
    were finished before a worker took them do not count.
    """
    first: dict[str, float] = {}
    later: list[float] = []
    done = [record for record in records if record.status in DONE and "worker_seconds" in record.outcome]
    for record in sorted(done, key=lambda record: str(record.outcome.get("began"))):
        worker, outcome = record.worker.get("worker", "?"), record.outcome
        if worker in first:
            later.append(outcome["worker_seconds"])
        elif "code" not in outcome:
            first[worker] = outcome.get("seconds", outcome["worker_seconds"])
    return statistics.fmean(later or first.values()) if first else None


def describe_progress(records: Sequence[Record]) -> str:
    """How many runs are done of all that are queued, and how long the rest takes at the pace of those so far.

    As many workers share the rest as are running now, and the one that asks.
    """
    latest = list(latest_by_key(records).values())
    left = [record for record in latest if record.status not in DONE]
    text = f"{len(latest) - len(left)} of {len(latest)} done"
    mean = mean_seconds(latest)
    if not left or mean is None:
        return text
    workers = 1 + sum(record.status == "running" for record in left)
    rounds = math.ceil(len(left) / workers)
    return f"{text}, about {format_duration(rounds * mean)} left" + (f" with {workers} workers" if workers > 1 else "")


def varied_settings(records: Sequence[Record]) -> list[str]:
    """The settings in which runs differ, apart from the optimizer and the seed."""
    names = dict.fromkeys(name for record in records for name in record.settings if name not in ("optimizer", "seed"))
    return [name for name in names if len({json.dumps(record.settings.get(name)) for record in records}) > 1]


def describe_settings(record: Record, records: Sequence[Record]) -> str:
    """The optimizer of a run and what differs among the runs of that optimizer, such as `adam, lr 0.001, seed 1`."""
    mine = [other for other in records if other.optimizer == record.optimizer]
    seed = ["seed"] if len({other.settings.get("seed") for other in mine}) > 1 else []
    return ", ".join([record.optimizer, *_list_settings(record, [*varied_settings(mine), *seed])])


def describe_edges(record: Record, swept: Sequence[Record]) -> list[str]:
    """The numbers of a selected configuration that are the least or the largest of those tried with its optimizer.

    0 is not an edge below: most settings cannot be less.
    """
    lines = []
    mine = [other for other in swept if other.optimizer == record.optimizer]
    for name in varied_settings(mine):
        value = record.settings.get(name)
        tried = [other.settings.get(name) for other in mine]
        numbers = sorted({each for each in tried if isinstance(each, int | float) and not isinstance(each, bool)})
        if value not in numbers or len(numbers) < 2 or value not in (numbers[0], numbers[-1]) or value == 0:
            continue
        end, more = ("least", "smaller") if value == numbers[0] else ("largest", "larger")
        lines.append(
            f"  {name} {value} is at the edge of the grid, the {end} of {', '.join(map(str, numbers))}: a {more} one "
            "may be better"
        )
    return lines


def compute_share_trained(records: Sequence[Record]) -> float | None:
    """The share of their time in which workers trained; their devices were nearly idle in the rest.

    None if no worker has had two runs. A run's seconds are those of training, without compilation and the engine. Runs
    that were finished before a worker took them do not count.
    """
    runs = defaultdict[str, list[tuple[float, float, float]]](list)
    for record in records:
        outcome = record.outcome
        if {"began", "worker_seconds", "seconds"} <= outcome.keys() and "code" not in outcome:
            start, length = datetime.fromisoformat(outcome["began"]).timestamp(), outcome["worker_seconds"]
            trained = min(outcome["seconds"], length)  # an earlier worker may have trained a part of it
            runs[record.worker.get("worker", "?")].append((start, start + length, trained))
    spans = [zip(*mine, strict=True) for mine in runs.values() if len(mine) > 1]
    times = [(max(ends) - min(starts), sum(trained)) for starts, ends, trained in spans]
    whole = sum(span for span, _ in times)
    return sum(trained for _, trained in times) / whole if whole else None


def describe_selection(queue: Queue) -> list[str]:
    """The selected configuration of each optimizer, with mean and deviation over its seeds.

    Seeds that diverged have no value and are not in the mean: their number is next to it.
    """
    notes = queue.notes
    swept, repeated, others = get_runs(queue)
    done = sum(record.status in DONE for record in swept)
    lines = [
        f"by {notes['metric']}, {'highest' if notes['higher'] else 'lowest'}; {done} of {len(swept)} runs are done"
    ]
    if notes["test_because"]:
        lines.append(f"which is of test data, because {notes['test_because']}")
    if others:
        lines.append(f"{len(others)} more in the store are not in the grid any more; nothing is chosen among them")
    varied = varied_settings(swept)
    selected = select_best(queue)
    for optimizer, record in sorted(selected.items()):
        shown = _list_settings(record, varied)
        configuration, everything = get_settings_without_seed(record.settings), (*swept, *repeated, *others)
        same = [other for other in everything if get_settings_without_seed(other.settings) == configuration]
        seeds = [record, *(other for other in same if other.key != record.key)]
        lines.append(f"{optimizer}: {_describe_seeds(seeds)}" + (f"  ({', '.join(shown)})" if shown else ""))
        lines += describe_edges(record, swept)
    missing = {record.optimizer for record in swept} - selected.keys()
    return lines + [f"{optimizer}: no configuration has a result with every seed" for optimizer in sorted(missing)]


def _describe_seeds(seeds: Sequence[Record]) -> str:
    """Mean and deviation of the runs of one configuration that have a value, and how many failed or are to come."""
    values = [seed.value for seed in seeds if seed.value is not None]
    deviation = f" ± {statistics.stdev(values):.4g} over {len(values)} seeds" if len(values) > 1 else ""
    counts = Counter(seed.status for seed in seeds)
    parts = [f"{counts[status]} of {len(seeds)} {status}" for status in FAILED if counts[status]]
    if left := sum(seed.status not in DONE for seed in seeds):
        parts.append(f"{left} to come")
    return ", ".join([f"{statistics.fmean(values):.6g}{deviation}", *parts])


def _list_settings(record: Record, names: Sequence[str]) -> list[str]:
    """Name and value of those settings that are not None."""
    return [f"{name} {record.settings[name]}" for name in names if record.settings.get(name) is not None]
