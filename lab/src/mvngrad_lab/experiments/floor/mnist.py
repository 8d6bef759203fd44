"""The dial on MNIST: test accuracy of a small network against the floor, from none to SGD, on a CPU in minutes."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar, NamedTuple

import torch

from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.experiments.floor.arms import MNIST_SEEDS, NO_FLOOR, with_floor
from mvngrad_lab.pool import count_cores, run_jobs
from mvngrad_lab.recipe import COUPLED, Recipe, has_eps_s
from mvngrad_lab.tasks.mnist import data as mnist
from mvngrad_lab.tasks.mnist.recipe import Mnist
from mvngrad_lab.training.queue import measure_gradient
from mvngrad_lab.training.step import get_training_step

SGD = "sgd"
"""Name of the four cells at the last floor, where they are one."""


@dataclasses.dataclass(frozen=True)
class MnistDial(Recipe):
    """The floors and the rates tried at each; a higher floor needs a higher rate."""

    name: ClassVar[str] = "floor-mnist"
    data: str = "mnist"
    epochs: int = 3
    betas: tuple[float, float] = (0.9, 0.99)
    seeds: tuple[int, ...] = MNIST_SEEDS
    floors: tuple[tuple[float, tuple[float, ...]], ...] = (
        (0.0, (3e-4, 1e-3, 3e-3, 1e-2)),
        (1e-5, (3e-4, 1e-3, 3e-3, 1e-2)),
        (1e-4, (3e-4, 1e-3, 3e-3, 1e-2)),
        (1e-3, (1e-3, 3e-3, 1e-2, 3e-2)),
        (1e-2, (3e-3, 1e-2, 3e-2, 1e-1)),
        (1e-1, (1e-2, 3e-2, 1e-1, 3e-1)),
        (1.0, (0.1, 0.3, 1.0, 3.0)),
    )


class Job(NamedTuple):
    cell: str
    floor: float
    lr: float
    seed: int
    eps: bool = False
    """The floor is eps, also in a cell that has eps_s."""


def make_recipe(quick: bool, data: Path | None) -> MnistDial:
    complete = mnist.find_digits(data) == "mnist" and not quick
    recipe = MnistDial() if complete else MnistDial("mnist-5k", epochs=10)
    some = tuple((floor, rates[1:3]) for floor, rates in recipe.floors if floor in (0.0, 1e-2, 1.0))
    return dataclasses.replace(recipe, epochs=2, seeds=MNIST_SEEDS[:2], floors=some) if quick else recipe


def make_jobs(recipe: MnistDial) -> list[Job]:
    """Every network to train; at a floor of 1 all four cells are SGD, so that one of them is trained."""
    return [
        Job(cell, floor, lr, seed)
        for floor, rates in recipe.floors
        for cell in (COUPLED if floor < 1 else (SGD,))
        for lr, seed in product(rates, recipe.seeds)
    ]


def train(job: Job, recipe: MnistDial, data: Path | None) -> dict[str, Any]:
    """Train one network; returns its accuracies, and the root mean square of the last gradient of each epoch."""
    cell: Any = "mvngrad" if job.cell == SGD else job.cell
    beta1, beta2 = recipe.betas
    base = Mnist(
        optimizer=cell, lr=job.lr, beta1=beta1, beta2=beta2, seed=job.seed, digits=recipe.data,  # type: ignore[arg-type]
        epochs=recipe.epochs, **NO_FLOOR[has_eps_s(cell)],  # type: ignore[arg-type]
    )  # fmt: skip
    if job.eps:
        settings = dataclasses.replace(base, eps=job.floor)
    else:
        settings = with_floor(base, job.floor) if job.floor else base
    sizes: list[float | None] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at a floor of 1 gradients are hardly normalized: that is meant
        training_step = get_training_step(settings, data, torch.device("cpu"), compiled=False, captured=False)
    steps = training_step.run(settings)
    for _ in range(recipe.epochs):
        for _ in islice(steps, training_step.task.steps_per_epoch):
            pass
        sizes.append(measure_gradient(training_step))
    with torch.no_grad():
        metrics = training_step.task.evaluate(training_step.model, final=True)
    return {name: metrics[f"{name}_accuracy"] for name in ("validation", "test")} | {"sizes": sizes}


def train_jobs(jobs: Sequence[Job], recipe: MnistDial, data: Path | None, tick: Tick) -> dict[Job, dict[str, Any]]:
    """What `train` returns for each job, on all cores."""
    results = dict[Job, dict[str, Any]]()
    for job, row in run_jobs(partial(train, recipe=recipe, data=data), jobs, count_cores(), torch.set_num_threads, 1):
        results[job] = row
        tick(len(results) / len(jobs))
    return results


def run(recipe: MnistDial, data: Path | None, tick: Tick) -> dict[str, Any]:
    jobs = make_jobs(recipe)
    results = train_jobs(jobs, recipe, data, tick)
    cells: dict[str, dict[str, Any]] = {cell: {} for cell in (*COUPLED, SGD)}
    for floor, rates in recipe.floors:
        for cell in COUPLED if floor < 1 else (SGD,):
            tried = {lr: [results[Job(cell, floor, lr, seed)] for seed in recipe.seeds] for lr in rates}
            means = {lr: fmean(row["validation"] for row in rows) for lr, rows in tried.items()}
            lr = max(means, key=means.__getitem__)
            test = [row["test"] for row in tried[lr]]
            cells[cell][f"{floor:g}"] = {
                "best": fmean(test), "test": test, "validation": means, "lr": lr, "done": len(rates), "of": len(rates),
            }  # fmt: skip
    sizes = [size for job, row in results.items() if job.floor == 0 for size in row["sizes"] if size is not None]
    source = mnist.load_named(recipe.data, data).source
    size = median(sizes)
    return to_json(data=source, seeds=recipe.seeds, cells=cells, gradient_rms=size, networks=len(jobs))
