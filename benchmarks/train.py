"""CIFAR-100 training: our captured loop, compiled or not, compared with a plain eager torch loop on one device.

    python -m benchmarks.train [--data FOLDER] [--batch-sizes 128 1024] [--seconds 20] [--rounds 3] [--within 500]

Every round trains each arm for its share of `--seconds`, or less if `--within` limits the total time; then the batch
sizes share the remaining time. Rewrites train-DEVICE.json and .md after each batch size, so that an interrupted run
keeps what it has.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.plain_loop import PlainLoop
from benchmarks.report import RESULTS, get_environment, markdown_table, write
from benchmarks.rounds import run_rounds
from benchmarks.targets import verdict
from mvngrad_lab.tasks.cifar100.recipe import Cifar100, paper
from mvngrad_lab.tasks.cifar100.task import Cifar100Task
from mvngrad_lab.training.step import DeviceTask, TrainingStep
from mvngrad_lab.training.task import Task
from mvngrad_lab.training.train import configure_kernels

ARMS = ("captured", "captured, compiled", "captured, deterministic", "plain")
TARGETS = {  # for one H200: the row, its figure, and the bound
    1024: [("captured, compiled", "projected_seconds", "at most", 120.0)],
    128: [
        ("captured, compiled", "projected_seconds", "at most", 210.0),
        ("captured, compiled", "ratio", "at least", 4.0),
    ],
}
INTRODUCTION = """\
Measured by `python -m benchmarks.train`. *Captured* is the loop of `mvngrad_lab.training.train`: images on the device,
and augmentation, forward, backward and MVN-Grad's fused step in one CUDA graph; *compiled* adds torch.compile for the
augmentation and the model; *deterministic* uses only kernels that give the same bits every time, not compiled. *Plain*
is the loop most people write: torchvision's transforms of the same recipe in a DataLoader's worker processes, the same
network, bfloat16 and channels_last, torch's AdamW, no graph. Images per second are medians over rounds, with the
slowest and fastest; *of plain* is the ratio of medians. *Projected* is a whole run of the recipe at that rate: for our
loop with all evaluations, timed here; for the plain loop without evaluations. *Set-up* happens once: compilation and
capture. *Memory* is the most that an arm made torch reserve on the device."""


class CapturedLoop:
    """The loop of `mvngrad_lab.training.train`, epoch by epoch."""

    def __init__(self, recipe: Cifar100, task: Task, compiled: bool) -> None:
        self.recipe, self.task, self.epoch = recipe, task, 0
        with configure_kernels(recipe, task.device):
            self.training_step = TrainingStep(recipe, DeviceTask(task, compiled), captured=task.device.type == "cuda")
            self.training_step.reset(recipe.seed)
            self.train_epoch()

    def train_epoch(self) -> int:
        """Train one epoch and return its number of images."""
        per_epoch = self.task.steps_per_epoch
        first = self.epoch % self.recipe.epochs * per_epoch
        rates = [self.recipe.learning_rate(first + at, per_epoch) for at in range(per_epoch)]
        self.training_step.set_plan({**self.task.plan_epoch(self.recipe, self.epoch), "lr": torch.tensor(rates)}, at=0)
        for _ in range(per_epoch):
            self.training_step.step()
        self.epoch += 1
        self.training_step.losses.tolist()
        return per_epoch * self.recipe.batch_size

    def train(self, seconds: float) -> float:
        start, images = time.perf_counter(), 0
        with configure_kernels(self.recipe, self.task.device):
            while (passed := time.perf_counter() - start) < seconds or not images:
                images += self.train_epoch()
        return images / passed

    def evaluation_seconds(self) -> float:
        """Time evaluations and return the seconds of all evaluations of a run."""
        times = []
        for final in (False, False, True):  # the first does not count: libraries choose their kernels in it
            start = time.perf_counter()
            with torch.no_grad(), torch.autocast(self.task.device.type, torch.bfloat16):
                self.task.evaluate(self.training_step.model.eval(), final)
            times.append(time.perf_counter() - start)
        return (self.recipe.epochs - 1) // self.recipe.eval_every * times[1] + times[2]


def measure(
    recipe: Cifar100, task: Task, args: argparse.Namespace, notes: list[str], end: float = math.inf
) -> list[dict[str, Any]]:
    """A table row for each arm that can run here; the arms share the time until `end`, and none starts after it."""
    makers = {
        "captured": partial(CapturedLoop, recipe, task, compiled=False),
        "captured, compiled": partial(CapturedLoop, recipe, task, compiled=True),
        "captured, deterministic": partial(CapturedLoop, replace(recipe, deterministic=True), task, compiled=False),
        "plain": partial(PlainLoop, recipe, task, args.workers),
    }
    chosen, title = {name: makers[name] for name in args.arms}, f"{{}}, batch {recipe.batch_size}"
    running = run_rounds(chosen, task.device, title, args, notes, end)
    medians = {name: statistics.median(each.rates) for name, each in running.items()}
    images = recipe.epochs * task.steps_per_epoch * recipe.batch_size
    for name, each in running.items():
        row, arm = each.row, each.arm
        row["images_per_second"] = medians[name]
        row["images_per_second_range"] = [min(each.rates), max(each.rates)]
        row["evaluation_seconds"] = arm.evaluation_seconds() if isinstance(arm, CapturedLoop) else 0.0
        row["projected_seconds"] = images / medians[name] + row["evaluation_seconds"]
        if name == "captured, deterministic" and "captured" in medians:
            row["deterministic_cost"] = medians["captured"] / medians[name]
        if "plain" in medians:
            row["ratio"] = medians[name] / medians["plain"]
    return [each.row for each in running.values()]


def judge_targets(batch_size: int, rows: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """The targets and their verdicts, on the machine they were set for."""
    targets = []
    for name, figure, sense, bound in TARGETS.get(batch_size, []) if "H200" in device else []:
        value = next((row.get(figure) for row in rows if row["name"] == name), None)
        what = f"batch {batch_size}, {name}, {figure.replace('_', ' ')}"
        targets.append({"what": what, "target": f"{sense} {bound:g}", "value": value})
        targets[-1]["verdict"] = verdict(value, bound, sense == "at least")
    return targets


def markdown(result: dict[str, Any]) -> str:
    where = result["environment"]
    text = [f"# CIFAR-100 training on {where['device']}", INTRODUCTION]
    text.append(", ".join([*(f"{key} {value}" for key, value in where.items()), f"workers {result['workers']}"]))
    text.append(f"Data: {result['data']}.")
    if result["targets"]:
        shown = [
            [each["what"], each["target"], "" if each["value"] is None else f"{each['value']:.3g}", each["verdict"]]
            for each in result["targets"]
        ]
        text += ["## Targets", markdown_table(["what", "target", "measured", "verdict"], shown)]
    for batch_size, rows in result["batch_sizes"].items():
        body = []
        for row in rows:
            low, high = row["images_per_second_range"]
            body.append(
                [
                    row["name"],
                    f"{row['images_per_second']:.0f} ({low:.0f}-{high:.0f})",
                    f"{row['ratio']:.2f}" if "ratio" in row else "",
                    f"{row['projected_seconds']:.0f}",
                    f"{row['evaluation_seconds']:.1f}",
                    f"{row['setup_seconds']:.0f}",
                    f"{row['memory_bytes'] / 2**30:.1f}",
                ]
            )
        head = ["loop", "images/s", "of plain", "projected, s", "of these evaluating", "set-up, s", "memory, GiB"]
        text += [f"## Batch {batch_size}, {result['epochs']} epochs", markdown_table(head, body)]
        text += [
            f"Deterministic mode takes {row['deterministic_cost']:.2f} times as long as the captured loop."
            for row in rows
            if "deterministic_cost" in row
        ]
    if result["notes"]:
        text += ["## Not measured", "\n".join(f"- {note}" for note in result["notes"])]
    return "\n\n".join(text) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, help="folder with data sets")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--seconds", type=float, default=20.0, help="training time of each arm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--within", type=float, default=math.inf, help="seconds for everything but set-up and one epoch"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes of the plain loop's loader")
    parser.add_argument("--train-limit", type=int, help="use only this many images, to try it out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args(arguments)

    end = time.perf_counter() + args.within
    torch.backends.cudnn.benchmark = True
    where, notes = get_environment(args.device), list[str]()
    result: dict[str, Any] = {"environment": where, "workers": args.workers, "targets": [], "notes": notes}
    result["batch_sizes"] = {}
    for number, batch_size in enumerate(args.batch_sizes):
        now = time.perf_counter()
        part = now + (end - now) / (len(args.batch_sizes) - number)
        settings = paper("mvngrad", batch_size if batch_size in TARGETS else 1024)
        recipe = replace(settings, batch_size=batch_size, train_limit=args.train_limit)
        task = Cifar100Task(recipe, args.data, torch.device(args.device))
        rows = measure(recipe, task, args, notes, part)
        result["batch_sizes"][batch_size] = rows
        result["targets"] += judge_targets(batch_size, rows, where["device"])
        result |= {"data": task.source, "epochs": recipe.epochs}
        write(result, args.out / f"train-{args.device}", markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
