"""A small network on MNIST: digits in memory, a part of the training digits held out for validation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.tasks.mnist import data
from mvngrad_lab.tasks.mnist.recipe import HIDDEN as HIDDEN, Mnist
from mvngrad_lab.training.task import EpochPlan, StepPlan, Task, make_generators

VALIDATION_EVERY = 6
"""One training digit in six is held out for validation."""
SPLIT_SEED = 28
"""Seed of that split, the same for every run."""


def mlp(*hidden: int) -> nn.Sequential:
    """784 - hidden - ... - 10 with ReLU, in torch's own initialization.

    >>> sum(p.numel() for p in mlp(HIDDEN).parameters())  # the "2-layer MLP" of fig:loss_smallbatch
    101770
    """
    widths = (28 * 28, *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in zip(widths, hidden, strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


class MnistTask(Task):
    """Batches in a new order each epoch, without the last partial one."""

    hidden: tuple[int, ...]
    """Widths of the hidden layers."""

    def __init__(self, recipe: Mnist, folder: Path | None, device: torch.device) -> None:
        if recipe.digits == "auto":
            raise InvalidInput(
                "digits='auto' is for `mvngrad train`; name mnist or mnist-5k, so that the run says which"
            )
        digits = data.load_named(recipe.digits, folder)
        self.device, self.source, self.hidden = device, digits.source, (recipe.hidden,)
        order = torch.randperm(len(digits.train_labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
        validation, rest = order[: len(order) // VALIDATION_EVERY], order[len(order) // VALIDATION_EVERY :]
        images = data.normalize(digits.train_images)
        self.train = self._on_device(images[rest], digits.train_labels[rest])
        self.sets = {
            "validation": self._on_device(images[validation], digits.train_labels[validation]),
            "test": self._on_device(data.normalize(digits.test_images), digits.test_labels),
        }
        self.steps_per_epoch = len(rest) // recipe.batch_size
        if not self.steps_per_epoch:
            raise InvalidInput(
                f"batch_size={recipe.batch_size} is more than the {len(rest)} training digits; make it smaller"
            )

    @classmethod
    def prepare_recipe(cls, recipe: Mnist, folder: Path | None, progress: Callable[[str], Any]) -> Mnist:
        """The recipe with the digits that are here in place of "auto", so that its key names them."""
        if recipe.digits != "auto":
            return recipe
        if data.load(folder).complete:
            return replace(recipe, digits="mnist")
        print(
            "all of MNIST is not here: trains on the 5,000 digits in this package, as --digits mnist-5k does; "
            "`mvngrad data get mnist` downloads all (11 MB)",
            file=sys.stderr,
        )
        return replace(recipe, digits="mnist-5k")

    def _on_device(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return images.to(self.device), labels.to(self.device)

    def build_model(self) -> nn.Module:
        return mlp(*self.hidden)

    def draw_order(self, seed: int, epoch: int) -> Tensor:
        """The order in which an epoch takes the training digits."""
        _, generator = make_generators(seed, epoch)
        return torch.randperm(len(self.train[1]), generator=generator)

    def plan_epoch(self, recipe: Mnist, epoch: int) -> EpochPlan:
        order = self.draw_order(recipe.seed, epoch)
        return {"order": order[: self.steps_per_epoch * recipe.batch_size].view(self.steps_per_epoch, -1)}

    def make_batch(self, row: StepPlan) -> tuple[Tensor, ...]:
        return self.train[0][row["order"]], self.train[1][row["order"]]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: Callable[..., Tensor], final: bool) -> dict[str, float]:
        """Accuracy in percent and loss on the validation digits and, at the end, on test and training digits."""
        metrics = {}
        for name, (images, labels) in {**self.sets, "train": self.train}.items():
            if final or name == "validation":
                scores = model(images)
                metrics[f"{name}_accuracy"] = 100 * (scores.argmax(1) == labels).double().mean().item()
                metrics[f"{name}_loss"] = cross_entropy(scores, labels).item()
        return metrics


TASK = MnistTask
