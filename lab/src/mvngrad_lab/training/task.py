"""What a training recipe trains, on what: the part of training that differs from recipe to recipe."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mvngrad_lab.recipe import TrainingRecipe

EpochPlan: TypeAlias = dict[str, Tensor]
"""What the steps of an epoch differ in, drawn in advance on the CPU; the first dimension of each tensor is the step.

It depends on the recipe's seed and the epoch alone, so that a run which is resumed, or moved to another device, sees
the same data in the same order and has no state of a random generator to keep.
"""
StepPlan: TypeAlias = dict[str, Tensor]
"""The part of a plan that belongs to one step, on the device."""


class Task(ABC):
    """The data on its device, the model, and how a step's loss comes from both.

    One task serves all recipes that differ only in `outside_step` and `of_optimizer`; these fields are read from the
    recipe that is passed to a method. For a language model an "epoch" is any fixed number of steps. Of several
    processes that train one model, each has a task, which plans its own share of every batch.
    """

    device: torch.device
    source: str
    """What the data is, in words for a report."""
    steps_per_epoch: int
    last_batch_size: int = 0
    """Samples of the last step of an epoch where it has fewer than the others, else 0."""

    train_metric: str | None = None
    """Name of the share of training samples, in percent, that `loss_and_correct` counts as correct in an epoch."""
    supports_parallel: bool = False
    """Whether several processes may train it, each with its share of every batch."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model on the CPU, its weights drawn from torch's global generator."""

    @abstractmethod
    def plan_epoch(self, recipe: Any, epoch: int) -> EpochPlan:
        """All that is random in an epoch; the loop adds the learning rates."""

    @abstractmethod
    def make_batch(self, row: StepPlan) -> tuple[Tensor, ...]:
        """The samples of a step, ready for the model. Captured: nothing may be read back or drawn."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean loss of a batch. Captured, likewise."""

    def loss_and_correct(self, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """The loss and, for a task with a `train_metric`, the number of correct samples. Captured, likewise."""
        return self.loss(model, batch), None

    @abstractmethod
    def evaluate(self, model: Callable[..., Tensor], final: bool) -> dict[str, float]:
        """Metrics of a model in evaluation mode; those too costly to take more than once only if `final`."""


TaskFactory: TypeAlias = Callable[[Any, Path | None, torch.device], Task]


def make_task(recipe: TrainingRecipe, data: Path | None, device: torch.device) -> Task:
    """The task of a recipe: `task` in the module of `mvngrad_lab.tasks` that it names."""
    made: Task = import_module(f"mvngrad_lab.tasks.{recipe.trained}.task").task(recipe, data, device)
    return made


def make_generators(seed: int, epoch: int) -> tuple[random.Random, torch.Generator]:
    """What to draw a plan with. Seeds are mixed as text, so that those near each other have nothing in common."""
    draw = random.Random(f"{seed} {epoch}")
    return draw, torch.Generator().manual_seed(draw.getrandbits(32))


def build_initial_model(task: Task, seed: int) -> nn.Module:
    """The model as a seed begins it, the same on every device; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.build_model()
