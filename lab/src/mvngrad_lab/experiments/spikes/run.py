"""Train with injected bad batches, each run once, and stop before a deadline.

    python -m mvngrad_lab.experiments.spikes.run images --runs runs --device cuda --stop-after 540

Runs that the store or results/ has are skipped, so the same command continues a queue that was cut. The command
`export` writes what is finished to results/spikes-QUEUE.json.
"""

from __future__ import annotations

from pathlib import Path

from mvngrad_lab.experiments import OnEvent, Tick
from mvngrad_lab.experiments.spikes import recipes
from mvngrad_lab.experiments.spikes.records import read_runs
from mvngrad_lab.experiments.spikes.tasks import get_task
from mvngrad_lab.training.queue import ExportSummary, Queues, export_queues, read_finished, run_command, train_queues
from mvngrad_lab.training.train import require_gpu

QUEUES = Queues(
    recipes.QUEUES, read_runs, recipes.make_queue, lambda name: {"every_step": True, "task": get_task(name)}
)


def train_all(root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
    require_gpu("spikes", "trains some 610 networks")
    train_queues(QUEUES, root, data, tick, on_event)


def export(finished: Path, results: Path) -> ExportSummary:
    """Add the runs of `finished` to results/spikes-QUEUE.json."""
    lines = read_finished(finished)
    runs = {**read_runs(results), **{key: line["result"] for key, line in lines.items()}}

    def find_keys(name: str) -> list[str]:
        return [recipe.key for recipe in recipes.make_queue(name, runs)]

    return export_queues(lines, results, "spikes", recipes.QUEUES, find_keys)


def main() -> None:
    run_command(__doc__, QUEUES, export)


if __name__ == "__main__":
    main()
