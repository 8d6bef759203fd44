"""Train queues of this experiment, each run once, and stop before a deadline.

    python -m mvngrad_lab.experiments.floor.run table dial --run-seconds 112 18 --device cuda --stop-after 540

Runs that the store or results/ has are skipped, so the same command continues a queue that was cut. The command
`export` writes what is finished to results/, a file for each queue.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from mvngrad_lab import store
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.experiments import OnEvent, Tick
from mvngrad_lab.experiments.floor import arms
from mvngrad_lab.experiments.floor.records import get_file_name, read_accuracies
from mvngrad_lab.training.queue import add_rows, make_row, read_finished, run_command, train_queue
from mvngrad_lab.training.train import require_gpu

FIELDS = tuple(field.name for field in dataclasses.fields(store.FinishedRun))


def train_all(root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
    """Train all queues, each after those whose results it needs."""
    require_gpu("floor", "trains some 440 networks")
    for number, name in enumerate(arms.QUEUES, start=1):
        accuracies = read_accuracies(root, store.RESULTS)
        train_queue(
            arms.make_queue(name, accuracies), root, finished=accuracies, stop_after=math.inf, run_seconds=0,
            on_event=on_event, data=data, device="cuda", compile=True,
        )  # fmt: skip
        tick(number / len(arms.QUEUES))


def export(finished: Path, results: Path) -> dict[str, int]:
    """Write the runs among the lines of `finished` to results/floor-QUEUE.json, after those that the files have.

    A run of several queues is in the file of the first. Returns how many runs each file has.

    Raises:
        ValueError: a run belongs to no queue, or to one that depends on a grid that is not complete.
    """
    lines, counts = read_finished(finished), {}
    accuracies = read_accuracies(results) | {
        key: line["result"].get("test_accuracy", 0.0) for key, line in lines.items()
    }
    for name in arms.QUEUES:
        try:
            order = [recipe.key for recipe in arms.make_queue(name, accuracies)]
        except InvalidInput:  # it depends on a grid that is not complete
            continue
        if new := {key: make_row(lines[key]) for key in order if key in lines}:
            if name.startswith("as-published"):  # Table 1 has these too
                runs = [_make_run(lines[key]) for key in new]
                store.write_bundle(results / store.BUNDLE, runs)
            lines = {key: line for key, line in lines.items() if key not in new}
            path = results / get_file_name(name)
            left = sum(key not in accuracies for key in order)
            counts[path.name] = add_rows(path, {"experiment": "floor", "queue": name, "left": left}, new, order)
    if lines:
        raise InvalidInput(f"{len(lines)} runs in {finished} belong to no queue, the first is {next(iter(lines))}")
    return counts


def _make_run(line: dict[str, Any]) -> store.FinishedRun:
    """The run of a line, with its time."""
    fields = {field: line[field] for field in FIELDS}
    return store.FinishedRun(**{**fields, "environment": {**line["environment"], "ended": line["ended"]}})


def main() -> None:
    run_command(__doc__, arms.QUEUES, read_accuracies, arms.make_queue, export)


if __name__ == "__main__":
    main()
