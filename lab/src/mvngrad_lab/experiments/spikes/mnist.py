"""Bad batches on MNIST: all four cells in two regimes of betas, on a CPU in minutes."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, ClassVar

import torch

from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.experiments.spikes.compare import compare_all
from mvngrad_lab.experiments.spikes.recipes import TUNING_SEED, SpikedMnist, make_runs
from mvngrad_lab.experiments.spikes.tasks import SpikedMnistTask
from mvngrad_lab.pool import count_cores, run_jobs
from mvngrad_lab.recipe import COUPLED, Recipe, has_eps_s
from mvngrad_lab.tasks.mnist import data as mnist
from mvngrad_lab.training.step import get_training_step

INJECTIONS = ("none", "labels", "scaled")
TUNING_SHARE = 0.1
"""About the share of all networks that finding the best rates takes."""


@dataclasses.dataclass(frozen=True)
class MnistSpikes(Recipe):
    """Two regimes of betas, and the rates among which each cell's best is found, without bad batches and clipping."""

    name: ClassVar[str] = "spikes-mnist"
    data: str = "mnist"
    epochs: int = 3
    seeds: tuple[int, ...] = (11, 12, 13, 14, 15, 16, 17, 18)
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
    usual: tuple[float, float] | None = (0.9, 0.99)
    short: tuple[float, float] | None = (0.9, 0.7)
    """betas[1] < betas[0]^2: the theorem on spikes bounds the updates of LaProp and MVN-Grad, but not those of Adam."""

    @property
    def betas(self) -> dict[str, tuple[float, float]]:
        """By the name of the regime."""
        regimes = {"usual": self.usual, "short": self.short}
        return {name: betas for name, betas in regimes.items() if betas is not None}


def make_recipe(quick: bool, data: Path | None) -> MnistSpikes:
    if quick:
        return MnistSpikes("mnist-5k", epochs=12, seeds=(11,), rates=(1e-3,), usual=None)
    complete = mnist.find_digits(data) == "mnist"
    return MnistSpikes() if complete else MnistSpikes("mnist-5k", epochs=12, seeds=(11, 12, 13, 14, 15, 16))


def make_training(recipe: MnistSpikes, betas: tuple[float, float], optimizer: Any, **settings: Any) -> SpikedMnist:
    """The recipe of one network, without a floor."""
    return SpikedMnist(
        optimizer=optimizer, beta1=betas[0], beta2=betas[1], eps_s=1e-16 if has_eps_s(optimizer) else None,
        digits=recipe.data, epochs=recipe.epochs, **settings,  # type: ignore[arg-type]
    )  # fmt: skip


def train(recipe: SpikedMnist, data: Path | None) -> dict[str, Any]:
    """Train one network; returns its status, the loss of every step, and its final metrics."""
    training_step = get_training_step(
        recipe, data, torch.device("cpu"), compiled=False, captured=False, task_class=SpikedMnistTask
    )
    losses, missed = list[float](), 0
    for loss in islice(training_step.run(recipe), recipe.epochs * training_step.task.steps_per_epoch):
        norm = training_step.norms[len(losses) % training_step.task.steps_per_epoch].item()
        losses.append(loss.item())
        missed = 0 if math.isfinite(losses[-1]) and math.isfinite(norm) else missed + 1
        if missed == recipe.nonfinite_limit:
            return {"status": "diverged", "losses": losses}
    with torch.no_grad():
        metrics = training_step.task.evaluate(training_step.model, final=True)
    if not all(map(math.isfinite, metrics.values())):
        return {"status": "diverged", "losses": losses}
    return {"status": "finished", "losses": losses, **metrics}


def run(recipe: MnistSpikes, data: Path | None, tick: Tick) -> dict[str, Any]:
    makers = {name: partial(make_training, recipe, betas) for name, betas in recipe.betas.items()}
    tuned = {
        (name, cell, lr): make(cell, lr=lr, seed=TUNING_SEED)
        for (name, make), cell, lr in product(makers.items(), COUPLED, recipe.rates)
    }
    runs = train_all(list(tuned.values()), data, lambda done: tick(done * TUNING_SHARE))
    tried = {
        name: {
            cell: {lr: runs[tuned[name, cell, lr].key].get("validation_loss", math.inf) for lr in recipe.rates}
            for cell in COUPLED
        }
        for name in makers
    }
    best: dict[str, dict[str, float]] = {
        name: {cell: min(losses, key=losses.__getitem__) for cell, losses in of.items()} for name, of in tried.items()
    }
    queues = {name: make_runs(make, best[name], INJECTIONS, recipe.seeds) for name, make in makers.items()}
    everything = [each for queue in queues.values() for each in queue]
    runs |= train_all(everything, data, lambda done: tick(TUNING_SHARE + done * (1 - TUNING_SHARE)))
    parts = {
        name: {
            "betas": recipe.betas[name],
            "tried": tried[name],
            "best": best[name],
            **compare_all(queue, runs, "mnist", best[name]),
        }
        for name, queue in queues.items()
    }
    source = mnist.load_named(recipe.data, data).source
    return to_json(data=source, seeds=recipe.seeds, networks=len(runs), regimes=parts)


def train_all(recipes: list[SpikedMnist], data: Path | None, tick: Tick) -> dict[str, dict[str, Any]]:
    runs: dict[str, dict[str, Any]] = {}
    for recipe, result in run_jobs(partial(train, data=data), recipes, count_cores(), torch.set_num_threads, 1):
        runs[recipe.key] = result
        tick(len(runs) / len(recipes))
    return runs
