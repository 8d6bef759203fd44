"""What `mvngrad reproduce` can run: one module each, with `recipe(quick, data)` and `run(recipe, data, tick)`.

This file is read to print help and errors, so it imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from mvngrad_lab.recipe import Recipe
from mvngrad_lab.training.events import Event

Tick = Callable[[float], None]
"""Called with the share of a target that is done."""
OnEvent = Callable[[Event], Any]
"""Called with what a training tells."""


class Module(Protocol):
    def recipe(self, quick: bool, data: Path | None) -> Recipe:
        """What to run; `data` is the folder that was asked for, if any."""

    def run(self, recipe: Any, data: Path | None, tick: Tick) -> dict[str, Any]:
        """The result, as JSON knows it."""

    def train_all(self, root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
        """What a target with `gpu` has in their place."""


@dataclass(frozen=True)
class Target:
    name: str
    what: str
    seconds: tuple[int, int]
    """About what it takes on two cores, in full and with `quick`: where an estimate starts."""
    gpu: bool = False
    """Only run where it is named. Its module has `train_all`, which keeps many runs, instead."""

    def load(self) -> Module:
        return cast(
            Module,
            import_module(f"mvngrad_lab.experiments.{MODULES.get(self.name, f'{self.name}.run')}".replace("-", "_")),
        )


TARGETS = {
    target.name: target
    for target in (
        Target("spike", "one gradient spike, and many, through the four cells", (5, 1)),
        Target("variance-gap", "which order of momentum varies less", (5, 2)),
        Target("separation", "steps against the dimension", (15, 2)),
        Target("convergence", "the nonconvex rate and its floor", (5, 3)),
        Target("memory", "what an optimizer keeps", (1, 1)),
        Target("mnist-curves", "training loss, smooth or not", (120, 30)),
        Target("mnist-gap", "the variance gap in a real training", (120, 20)),
        Target("table1", "ResNet-18 on CIFAR-100, 24 runs", (3800, 3800), gpu=True),
        Target("table2", "GPT-2 on a stand-in text, 44 runs", (3700, 3700), gpu=True),
        Target("cifar-gap", "the variance gap on CIFAR-100", (500, 500), gpu=True),
        Target("state-precision", "state in bf16 and int8, 6 runs", (780, 780), gpu=True),
    )
}
MODULES = {
    "mnist-curves": "mnist.curves",
    "mnist-gap": "mnist.gap",
    "table1": "cifar100.run",
    "cifar-gap": "cifar100.gap",
    "table2": "language.run",
}
"""Experiments whose module is not `<name>/run.py`."""
