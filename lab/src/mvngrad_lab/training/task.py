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
from torch.optim import Optimizer

import mvngrad
from mvngrad.optim.optimizer import RuleOptimizer
from mvngrad_lab.training import zoo
from mvngrad_lab.training_recipe import CELLS, Training

Plan: TypeAlias = dict[str, Tensor]
"""What the steps of an epoch differ in, drawn in advance on the CPU; the first dimension of each tensor is the step.

It depends on the recipe's seed and the epoch alone, so that a run which is resumed, or moved to another device, sees
the same data in the same order and has no state of a random generator to keep.
"""
Row: TypeAlias = dict[str, Tensor]
"""The part of a plan that belongs to one step, on the device."""

CLASSES = {rule_name: rule.name.replace("-", "") for rule_name, rule in CELLS.items()}


class Task(ABC):
    """The data on its device, the model, and how a step's loss comes from both.

    One task serves all recipes that differ in `Training.outside_step` and `of_optimizer` alone: what such fields decide
    is asked with the recipe at hand. For a language model an "epoch" is any fixed number of steps. Of several
    processes that train one model, each has a task, which plans its own share of every batch.
    """

    device: torch.device
    source: str
    """What the data is, in words for a report."""
    steps_per_epoch: int
    rest: int = 0
    """Samples of the last step of an epoch where it has fewer than the others, else 0."""

    spreads: bool = False
    """Whether several processes may train it, each with its share of every batch."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The model on the CPU, its weights drawn from torch's global generator."""

    @abstractmethod
    def plan(self, recipe: Any, epoch: int) -> Plan:
        """All that is random in an epoch; the loop adds the learning rates."""

    @abstractmethod
    def batch(self, row: Row) -> tuple[Tensor, ...]:
        """The samples of a step, ready for the model. Captured: nothing may be read back or drawn."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean loss of a batch. Captured, likewise."""

    @abstractmethod
    def evaluate(self, model: Callable[..., Tensor], final: bool) -> dict[str, float]:
        """Metrics of a model in evaluation mode; those too costly to take more than once only if `final`."""


Factory: TypeAlias = Callable[[Any, Path | None, torch.device], Task]


def of(recipe: Training, data: Path | None, device: torch.device) -> Task:
    """The task of a recipe: `task` in the module of `mvngrad_lab.tasks` that it names."""
    made: Task = import_module(f"mvngrad_lab.tasks.{recipe.trained}.task").task(recipe, data, device)
    return made


def drawing(seed: int, epoch: int) -> tuple[random.Random, torch.Generator]:
    """What to draw a plan with. Seeds are mixed as text, so that those near each other have nothing in common."""
    draw = random.Random(f"{seed} {epoch}")
    return draw, torch.Generator().manual_seed(draw.getrandbits(32))


def initial(task: Task, seed: int) -> nn.Module:
    """The model as a seed begins it, the same on every device; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.build()


def optimizer(recipe: Training, model: nn.Module, lr: Tensor) -> Optimizer:
    """The recipe's optimizer. Ours has its state, and is ready to be captured where the model is on a GPU."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if recipe.decays(p.dim()) == decays], **options}
        for decays, options in ((True, {}), (False, {"weight_decay": 0.0}))
    ]
    groups = [group for group in groups if group["params"]]
    if recipe.foreign:
        return zoo.make(recipe.optimizer, groups, **zoo.hyper_parameters(recipe))
    cell = recipe.optimizer.removesuffix("w")
    make = getattr(mvngrad, CLASSES[cell] + "W" * (cell != recipe.optimizer))
    made: RuleOptimizer = make(
        groups,
        lr=lr,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        eps_s=recipe.eps_s,
        weight_decay=recipe.weight_decay,
        state_dtype=recipe.state_dtype,
        rounding_seed=recipe.rounding_seed,
        capturable=lr.is_cuda,
    )
    made.init_state()
    return made
