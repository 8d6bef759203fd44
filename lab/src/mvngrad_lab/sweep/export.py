"""Every run of a sweep as a file, and the sweep's state as text."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from mvngrad_lab.store import timestamp, write_atomic
from mvngrad_lab.sweep.budget import duration
from mvngrad_lab.sweep.plan import results, select
from mvngrad_lab.sweep.queue import Queue
from mvngrad_lab.sweep.records import SETTLED, Record, by_key
from mvngrad_lab.sweep.worker import CODE


def rows(queue: Queue) -> list[dict[str, Any]]:
    """One for each configuration, in the order of the queue: what was run, what came of it, where and by which code."""
    return [
        {
            "key": record.key,
            "stage": record.stage,
            "optimizer": record.settings.get("optimizer"),
            "status": record.status,
            "value": record.value,
            "settings": record.settings,
            "metrics": {
                name: value for name, value in record.outcome.items() if name not in ("status", "trace", "code")
            },
            "seconds": record.outcome.get("seconds", record.outcome.get("worker_seconds")),
            "reason": record.outcome.get("reason"),
            **{name: record.code.get(name) for name in ("worker", *CODE)},
        }
        for record in sorted(by_key(queue.records()).values(), key=lambda record: record.number)
    ]


def export(queue: Queue, path: Path) -> int:
    """Write all runs to a .json or .csv file, whole or not at all; how many."""
    found = rows(queue)
    if path.suffix == ".csv":
        flat = [
            {
                **{name: value for name, value in row.items() if not isinstance(value, dict)},
                **{f"metric_{name}": value for name, value in row["metrics"].items()},
                **{f"setting_{name}": value for name, value in row["settings"].items()},
            }
            for row in found
        ]
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(name for row in flat for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        write_atomic(path, text.getvalue())
    elif path.suffix == ".json":
        notes = {name: queue.notes.get(name) for name in ("metric", "higher", "test_because", "commit", "mvngrad")}
        selected = {who: record.key for who, record in select(queue).items()}
        share = occupied(list(by_key(queue.records()).values()))
        whole = {
            "sweep": queue.name,
            "made": timestamp(),
            **notes,
            "occupied": share,
            "selected": selected,
            "runs": found,
        }
        write_atomic(path, json.dumps(whole, indent=1) + "\n")
    else:
        raise ValueError(f"{path} is neither a .json nor a .csv file")
    return len(found)


def status(queue: Queue) -> list[str]:
    """How far a sweep is, what failed and why, what it will take, and whether its runs are of one code."""
    everything = list(by_key(queue.records()).values())
    counts = ", ".join(f"{n} {status}" for status, n in sorted(Counter(r.status for r in everything).items()))
    lines = [f"{queue.name}: {counts or 'nothing is queued; run `mvngrad sweep init` again'}"]
    times = [record.outcome["seconds"] for record in everything if "seconds" in record.outcome]
    left = sum(record.status not in SETTLED for record in everything)
    if times and left:
        each = statistics.fmean(times)
        lines.append(f"{left} are left, about {duration(left * each)} of one worker at {each:.3g} s each")
    if (share := occupied(everything)) is not None:
        lines.append(f"workers trained {share:.0%} of their time, each from its first run to the end of its last")
    running = [
        f"{record.key} ({record.worker.get('worker', '?')})" for record in everything if record.status == "running"
    ]
    lines += [f"running: {', '.join(running)}"] if running else []
    failures = Counter(record.outcome["reason"] for record in everything if "reason" in record.outcome)
    lines += [f"{count} x {reason}" for reason, count in failures.most_common(5)]
    return lines + mixed(everything)


def occupied(records: Sequence[Record]) -> float | None:
    """The share of their time in which workers trained; in the rest their devices had little to do. None if no worker
    has had two runs. A run's seconds are those of training, without compilation and what the engine adds; such as were
    found finished are nobody's here.
    """
    runs = defaultdict[str, list[tuple[float, float, float]]](list)
    for record in records:
        if {"began", "worker_seconds", "seconds"} <= record.outcome.keys() and "code" not in record.outcome:
            start, length = (
                datetime.fromisoformat(record.outcome["began"]).timestamp(),
                record.outcome["worker_seconds"],
            )
            trained = min(record.outcome["seconds"], length)  # what others trained of it before is theirs
            runs[record.worker.get("worker", "?")].append((start, start + length, trained))
    spans = [
        (max(end for _, end, _ in mine) - min(start for start, _, _ in mine), sum(trained for _, _, trained in mine))
        for mine in runs.values()
        if len(mine) > 1
    ]
    whole = sum(span for span, _ in spans)
    return sum(trained for _, trained in spans) / whole if whole else None


def mixed(records: Sequence[Record]) -> list[str]:
    """Where runs are of different code: they should not be compared."""
    lines = []
    for field in CODE:
        counts = Counter(record.code[field] for record in records if record.worker and record.status in SETTLED)
        if len(counts) > 1:
            found = ", ".join(f"{value} ({count})" for value, count in counts.most_common())
            lines.append(f"warning: runs of different {field}: {found}")
    return lines


def selection(queue: Queue) -> list[str]:
    """The selected configuration of each optimizer, with the mean and deviation over its seeds where there are some.

    A seed that diverged has no value, so that the mean is of the others: how many did is said beside it.
    """
    notes = queue.notes
    swept, repeated, others = results(queue)
    done = sum(record.status in SETTLED for record in swept)
    lines = [
        f"by {notes['metric']}, {'highest' if notes['higher'] else 'lowest'}; {done} of {len(swept)} runs are done"
    ]
    if notes["test_because"]:
        lines.append(f"which is of test data, because {notes['test_because']}")
    if others:
        lines.append(f"{len(others)} more in the store are not in the grid any more; nothing is chosen among them")
    varied, selected = _varied(swept), select(queue)
    for who, record in sorted(selected.items()):
        settings = ", ".join(f"{name} {record.settings[name]}" for name in varied if record.settings[name] is not None)
        seeds = [record, *(other for other in repeated if _seedless(other) == _seedless(record))]
        known = [seed.value for seed in seeds if seed.value is not None]
        over = [f" ± {statistics.stdev(known):.4g} over {len(known)} seeds"] if len(known) > 1 else [""]
        counts = Counter(seed.status for seed in seeds)
        over += [f"{counts[end]} of {len(seeds)} {end}" for end in ("diverged", "raised") if counts[end]]
        to_come = sum(seed.status not in SETTLED for seed in seeds)
        over += [f"{to_come} to come"] if to_come else []
        lines.append(f"{who}: {statistics.fmean(known):.6g}{', '.join(over)}  ({settings})")
    missing = {record.contestant for record in swept} - selected.keys()
    return lines + [f"{who}: no run has a result" for who in sorted(missing)]


def _seedless(record: Record) -> dict[str, Any]:
    return {name: value for name, value in record.settings.items() if name != "seed"}


def _varied(records: list[Record]) -> list[str]:
    names = [name for name in (records[0].settings if records else {}) if name not in ("optimizer", "seed")]
    return [name for name in names if len({json.dumps(record.settings.get(name)) for record in records}) > 1]
