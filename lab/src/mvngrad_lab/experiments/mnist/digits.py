"""What both MNIST experiments train: an MLP on all training digits, by the steps of the lab's training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mvngrad_lab.recipe import RULES, has_eps_s
from mvngrad_lab.tasks.mnist import data as mnist
from mvngrad_lab.tasks.mnist.recipe import Mnist
from mvngrad_lab.tasks.mnist.task import MnistTask
from mvngrad_lab.training.step import DeviceTask, TrainingStep

OPTIMIZERS = {rule.name: name for name, rule in RULES.items()}
"""Names in recipes of the optimizers that are compared, by their names in figures."""
EPS_S = 1e-16
"""The paper gives none for MNIST."""


class Digits(NamedTuple):
    """Normalized images with their labels, in memory."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    source: str
    """Description of the digits for a report."""


@cache
def load_digits(folder: Path | None) -> Digits:
    """All digits, loaded once per process."""
    data = mnist.load(folder)
    train, test = mnist.normalize(data.train_images), mnist.normalize(data.test_images)
    return Digits((train, data.train_labels), (test, data.test_labels), data.source)


def iter_orders(size: int, seed: int) -> Iterator[Tensor]:
    """A new order of `size` digits for each epoch, without end."""
    generator = torch.Generator().manual_seed(seed)
    for _ in count():
        yield torch.randperm(size, generator=generator)


def iter_batches(data: tuple[Tensor, Tensor], batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of all epochs, without end; the last partial batch of an epoch is dropped."""
    images, labels = data
    for order in iter_orders(len(labels), seed):
        for chosen in torch.split(order, batch_size)[: len(labels) // batch_size]:
            yield images[chosen], labels[chosen]


class DigitsTask(MnistTask):
    """All training digits, in the batches of `iter_batches`."""

    def __init__(self, recipe: Mnist, digits: Digits, hidden: tuple[int, ...]) -> None:
        self.device, self.source = torch.device("cpu"), digits.source
        self.train, self.test = digits.train, digits.test
        self.hidden, self.steps_per_epoch = hidden, len(self.train[1]) // recipe.batch_size

    def draw_order(self, seed: int, epoch: int) -> Tensor:
        return next(islice(iter_orders(len(self.train[1]), seed), epoch, None))

    def evaluate(self, model: Callable[..., Tensor], final: bool) -> dict[str, float]:
        images, labels = self.test
        correct = model(images).argmax(1) == labels
        return {"test_accuracy": 100 * correct.double().mean().item()}


def make_training(
    cell: str, seed: int, digits: Digits, hidden: tuple[int, ...], **settings: Any
) -> tuple[TrainingStep, Iterator[Tensor]]:
    """A training step, and an endless iterator that trains it and yields the loss of each step.

    `settings` are batch_size, lr, beta1, beta2 and eps of the recipe.
    """
    optimizer = OPTIMIZERS[cell]
    eps_s = EPS_S if has_eps_s(optimizer) else None
    recipe = Mnist(optimizer=optimizer, eps_s=eps_s, seed=seed, **settings)
    training_step = TrainingStep(recipe, DeviceTask(DigitsTask(recipe, digits, hidden)), captured=False)
    for group in training_step.optimizer.param_groups:
        group["lr"] = recipe.lr  # constant, and a float32 tensor would round it
    return training_step, training_step.run(recipe)
