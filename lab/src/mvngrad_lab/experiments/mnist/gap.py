"""fig:thm_vgap_ada_prop, app:mnist-vgap: the variance gap at checkpoints of a real training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from mvngrad.diagnostics import variance_gap
from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.experiments.mnist.digits import EPS_S, Digits, iter_batches, load_digits, make_training
from mvngrad_lab.pool import count_cores, run_jobs
from mvngrad_lab.recipe import Recipe
from mvngrad_lab.tasks.mnist.data import find_digits
from mvngrad_lab.tasks.mnist.recipe import HIDDEN

OTHER_BATCHES = 10_000
"""Added to the seed for the batches at a checkpoint, so that they differ from those of the training."""
FIELDS = ("before", "after", "gap", "error")
"""The fields of a `VarianceGap` that are stored."""


@dataclass(frozen=True)
class Frozen(Recipe):
    """The paper's settings; the checkpoints are ours, closer where the averages are young."""

    name: ClassVar[str] = "mnist-gap"
    data: str = "mnist"
    batch: int = 16
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    eps_s: float = EPS_S
    K: int = 128
    checkpoints: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 3000)
    seeds: tuple[int, ...] = (0, 1, 2)
    cells: tuple[str, ...] = ("AdaBelief", "MVN-Grad")
    hidden: tuple[int, ...] = (HIDDEN, HIDDEN)


def make_recipe(quick: bool, data: Path | None) -> Frozen:
    digits = find_digits(data)
    return Frozen(digits, checkpoints=(1, 20, 100, 300), seeds=(0, 1)) if quick else Frozen(digits)


def measure(recipe: Frozen, cell: str, seed: int, digits: Digits) -> dict[str, list[float]]:
    """The gap at each checkpoint of one training."""
    beta1, beta2 = recipe.betas
    settings = {"batch_size": recipe.batch, "lr": recipe.lr, "beta1": beta1, "beta2": beta2, "eps": recipe.eps}
    training_step, steps = make_training(cell, seed, digits, recipe.hidden, **settings)
    model, done = training_step.model, 0
    gaps: dict[str, list[float]] = {name: [] for name in FIELDS}
    for checkpoint in recipe.checkpoints:
        for _ in islice(steps, checkpoint - done):
            pass
        done = checkpoint
        fresh = iter_batches(digits.train, recipe.batch, OTHER_BATCHES + seed)
        loss = partial(training_step.task.loss, model)
        measured = variance_gap(training_step.optimizer, loss, fresh, recipe.K)
        for name, values in gaps.items():
            values.append(getattr(measured, name))
    return gaps


def _measure(job: tuple[str, int], recipe: Frozen, data: Path | None) -> dict[str, list[float]]:
    return measure(recipe, *job, load_digits(data))


def run(recipe: Frozen, data: Path | None, tick: Tick) -> dict[str, Any]:
    jobs = [(cell, seed) for cell in recipe.cells for seed in recipe.seeds]
    results: dict[Any, dict[str, list[float]]] = {}
    for job, gaps in run_jobs(partial(_measure, recipe=recipe, data=data), jobs, count_cores(), load_digits, data):
        results[job] = gaps
        tick(len(results) / len(jobs))
    trained = {
        cell: {name: [results[cell, seed][name] for seed in recipe.seeds] for name in FIELDS} for cell in recipe.cells
    }
    source = load_digits(data).source
    return to_json(data=source, K=recipe.K, seeds=recipe.seeds, steps=recipe.checkpoints, trained_with=trained)
