"""fig:loss_smallbatch and fig:loss_largebatch: the loss of a two-layer MLP, and its smoothness as a number."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from mvngrad.diagnostics.spikes import MNIST_SPIKE, find_spikes
from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.experiments.mnist.digits import EPS_S, OPTIMIZERS, Digits, load_digits, make_training
from mvngrad_lab.pool import count_cores, run_jobs
from mvngrad_lab.recipe import Recipe
from mvngrad_lab.tasks.mnist.data import find_digits
from mvngrad_lab.tasks.mnist.recipe import HIDDEN

SPIKE_RULE = (
    f"a loss spike is a step whose batch loss is above {MNIST_SPIKE.multiple} times the largest batch loss of the "
    f"{MNIST_SPIKE.window} steps before it, or is not finite; spikes fewer than {MNIST_SPIKE.separation} steps apart "
    f"are one; the first {MNIST_SPIKE.warm_up} steps have none"
)
BINS = 120
"""Points of a stored curve: each is the mean loss of its share of the steps."""


@dataclass(frozen=True)
class Panel:
    batch: int
    lr: float
    betas: tuple[float, float]
    steps: int
    eps: float = 1e-8

    @property
    def cost(self) -> int:
        """Relative cost of a run: each step costs its digits and a constant."""
        return self.steps * (self.batch + 200)


SMALL = Panel(128, 5e-3, (0.999, 0.7), 3 * 468)
LARGE = Panel(1024, 1e-4, (0.95, 0.999), 10 * 58)
"""app:mnist-hparams. The paper does not say how long it trains: 3 and 10 epochs of all digits are ours."""


@dataclass(frozen=True)
class Curves(Recipe):
    name: ClassVar[str] = "mnist-curves"
    data: str = "mnist"
    panels: tuple[Panel, ...] = (SMALL, LARGE)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    hidden: int = HIDDEN
    eps_s: float = EPS_S


def make_recipe(quick: bool, data: Path | None) -> Curves:
    if quick:
        short = tuple(Panel(p.batch, p.lr, p.betas, p.steps // 4) for p in (SMALL, LARGE))
        return Curves(find_digits(data), short, (0, 1))
    return Curves(find_digits(data))


def train(cell: str, panel: Panel, seed: int, digits: Digits, hidden: int) -> dict[str, Any]:
    """Train one network; returns its binned losses, spikes, final loss and test accuracy."""
    beta1, beta2 = panel.betas
    settings = {"batch_size": panel.batch, "lr": panel.lr, "beta1": beta1, "beta2": beta2, "eps": panel.eps}
    training_step, steps = make_training(cell, seed, digits, (hidden,), **settings)
    losses = torch.stack(list(islice(steps, panel.steps))).numpy()
    with torch.no_grad():
        metrics = training_step.task.evaluate(training_step.model, final=True)
    parts = np.array_split(losses.astype(np.float64), min(BINS, len(losses)))
    return {
        "loss": [part.mean() for part in parts],
        "spikes": len(find_spikes(losses.tolist(), MNIST_SPIKE)),
        "final_loss": losses[-max(1, len(losses) // 10) :].mean(),
        **metrics,
    }


def run(recipe: Curves, data: Path | None, tick: Tick) -> dict[str, Any]:
    jobs = [(panel, cell, seed) for panel in recipe.panels for cell in OPTIMIZERS for seed in recipe.seeds]
    total = sum(panel.cost for panel, _, _ in jobs)
    results: dict[Any, dict[str, Any]] = {}
    for job, row in run_jobs(partial(_train, data=data, hidden=recipe.hidden), jobs, count_cores(), load_digits, data):
        results[job] = row
        tick(sum(panel.cost for panel, _, _ in results) / total)
    panels: dict[str, Any] = {}
    for panel in recipe.panels:
        cells: dict[str, Any] = {}
        for cell in OPTIMIZERS:
            rows = [results[panel, cell, seed] for seed in recipe.seeds]
            cells[cell] = {metric: [row[metric] for row in rows] for metric in rows[0]}
            parts = np.array_split(np.arange(panel.steps), len(rows[0]["loss"]))
            cells[cell]["steps"] = [part.mean() for part in parts]
        panels[f"batch {panel.batch}"] = {**vars(panel), "cells": cells}
    return to_json(data=load_digits(data).source, seeds=recipe.seeds, spike_rule=SPIKE_RULE, panels=panels)


def _train(job: tuple[Panel, str, int], data: Path | None, hidden: int) -> dict[str, Any]:
    panel, cell, seed = job
    return train(cell, panel, seed, load_digits(data), hidden)
