"""Train a queue of this experiment, each run once, and stop before a deadline.

    python -m mvngrad_lab.experiments.state_precision.run images --runs runs --device cuda --stop-after 540

Runs that the store or results/ has are skipped, so the same command continues a queue that was cut. The queue `adamw`
needs torchao and bitsandbytes, and leaves out what cannot be imported. The command `export` writes what is finished to
results/state-precision-QUEUE.json. `mvngrad reproduce state-precision` trains the runs of 200 epochs instead.
"""

from __future__ import annotations

from pathlib import Path

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.experiments import OnEvent, Tick
from mvngrad_lab.experiments.state_precision import arms
from mvngrad_lab.experiments.state_precision.records import read_runs, state_precision
from mvngrad_lab.recipe import TrainingRecipe
from mvngrad_lab.training.optimizers import import_module_of
from mvngrad_lab.training.queue import ExportSummary, Queues, export_queues, read_finished, run_command
from mvngrad_lab.training.train import require_gpu, train_missing


def train_all(root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
    """Train what is not stored; the runs with float32 state belong to Table 1."""
    require_gpu("state-precision", "trains 6 networks for 200 epochs each")
    recipes = [recipe for recipe in state_precision() if recipe.state_dtype != "float32"]
    train_missing(recipes, root, data, tick, on_event)


def find_trainable(name: str) -> list[TrainingRecipe]:
    """The recipes of a queue without those of peers that cannot be imported; prints why."""
    missing = {} if name == "images" else {each: why for each in arms.PEERS.values() if (why := _find_obstacle(each))}
    for why in missing.values():
        print(why, flush=True)
    return [recipe for recipe in arms.make_queue(name).values() if arms.drop_code(recipe.optimizer) not in missing]


def _find_obstacle(optimizer: str) -> str:
    """Why the module of an optimizer cannot be imported; "" if it has been."""
    try:
        import_module_of(optimizer)
    except InvalidInput as error:
        return str(error)
    return ""


def export(finished: Path, results: Path) -> ExportSummary:
    """Add the runs of `finished` to results/state-precision-QUEUE.json."""
    lines = read_finished(finished)
    settings = {key: line["recipe"] for key, line in lines.items()}

    def find_keys(name: str) -> list[str]:
        return [key for recipe in arms.make_queue(name).values() if (key := arms.find_key(recipe, settings))]

    return export_queues(lines, results, "state-precision", arms.QUEUES, find_keys)


def main() -> None:
    run_command(__doc__, Queues(arms.QUEUES, read_runs, lambda name, runs: find_trainable(name)), export)


if __name__ == "__main__":
    main()
