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
from mvngrad_lab.experiments.mnist.digits import (
    CELLS,
    EPS_S,
    Digits,
    batches,
    keep,
    kept,
    known,
    optimizer,
    source,
    step,
)
from mvngrad_lab.pool import count_cores, run_jobs
from mvngrad_lab.recipe import Recipe
from mvngrad_lab.tasks.mnist.model import HIDDEN, two_layer_mlp

SPIKE_RULE = (
    f"a loss spike is a step whose batch loss is above {MNIST_SPIKE.multiple} times the largest batch loss of the "
    f"{MNIST_SPIKE.window} steps before it, or is not finite; spikes fewer than {MNIST_SPIKE.separation} steps apart "
    f"are one; the first {MNIST_SPIKE.warm_up} steps have none"
)
BINS = 120
"""Points a curve is stored at: the mean loss of the steps in each."""


@dataclass(frozen=True)
class Panel:
    batch: int
    lr: float
    betas: tuple[float, float]
    steps: int
    eps: float = 1e-8

    @property
    def cost(self) -> int:
        """Of a run, in units of its own: each step costs its digits, and a constant."""
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
        return Curves(known(data), short, (0, 1))
    return Curves(known(data))


def train(cell: str, panel: Panel, seed: int, data: Digits, hidden: int) -> dict[str, Any]:
    """One network; losses that are not finite come out as None."""
    torch.manual_seed(seed)
    model = two_layer_mlp(hidden)
    made = optimizer(cell, model, panel.lr, panel.betas, panel.eps)
    losses = torch.stack(
        [step(model, made, *batch) for batch in islice(batches(data.train, panel.batch, seed), panel.steps)]
    ).numpy()
    with torch.no_grad():
        right = model(data.test[0]).argmax(1) == data.test[1]
    parts = np.array_split(losses.astype(np.float64), min(BINS, len(losses)))
    return {
        "loss": [part.mean() for part in parts],
        "spikes": len(find_spikes(losses.tolist(), MNIST_SPIKE)),
        "final_loss": losses[-max(1, len(losses) // 10) :].mean(),
        "test_accuracy": 100 * right.double().mean().item(),
    }


def run(recipe: Curves, data: Path | None, tick: Tick) -> dict[str, Any]:
    jobs = [(panel, cell, seed) for panel in recipe.panels for cell in CELLS for seed in recipe.seeds]
    total = sum(panel.cost for panel, _, _ in jobs)
    found: dict[Any, dict[str, Any]] = {}
    for job, row in run_jobs(partial(_train, hidden=recipe.hidden), jobs, count_cores(), keep, data):
        found[job] = row
        tick(sum(panel.cost for panel, _, _ in found) / total)
    panels: dict[str, Any] = {}
    for panel in recipe.panels:
        cells: dict[str, Any] = {}
        for cell in CELLS:
            rows = [found[panel, cell, seed] for seed in recipe.seeds]
            cells[cell] = {metric: [row[metric] for row in rows] for metric in rows[0]}
            parts = np.array_split(np.arange(panel.steps), len(rows[0]["loss"]))
            cells[cell]["steps"] = [part.mean() for part in parts]
        panels[f"batch {panel.batch}"] = {**vars(panel), "cells": cells}
    result: dict[str, Any] = to_json(
        {"data": source(data), "seeds": recipe.seeds, "spike_rule": SPIKE_RULE, "panels": panels}
    )
    return result


def _train(job: tuple[Panel, str, int], hidden: int) -> dict[str, Any]:
    panel, cell, seed = job
    return train(cell, panel, seed, kept(), hidden)
