"""fig:thm_vgap_ada_prop, app:mnist-vgap: the variance gap at frozen states of a real training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.nn.functional import cross_entropy

from mvngrad.diagnostics import variance_gap
from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.experiments.mnist.digits import EPS_S, Digits, batches, keep, kept, known, optimizer, source, step
from mvngrad_lab.pool import count_cores, run_jobs
from mvngrad_lab.recipe import Recipe
from mvngrad_lab.tasks.mnist.model import HIDDEN, mlp

OTHER_BATCHES = 10_000
"""Added to the seed of the batches at a frozen state, which are not those of the training."""

NAMES = ("before", "after", "gap", "error")
"""Of a `VarianceGap`, what is kept."""


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
    return Frozen(known(data), checkpoints=(1, 20, 100, 300), seeds=(0, 1)) if quick else Frozen(known(data))


def along(recipe: Frozen, cell: str, seed: int, data: Digits) -> dict[str, list[float]]:
    """The gap at each checkpoint of one training."""
    torch.manual_seed(seed)
    model = mlp(*recipe.hidden)
    made = optimizer(cell, model, recipe.lr, recipe.betas, recipe.eps)
    training, steps = batches(data.train, recipe.batch, seed), 0
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for checkpoint in recipe.checkpoints:
        for images, labels in islice(training, checkpoint - steps):
            step(model, made, images, labels)
        steps = checkpoint
        fresh = batches(data.train, recipe.batch, OTHER_BATCHES + seed)
        measured = variance_gap(made, lambda batch: cross_entropy(model(batch[0]), batch[1]), fresh, recipe.K)
        for name, values in found.items():
            values.append(getattr(measured, name))
    return found


def _along(job: tuple[str, int], recipe: Frozen) -> dict[str, list[float]]:
    return along(recipe, *job, kept())


def run(recipe: Frozen, data: Path | None, tick: Tick) -> dict[str, Any]:
    jobs = [(cell, seed) for cell in recipe.cells for seed in recipe.seeds]
    found: dict[Any, dict[str, list[float]]] = {}
    for job, row in run_jobs(partial(_along, recipe=recipe), jobs, count_cores(), keep, data):
        found[job] = row
        tick(len(found) / len(jobs))
    trained = {
        cell: {name: [found[cell, seed][name] for seed in recipe.seeds] for name in NAMES} for cell in recipe.cells
    }
    result: dict[str, Any] = to_json(
        {
            "data": source(data),
            "K": recipe.K,
            "seeds": recipe.seeds,
            "steps": recipe.checkpoints,
            "trained_with": trained,
        }
    )
    return result
