"""ResNet-18 on CIFAR-100. The images stay on the device as bytes and are augmented there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.tasks.cifar100 import augment, data
from mvngrad_lab.tasks.cifar100.model import resnet18
from mvngrad_lab.tasks.cifar100.recipe import Cifar100
from mvngrad_lab.training.task import EpochPlan, StepPlan, Task, make_generators

CLASSES = 100
EVALUATED_AT_ONCE = 1000
SHUFFLE = 100
"""Seed of the order whose first images `train_limit` takes: the same for every run."""


@lru_cache(maxsize=1)
def _load(folder: Path | None, device: torch.device) -> data.Cifar100:
    """The images on the device, loaded once for all tasks of a process."""
    images = data.load(folder)
    tensors: dict[str, Any] = {name: value.to(device) for name, value in vars(images).items() if name != "source"}
    return dataclasses.replace(images, **tensors)


class Cifar100Task(Task):
    """ResNet-18 with crop, flip, RandAugment, MixUp and label smoothing."""

    train_metric = "train_accuracy_mixed"
    outside_step: ClassVar[tuple[str, ...]] = ("warmup_epochs", "mixup")

    def __init__(self, recipe: Cifar100, folder: Path | None, device: torch.device) -> None:
        images = _load(folder, device)
        self.device, self.source = device, images.source
        self.train_images, self.train_labels = images.train_images, images.train_labels
        self.test_images, self.test_labels = images.test_images, images.test_labels
        if recipe.train_limit is not None:
            order = torch.randperm(len(self.train_labels), generator=torch.Generator().manual_seed(SHUFFLE))
            chosen = order[: recipe.train_limit].to(device)
            self.train_images, self.train_labels = self.train_images[chosen], self.train_labels[chosen]
        count, size = len(self.train_labels), recipe.batch_size
        self.last_batch_size = 0 if recipe.drop_last else count % size
        self.steps_per_epoch = count // size + (self.last_batch_size > 0)
        if not self.steps_per_epoch:
            raise InvalidInput(
                f"batch_size={size} is more than the {count} training images, and drop_last=True leaves no batch; "
                "make it smaller"
            )
        self.label_smoothing = recipe.label_smoothing
        self.crop, self.flip = recipe.crop, recipe.flip
        self.operations, self.magnitude = recipe.randaugment_operations, recipe.randaugment_magnitude

    def build_model(self) -> nn.Module:
        return resnet18(CLASSES).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def plan_epoch(self, recipe: Cifar100, epoch: int) -> EpochPlan:
        """For each step the images, the random numbers that augment them, and lam of MixUp."""
        draw, generator = make_generators(recipe.seed, epoch)
        steps, size, count = self.steps_per_epoch, recipe.batch_size, len(self.train_labels)
        order = torch.zeros(steps * size, dtype=torch.int64)
        used = min(steps * size, count)
        order[:used] = torch.randperm(count, generator=generator)[:used]
        lam = [draw.betavariate(recipe.mixup, recipe.mixup) if recipe.mixup else 1.0 for _ in range(steps)]
        return {
            "order": order.view(steps, size),
            "uniforms": torch.rand(steps, size, augment.UNIFORMS, generator=generator),
            "lam": torch.tensor(lam),
        }

    def make_images(self, row: StepPlan) -> Tensor:
        """The augmented images of a step."""
        images = augment.augment(
            self.train_images[row["order"]],
            row["uniforms"],
            crop=self.crop,
            flip=self.flip,
            operations=self.operations,
            magnitude=self.magnitude,
        )
        return _input(images)

    def make_batch(self, row: StepPlan) -> tuple[Tensor, ...]:
        images, targets = augment.mixup(self.make_images(row), self.train_labels[row["order"]], row["lam"], CLASSES)
        return images, targets

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return self.loss_and_correct(model, batch)[0]

    def loss_and_correct(self, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The loss, and the sum of lam [prediction = a] + (1 - lam) [prediction = b] for images mixed of a and b."""
        images, targets = batch
        scores = model(images)
        correct = targets.gather(1, scores.detach().argmax(1, keepdim=True)).sum()
        return cross_entropy(scores, targets, label_smoothing=self.label_smoothing), correct

    def evaluate(self, model: Callable[..., Tensor], final: bool) -> dict[str, float]:
        """Accuracy in percent and loss on the test images and, if `final`, on the training images, not augmented."""
        sets = {"test": (self.test_images, self.test_labels)}
        if final:
            sets["train"] = (self.train_images, self.train_labels)
        metrics = {}
        for name, (images, labels) in sets.items():
            correct = torch.zeros((), dtype=torch.int64, device=self.device)
            loss = torch.zeros((), dtype=torch.float64, device=self.device)
            for first in range(0, len(labels), EVALUATED_AT_ONCE):
                part = slice(first, first + EVALUATED_AT_ONCE)
                scores, expected = model(_input(images[part])).float(), labels[part]
                correct += (scores.argmax(1) == expected).sum()
                loss += cross_entropy(scores, expected, reduction="sum")
            metrics[f"{name}_accuracy"] = 100 * correct.item() / len(labels)
            metrics[f"{name}_loss"] = loss.item() / len(labels)
        return metrics


TASK = Cifar100Task


def _input(images: Tensor) -> Tensor:
    return augment.normalize(images).contiguous(memory_format=torch.channels_last)
