"""Train queues of this experiment, each run once, and stop before a deadline.

    python -m mvngrad_lab.experiments.floor.run table dial --run-seconds 112 18 --device cuda --stop-after 540

Runs that the store or results/ has are skipped, so the same command continues a queue that was cut. The command
`export` writes what is finished to results/, a file for each queue.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mvngrad_lab import store
from mvngrad_lab.experiments import OnEvent, Tick
from mvngrad_lab.experiments.floor import arms
from mvngrad_lab.experiments.floor.records import read_accuracies
from mvngrad_lab.training.queue import ExportSummary, Queues, export_queues, read_finished, run_command, train_queues
from mvngrad_lab.training.train import require_gpu

QUEUES = Queues(arms.QUEUES, read_accuracies, arms.make_queue)
FIELDS = tuple(field.name for field in dataclasses.fields(store.FinishedRun))


def train_all(root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
    require_gpu("floor", "trains some 460 networks")
    train_queues(QUEUES, root, data, tick, on_event)


def export(finished: Path, results: Path) -> ExportSummary:
    """Add the runs of `finished` to results/floor-QUEUE.json, and those of Table 1 to the bundle too."""
    lines = read_finished(finished)
    accuracies = read_accuracies(results) | {
        key: line["result"].get("test_accuracy", 0.0) for key, line in lines.items()
    }

    def find_keys(name: str) -> list[str]:
        return [recipe.key for recipe in arms.make_queue(name, accuracies)]

    published = [*find_keys("as-published"), *find_keys("as-published-more")]
    if runs := [_make_run(lines[key]) for key in published if key in lines]:
        store.write_bundle(results / store.BUNDLE, runs)
    return export_queues(lines, results, "floor", arms.QUEUES, find_keys)


def _make_run(line: dict[str, Any]) -> store.FinishedRun:
    """The run of a line, with its time."""
    fields = {field: line[field] for field in FIELDS}
    return store.FinishedRun(**{**fields, "environment": {**line["environment"], "ended": line["ended"]}})


def main() -> None:
    run_command(__doc__, QUEUES, export)


if __name__ == "__main__":
    main()
