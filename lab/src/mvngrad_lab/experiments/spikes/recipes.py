"""Recipes with injected bad batches, and the queues of them. README.md says why. Standard library only."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from mvngrad_lab.recipe import COUPLED, RULES, Bound, has_eps_s
from mvngrad_lab.tasks.cifar100.recipe import Cifar100
from mvngrad_lab.tasks.language.recipe import STAND_IN, WikiText103
from mvngrad_lab.tasks.mnist.recipe import Mnist

Injection = Literal["none", "shuffled", "repeated", "labels", "scaled"]
FIRST, EVERY, WITHIN = 100, 200, 100
"""From step FIRST on, each block of EVERY steps has one event, in its first WITHIN steps."""
BURST = 10
"""Steps of a burst of wrong labels; every other event is one step."""
SCALE = 1e3
"""Factor of the loss in a scaled step."""
CLIP, Z_CLIP = 1.0, 3.0
SEEDS = (1, 2, 3)
RATE_FACTORS = (1.0, 3.0)
"""Of the best rate."""
GUARD = {
    "clip": Bound("more than 0, or None", lambda value: value > 0),
    "nonfinite_limit": Bound("at least 1", lambda value: value >= 1),
}
"""Bounds of what recipes of images do not have otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikedText(WikiText103):
    """GPT-2 with bad batches: tokens in random order, one token repeated, or a loss that is too large."""

    name: ClassVar[str] = "spiked-text"

    injection: Literal["none", "shuffled", "repeated", "scaled"] = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikedImages(Cifar100):
    """ResNet-18 with bad batches: wrong labels, or a loss that is too large. It records the loss of every step."""

    name: ClassVar[str] = "spiked-images"
    bounds: ClassVar[dict[str, Bound]] = {**Cifar100.bounds, **GUARD}

    injection: Literal["none", "labels", "scaled"] = "none"
    clip: float | None = None
    nonfinite_limit: int = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikedMnist(Mnist):
    """A two-layer network with bad batches: wrong labels, or a loss that is too large."""

    name: ClassVar[str] = "spiked-mnist"
    bounds: ClassVar[dict[str, Bound]] = {**Mnist.bounds, **GUARD}

    injection: Literal["none", "labels", "scaled"] = "none"
    clip: float | None = None
    nonfinite_limit: int = 10


Spiked = SpikedText | SpikedImages | SpikedMnist


def find_events(seed: int, steps: int) -> list[int]:
    """The first step of each event, counted from 0; the same for all recipes of a seed. A block that does not fit has
    none, so that every event is followed by at least EVERY - WITHIN steps.

    >>> find_events(1, 500), find_events(1, 299)
    ([175, 363], [])
    """
    draw = random.Random(f"spikes {seed}")
    return [start + draw.randrange(WITHIN) for start in range(FIRST, steps - EVERY + 1, EVERY)]


def find_bad_steps(recipe: Spiked, steps: int) -> set[int]:
    """All steps that the injection changes."""
    if recipe.injection == "none":
        return set()
    length = BURST if recipe.injection == "labels" else 1
    return {event + at for event in find_events(recipe.seed, steps) for at in range(length)}


def text_recipe(optimizer: Any, **settings: Any) -> SpikedText:
    """GPT-2 30M on the stand-in text: 500 steps, at the best rate of each in `results/`."""
    eps_s = 0.0 if has_eps_s(optimizer) else None
    fixed = {"text": STAND_IN, "steps": 500, "warmup_steps": 100, "clip": None, "eps_s": eps_s}
    return SpikedText(optimizer=optimizer, beta1=0.95, beta2=0.99, **{"lr": 3e-3, **fixed, **settings})


def image_recipe(optimizer: Any, **settings: Any) -> SpikedImages:
    """ResNet-18 on CIFAR-100 without a floor: 12 epochs of 48 steps, at the best rate of each in `results/`."""
    eps_s = 1e-16 if has_eps_s(optimizer) else None
    fixed = {"batch_size": 1024, "epochs": 12, "warmup_epochs": 1, "eps_s": eps_s}
    return SpikedImages(optimizer=optimizer, beta1=0.9, beta2=0.99, **{"lr": 1e-3, **fixed, **settings})


TASKS = {
    "text": (text_recipe, ("none", "shuffled", "repeated", "scaled")),
    "images": (image_recipe, ("none", "labels", "scaled")),
}


def protections(optimizer: str) -> dict[str, dict[str, float | None]]:
    """What may stand between a bad batch and the weights, by name; only LaProp and MVN-Grad have a z_clip."""
    choices: dict[str, dict[str, float | None]] = {"no clipping": {}, "norm clipping": {"clip": CLIP}}
    if "z_clip" in RULES[optimizer].options:
        choices["z_clip"] = {"z_clip": Z_CLIP}
    return choices


def make_queue(task: str) -> list[Any]:
    """All runs of a task."""
    return make_runs(*TASKS[task], SEEDS)


def make_runs(make: Callable[..., Any], injections: Sequence[str], seeds: Sequence[int]) -> list[Any]:
    """All runs of recipes that `make(optimizer, **settings)` returns, by default at the best rate.

    They go seed by seed, so that a queue that is cut leaves whole seeds. Runs that differ in rate and injection are
    neighbours: they share a captured step.
    """
    return [
        make(cell, seed=seed, lr=factor * make(cell).lr, injection=injection, **settings)
        for seed in seeds
        for cell in COUPLED
        for settings in protections(cell).values()
        for factor in RATE_FACTORS
        for injection in injections
    ]
