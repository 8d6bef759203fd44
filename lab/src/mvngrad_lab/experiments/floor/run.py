"""Train a queue of this experiment, each run once, and stop before a deadline.

    python -m mvngrad_lab.experiments.floor.run grid --runs runs --device cuda --stop-after 540

Runs that the store or results/ has are skipped, so the same command continues a queue that was cut. The command
`export` writes what is finished to results/, a file for each queue.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mvngrad_lab import store
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.experiments import OnEvent, Tick
from mvngrad_lab.experiments.floor import arms
from mvngrad_lab.experiments.floor.records import get_file_name, read_accuracies
from mvngrad_lab.recipe import TrainingRecipe
from mvngrad_lab.store.metrics import read_rows
from mvngrad_lab.training import checkpoint
from mvngrad_lab.training.events import Event
from mvngrad_lab.training.step import TrainingStep
from mvngrad_lab.training.train import require_gpu, train

FINISHED = "finished.jsonl"
"""In the store: one line for each run as it ends, with its curve and the time. All that is worth keeping of a run."""


def train_queue(
    queue: Sequence[TrainingRecipe],
    root: Path,
    *,
    finished: Mapping[str, Any],
    stop_after: float,
    run_seconds: float,
    on_event: Callable[[Event], Any] = lambda event: None,
    **options: Any,
) -> int:
    """Train what is not `finished`, until no run of `run_seconds` fits before `stop_after` seconds; how many are left.

    `options` are those of `train`.
    """
    deadline = time.monotonic() + stop_after
    waiting = [recipe for recipe in queue if recipe.key not in finished and store.RunFolder(recipe, root).run is None]
    while waiting and time.monotonic() + run_seconds <= deadline:
        recipe, sizes = waiting.pop(0), dict[int, float]()
        run = train(recipe, root=root, on_event=on_event, observe=partial(measure_gradient, sizes), **options)
        folder = root / recipe.key
        curve = [
            {name: value for name, value in row.items() if not isinstance(value, list)}  # no number of every step
            | {"gradient_rms": sizes.get(row["epoch"])}
            for row in read_rows(folder / "metrics.jsonl")
        ]
        with (root / FINISHED).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**vars(run), "ended": store.timestamp(), "curve": curve}) + "\n")
        shutil.rmtree(folder / checkpoint.FOLDER, ignore_errors=True)
        print(store.timestamp(), len(waiting), "left", recipe.key, _summary(run), flush=True)
    return len(waiting)


def measure_gradient(sizes: dict[int, float], epoch: int, training_step: TrainingStep) -> None:
    """Store the root mean square of the last step's gradient, without weight decay, under the epoch's number."""
    gradients = [p.grad for p in training_step.model.parameters() if p.grad is not None]
    if gradients:
        total = torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().item()
        sizes[epoch] = math.sqrt(total / sum(gradient.numel() for gradient in gradients))


def train_all(root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
    """Train all queues, each after those whose results it needs."""
    require_gpu("floor", "trains some 250 networks")
    for number, name in enumerate(arms.QUEUES, start=1):
        accuracies = read_accuracies(root, store.RESULTS)
        train_queue(
            arms.make_queue(name, accuracies), root, finished=accuracies, stop_after=math.inf, run_seconds=0,
            on_event=on_event, data=data, device="cuda", compile=True,
        )  # fmt: skip
        tick(number / len(arms.QUEUES))


def _summary(run: store.FinishedRun) -> str:
    names = ("optimizer", "beta1", "beta2", "lr", "eps", "eps_s", "weight_decay", "beta_mean", "seed")
    settings = [f"{name}={run.recipe[name]}" for name in names if run.recipe[name] is not None]
    value = run.result.get("test_accuracy", run.result.get("validation_loss"))
    return " ".join([*settings, run.result["status"], f"{value}, {run.result['seconds']:.1f} s"])


def export(finished: Path, results: Path) -> dict[str, int]:
    """Write the runs among the lines of `finished` to results/floor-QUEUE.json, after those that the files have.

    A run of several queues is in the file of the first. Returns how many runs each file has.

    Raises:
        ValueError: a run belongs to no queue, or to one that depends on a grid that is not complete.
    """
    lines = {line["key"]: line for line in map(json.loads, finished.read_text(encoding="utf-8").splitlines())}
    accuracies = read_accuracies(results) | {
        key: line["result"].get("test_accuracy", 0.0) for key, line in lines.items()
    }
    counts = {}
    for name in arms.QUEUES:
        try:
            order = [recipe.key for recipe in arms.make_queue(name, accuracies)]
        except InvalidInput:  # it depends on a grid that is not complete
            continue
        path = results / get_file_name(name)
        before = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
        rows = {row["key"]: row for row in before}
        if new := {key: _make_row(lines.pop(key)) for key in order if key in lines}:
            rows |= new
            ordered = [rows[key] for key in dict.fromkeys((*order, *rows)) if key in rows]
            left = sum(key not in accuracies for key in order)
            whole = {"experiment": "floor", "queue": name, "made": store.timestamp(), "left": left}
            head = json.dumps(whole, indent=1).removesuffix("\n}")
            body = ",\n".join(json.dumps(row) for row in ordered)  # one line for each run
            store.write_atomic(path, f'{head},\n "runs": [\n{body}\n]\n}}\n')
            counts[path.name] = len(ordered)
    if lines:
        raise InvalidInput(f"{len(lines)} runs in {finished} belong to no queue, the first is {next(iter(lines))}")
    return counts


def _make_row(line: dict[str, Any]) -> dict[str, Any]:
    """What results/ keeps of a run: all but the numbers of every step."""
    return {
        "key": line["key"],
        "status": line["result"]["status"],
        "settings": line["recipe"],
        "metrics": {name: value for name, value in line["result"].items() if name != "status"},
        "curve": [row for row in line["curve"] if any(name.endswith("_loss") for name in row)],
        "losses": [row["loss"] and round(row["loss"], 4) for row in line["curve"]],
        "gradient_rms": [row.get("gradient_rms") for row in line["curve"]],
        "ended": line["ended"],
        **line["environment"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queue", choices=(*arms.QUEUES, "export"))
    parser.add_argument("--runs", type=Path, default=store.ROOT, help="the store")
    parser.add_argument("--results", type=Path, default=store.RESULTS, help="results of earlier runs")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds")
    parser.add_argument("--run-seconds", type=float, default=20.0, help="how long one run takes at most")
    args = parser.parse_args()
    if args.queue == "export":
        for name, count in export(args.runs / FINISHED, args.results).items():
            print(count, "runs in", args.results / name)
        return
    accuracies = read_accuracies(args.runs, args.results)
    left = train_queue(
        arms.make_queue(args.queue, accuracies), args.runs, finished=accuracies, stop_after=args.stop_after,
        run_seconds=args.run_seconds, data=args.data, device=args.device, compile=args.device != "cpu",
    )  # fmt: skip
    print(left, "runs of", args.queue, "are left", flush=True)


if __name__ == "__main__":
    main()
