"""What a recipe trains, on which data: the part of training that differs from task to task."""

from __future__ import annotations

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

EpochPlan: TypeAlias = dict[str, Tensor]
"""Everything that is random in an epoch, drawn in advance on the CPU; the first dimension of each tensor is the step.

It depends only on the recipe's seed and the epoch, so a run that is resumed, or moved to another device, sees the same
data in the same order, and no state of a random generator has to be saved.
"""
StepPlan: TypeAlias = dict[str, Tensor]
"""The part of an epoch's plan that belongs to one step, on the device."""


class Task(ABC):
    """The data on its device, the model, and how a step's loss is computed from both.

    One task serves all recipes that differ only in the optimizer, the schedule and `outside_step`: its methods read
    those from the recipe that they are called with. For a language model an "epoch" is a fixed number of steps. In
    parallel training each process has a task, which plans its own share of every batch.
    """

    device: torch.device
    source: str
    """Description of the data for a report."""
    steps_per_epoch: int
    last_batch_size: int = 0
    """Samples of an epoch's last step if it has fewer than the others, else 0."""
    train_metric: str | None = None
    """Name of the share of an epoch's training samples, in percent, that `loss_and_correct` counts as correct."""
    capturable: bool = True
    """Whether a step may be captured as a CUDA graph: not if `make_batch` reads samples one by one."""
    supports_parallel: bool = False
    """Whether several processes can train it, each with its share of every batch."""
    outside_step: ClassVar[tuple[str, ...]] = ()
    """Recipe fields that `build_model`, `make_batch`, `loss` and `evaluate` do not depend on, so that recipes that
    differ only in these share what is compiled or captured."""

    @abstractmethod
    def __init__(self, recipe: Any, data: Path | None, device: torch.device) -> None:
        """Load the data from the folder `data`; None is the loader's default."""

    @classmethod
    def prepare_recipe(cls, recipe: Any, data: Path | None, progress: Callable[[str], Any]) -> Any:
        """The recipe that `mvngrad train` trains, from what the user wrote. It may first prepare the data that the
        recipe names; `progress(name)` returns a function of the bytes done and the total.
        """
        return recipe

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model on the CPU, its weights drawn from torch's global generator."""

    @abstractmethod
    def plan_epoch(self, recipe: Any, epoch: int) -> EpochPlan:
        """Draw everything that is random in an epoch; the loop adds the learning rates."""

    @abstractmethod
    def make_batch(self, row: StepPlan) -> tuple[Tensor, ...]:
        """The inputs of a step's loss. It may be captured: it must not synchronize or draw random numbers."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean loss of a batch. It may be captured, like `make_batch`."""

    def loss_and_correct(self, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """The loss and, for a task with a `train_metric`, the number of correct samples. It may be captured."""
        return self.loss(model, batch), None

    @abstractmethod
    def evaluate(self, model: Callable[..., Tensor], final: bool) -> dict[str, float]:
        """Metrics of a model in evaluation mode; expensive ones only if `final`."""

    def find_unsaved(self) -> list[str]:
        """Names of what training changed in the model and no checkpoint has, if the task can tell."""
        return []


def make_generators(seed: int, epoch: int) -> tuple[random.Random, torch.Generator]:
    """Random number generators for an epoch's plan. Seed and epoch are mixed as text, so neighbours are unrelated."""
    draw = random.Random(f"{seed} {epoch}")
    return draw, torch.Generator().manual_seed(draw.getrandbits(32))


@contextmanager
def seed_generators(seed: int) -> Iterator[None]:
    """Seed torch's generators of the CPU and of all GPUs; afterwards they are as before."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(seed)
        yield


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the generators that layers such as dropout draw from in a step, on the CPU and the device.

    They need not be saved then: a resumed run draws the same numbers. torch.manual_seed takes 100 times as long.
    """
    number = zlib.crc32(f"{seed} {step} {rank}".encode())
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(number)


def seed_evaluation(seed: int, epoch: int) -> AbstractContextManager[None]:
    """Seed the generators that a Dataset may draw from while it is evaluated."""
    return seed_generators(random.Random(f"{seed} {epoch} evaluation").getrandbits(32))


def build_initial_model(task: Task, seed: int) -> nn.Module:
    """The model with the initial weights of a seed, the same on every device; the global generators are unchanged."""
    with seed_generators(seed):
        return task.build_model()
