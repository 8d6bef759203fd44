"""The eight arms, two more and SGD on 5,000 digits, with a hundred seeds, on a CPU in minutes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.experiments.floor.arms import EPS_ARMS, MNIST_TABLE_SEEDS
from mvngrad_lab.experiments.floor.mnist import SGD, Job, MnistDial, make_jobs, train_jobs
from mvngrad_lab.tasks.mnist import data as mnist


@dataclasses.dataclass(frozen=True)
class MnistTable(MnistDial):
    """Three floors: none, 1e-2, and SGD's. `tuning_seeds` select the rate of each arm, `seeds` are judged."""

    name: ClassVar[str] = "floor-mnist-table"
    data: str = "mnist-5k"
    epochs: int = 10
    tuning_seeds: tuple[int, ...] = tuple(range(11, 21))
    seeds: tuple[int, ...] = MNIST_TABLE_SEEDS
    floors: tuple[tuple[float, tuple[float, ...]], ...] = (
        (0.0, (1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 2e-2)),
        (1e-2, (5e-3, 1e-2, 1.5e-2, 2.5e-2, 5e-2, 1e-1)),
        (1.0, (0.2, 0.4, 0.6, 1.0, 2.0, 4.0)),
    )


def make_recipe(quick: bool, data: Path | None) -> MnistTable:
    recipe = MnistTable()
    return dataclasses.replace(recipe, epochs=2, tuning_seeds=(11,), seeds=MNIST_TABLE_SEEDS[:3]) if quick else recipe


def name_arm(job: Job) -> str:
    """Its name in `arms.GRID_ARMS`, SGD, or in EPS_ARMS."""
    return SGD if job.cell == SGD else f"{job.cell}-{'eps' if job.eps else 'floor' if job.floor else 'none'}"


def run(recipe: MnistTable, data: Path | None, tick: Tick) -> dict[str, Any]:
    """Train every rate with the tuning seeds, then each arm with the others at its best rate by validation accuracy."""
    tuning = make_jobs(dataclasses.replace(recipe, seeds=recipe.tuning_seeds))
    tuning += [job._replace(eps=True) for job in tuning if name_arm(job._replace(eps=True)) in EPS_ARMS and job.floor]
    some = {name_arm(job): job for job in tuning}
    share = len(tuning) / (len(tuning) + len(some) * len(recipe.seeds))
    accuracies: dict[str, dict[float, list[float]]] = {arm: {} for arm in some}
    tuned = train_jobs(tuning, recipe, data, lambda done: tick(share * done))
    for job in tuning:
        accuracies[name_arm(job)].setdefault(job.lr, []).append(tuned[job]["validation"])
    selected, judged = dict[str, Any](), dict[str, list[Job]]()
    for arm, by_lr in accuracies.items():
        validation = {lr: fmean(row) for lr, row in by_lr.items()}
        lr = max(validation, key=validation.__getitem__)
        selected[arm] = {"lr": lr, "validation": validation}
        judged[arm] = [some[arm]._replace(lr=lr, seed=seed) for seed in recipe.seeds]
    jobs = [job for row in judged.values() for job in row]
    results = train_jobs(jobs, recipe, data, lambda done: tick(share + (1 - share) * done))
    arms = {arm: {str(job.seed): results[job]["test"] for job in row} for arm, row in judged.items()}
    source = mnist.load_named(recipe.data, data).source
    return to_json(data=source, arms=arms, selected=selected, networks=len(tuning) + len(jobs))
