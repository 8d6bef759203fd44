"""Train with injected bad batches, each run once, and stop before a deadline.

    python -m mvngrad_lab.experiments.spikes.run images --runs runs --device cuda --stop-after 540

Runs that the store or results/ has are skipped, so the same command continues a queue that was cut. The command
`export` writes what is finished to results/spikes-QUEUE.json.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mvngrad_lab import store
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.experiments import OnEvent, Tick
from mvngrad_lab.experiments.spikes import recipes
from mvngrad_lab.experiments.spikes.records import get_file_name, read_runs
from mvngrad_lab.experiments.spikes.tasks import get_task
from mvngrad_lab.training.queue import add_rows, make_row, read_finished, run_command, train_queue
from mvngrad_lab.training.train import require_gpu


def train_all(root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
    """Train all queues, each after that of its rates."""
    require_gpu("spikes", "trains some 550 networks")
    for number, name in enumerate(recipes.QUEUES, start=1):
        finished = read_runs(root, store.RESULTS)
        train_queue(
            recipes.make_queue(name, finished), root, finished=finished, stop_after=math.inf, run_seconds=0,
            every_step=True, on_event=on_event, data=data, device="cuda", compile=True, task=get_task(name),
        )  # fmt: skip
        tick(number / len(recipes.QUEUES))


def export(finished: Path, results: Path) -> dict[str, int]:
    """Add the runs among the lines of `finished` to results/spikes-QUEUE.json; returns how many each file has."""
    lines, counts = read_finished(finished), {}
    runs = {**read_runs(results), **{key: line["result"] for key, line in lines.items()}}
    for name in recipes.QUEUES:
        try:
            order = [recipe.key for recipe in recipes.make_queue(name, runs)]
        except InvalidInput:  # the best rates are not known yet
            continue
        if new := {key: make_row(lines[key]) for key in order if key in lines}:
            path = results / get_file_name(name)
            counts[path.name] = add_rows(path, {"experiment": "spikes", "queue": name}, new, order)
    return counts


def main() -> None:
    def get_options(queue: str) -> dict[str, Any]:
        return {"every_step": True, "task": get_task(queue)}

    run_command(__doc__, recipes.QUEUES, read_runs, recipes.make_queue, export, get_options)


if __name__ == "__main__":
    main()
