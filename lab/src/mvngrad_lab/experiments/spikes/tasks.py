"""The tasks with bad batches. What is injected is part of an epoch's plan, so that a captured step reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mvngrad_lab.experiments.spikes.recipes import (
    SCALE,
    Spiked,
    SpikedImages,
    SpikedMnist,
    SpikedText,
    find_bad_steps,
)
from mvngrad_lab.tasks.cifar100 import augment
from mvngrad_lab.tasks.cifar100.task import CLASSES, Cifar100Task
from mvngrad_lab.tasks.language.task import LanguageTask
from mvngrad_lab.tasks.mnist.task import MnistTask
from mvngrad_lab.training.task import EpochPlan, StepPlan, make_generators

DIGITS = 10
"""Classes of MNIST."""


class SpikedTextTask(LanguageTask):
    """Shuffles all tokens of a bad step among its windows, or repeats each window's first token, or scales the loss."""

    outside_step = (*LanguageTask.outside_step, "injection")

    def plan_epoch(self, recipe: SpikedText, epoch: int) -> EpochPlan:  # type: ignore[override]
        plan = super().plan_epoch(recipe, epoch)
        bad = _bad_steps(recipe, epoch, self.steps_per_epoch)
        tokens: Tensor = plan["tokens"]
        _, generator = make_generators(recipe.seed, epoch)
        for at in bad:
            if recipe.injection == "shuffled":
                order = torch.randperm(tokens[at].numel(), generator=generator)
                tokens[at] = tokens[at].flatten()[order].view_as(tokens[at])
            elif recipe.injection == "repeated":
                tokens[at] = tokens[at][:, :1]
        return {**plan, "scale": _scales(recipe, bad, self.steps_per_epoch)}

    def make_batch(self, row: StepPlan) -> tuple[Tensor, ...]:
        return *super().make_batch(row), row["scale"]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        *rest, scale = batch
        return super().loss(model, tuple(rest)) * scale


class SpikedImagesTask(Cifar100Task):
    """Draws all labels of a bad step at random, or scales its loss."""

    outside_step = (*Cifar100Task.outside_step, "injection", "nonfinite_limit")

    def plan_epoch(self, recipe: SpikedImages, epoch: int) -> EpochPlan:  # type: ignore[override]
        plan = super().plan_epoch(recipe, epoch)
        return {**plan, **_plan_labels(recipe, epoch, plan["order"], CLASSES)}

    def make_batch(self, row: StepPlan) -> tuple[Tensor, ...]:
        labels = (self.train_labels[row["order"]] + row["shift"]) % CLASSES
        images, targets = augment.mixup(self.make_images(row), labels, row["lam"], CLASSES)
        return images, targets, row["scale"]

    def loss_and_correct(self, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        *rest, scale = batch
        loss, correct = super().loss_and_correct(model, tuple(rest))
        return loss * scale, correct


class SpikedMnistTask(MnistTask):
    """Draws all labels of a bad step at random, or scales its loss."""

    outside_step = (*MnistTask.outside_step, "injection", "nonfinite_limit")

    def plan_epoch(self, recipe: SpikedMnist, epoch: int) -> EpochPlan:  # type: ignore[override]
        plan = super().plan_epoch(recipe, epoch)
        return {**plan, **_plan_labels(recipe, epoch, plan["order"], DIGITS)}

    def make_batch(self, row: StepPlan) -> tuple[Tensor, ...]:
        images, labels = super().make_batch(row)
        return images, (labels + row["shift"]) % DIGITS, row["scale"]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        *rest, scale = batch
        return super().loss(model, tuple(rest)) * scale


def _plan_labels(recipe: Spiked, epoch: int, order: Tensor, classes: int) -> EpochPlan:
    """What is added to each label of an epoch, modulo `classes`, and the factor of each step's loss."""
    bad, shift = _bad_steps(recipe, epoch, len(order)), torch.zeros_like(order)
    if recipe.injection == "labels":
        _, generator = make_generators(recipe.seed, epoch)
        for at in bad:
            shift[at] = torch.randint(1, classes, shift[at].shape, generator=generator)
    return {"shift": shift, "scale": _scales(recipe, bad, len(order))}


def _bad_steps(recipe: Spiked, epoch: int, steps_per_epoch: int) -> list[int]:
    """The steps of an epoch that the injection changes, counted from its start."""
    first = epoch * steps_per_epoch
    bad = find_bad_steps(recipe, recipe.epochs * steps_per_epoch)
    return [at for at in range(steps_per_epoch) if first + at in bad]


def _scales(recipe: Spiked, bad: list[int], steps: int) -> Tensor:
    scales = torch.ones(steps)
    if recipe.injection == "scaled":
        scales[bad] = SCALE
    return scales


def get_task(queue: str) -> Any:
    """The task that the recipes of a queue train."""
    return {"text": SpikedTextTask, "images": SpikedImagesTask}[queue.partition("-")[0]]
