"""A Monitor beside a run: monitor.jsonl in its folder, a record after each epoch, for `mvngrad diagnose`."""

from __future__ import annotations

from pathlib import Path

import torch

from mvngrad.diagnostics import Monitor
from mvngrad_lab.store import MONITOR
from mvngrad_lab.store.metrics import Metrics
from mvngrad_lab.training.sitting import Observer
from mvngrad_lab.training.step import Stepper
from mvngrad_lab.training.task import optimizer
from mvngrad_lab.training_recipe import Training


def check(recipe: Training) -> None:
    """Refuse an optimizer that a Monitor cannot read, before anything is trained with it."""
    try:
        Monitor(optimizer(recipe, torch.nn.Linear(1, 1), torch.zeros(())), sink=print).detach()
    except TypeError:
        raise ValueError(
            f"optimizer={recipe.optimizer!r} cannot be monitored; ours, torch:Adam and torch:AdamW can"
        ) from None


def monitored(folder: Path) -> Observer:
    """The `observe` of `train` that writes a Monitor's records, each once, however often the run was interrupted.

    It samples and does not follow spikes: a captured step calls no hook, and the loop has the norm of every gradient.
    """
    kept: list[Metrics] = []

    def observe(epoch: int, stepper: Stepper) -> None:
        step = epoch * stepper.task.steps_per_epoch
        if not kept:
            kept.append(Metrics(folder / MONITOR, step - 1))
        with Monitor(stepper.optimizer, every=step + 1, sink=kept[0].add, follow=False) as monitor:
            monitor.step = step
            monitor.record()

    return observe
