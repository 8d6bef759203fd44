"""Recipes with injected bad batches, and the queues of them. README.md says why. Standard library only."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.recipe import COUPLED, RULES, Bound, has_eps_s
from mvngrad_lab.tasks.cifar100.recipe import Cifar100
from mvngrad_lab.tasks.language.recipe import STAND_IN, WikiText103
from mvngrad_lab.tasks.mnist.recipe import Mnist

FIRST, EVERY, WITHIN = 100, 200, 100
"""From step FIRST on, each block of EVERY steps has one event, in its first WITHIN steps."""
BURST = 10
"""Steps of a burst of wrong labels; every other event is one step."""
SCALE = 1e3
"""Factor of the loss in a scaled step."""
CLIP, Z_CLIP = 1.0, 3.0
TEXT_BETAS = (0.95, 0.99)
SEEDS = (1, 2, 3)
TUNING_SEED = 0
"""The seed that finds the best rates."""
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
    """GPT-2 30M on the stand-in text: 500 steps of 32 windows."""
    eps_s = 0.0 if has_eps_s(optimizer) else None
    fixed = {"text": STAND_IN, "batch_size": 32, "micro_batch_size": 32, "steps": 500, "warmup_steps": 100}
    betas = {"beta1": TEXT_BETAS[0], "beta2": TEXT_BETAS[1]}
    return SpikedText(optimizer=optimizer, eps_s=eps_s, **{**fixed, **betas, "clip": None, **settings})


def image_recipe(optimizer: Any, **settings: Any) -> SpikedImages:
    """ResNet-18 on CIFAR-100 without a floor: 12 epochs of 48 steps."""
    eps_s = 1e-16 if has_eps_s(optimizer) else None
    fixed = {"batch_size": 1024, "epochs": 12, "warmup_epochs": 1, "eps_s": eps_s}
    return SpikedImages(optimizer=optimizer, beta1=0.9, beta2=0.99, **{**fixed, **settings})


class Queue(NamedTuple):
    """Runs with bad batches, in all four cells."""

    make: Callable[..., Any]
    """`make(optimizer, **settings)` returns a recipe."""
    injections: tuple[str, ...]
    rates: tuple[float, ...]
    """The rates tried for each cell with seed 0, without bad batches, in a queue of their own; if one, it is known."""
    clipped: bool = True
    """Whether there are runs with clipping too."""


TEXT_INJECTIONS = ("none", "shuffled", "repeated", "scaled")
TEXT_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
TASKS = {
    "text": Queue(text_recipe, TEXT_INJECTIONS, TEXT_RATES),
    "text-short": Queue(partial(text_recipe, beta1=0.9, beta2=0.7), TEXT_INJECTIONS, TEXT_RATES, clipped=False),
    "images": Queue(image_recipe, ("none", "labels", "scaled"), (1e-3,)),
}
"""short: betas[1] < betas[0]^2, where the theorem on spikes bounds the updates of LaProp and MVN-Grad, but not those of
Adam."""
UNCLIPPED = "text-unclipped"
"""A queue without bad batches: what the order of momentum is worth if the norm of the gradient is not clipped."""
UNCLIPPED_SEEDS = (4, 5, 6, 7, 8, 9, 10, 11)
QUEUES = ("text-rates", "text", "text-short-rates", "text-short", "images", UNCLIPPED)
"""In the order in which they can run."""
INJECTION_NAMES = {
    "labels": "wrong labels",
    "scaled": f"loss times {SCALE:,.0f}",
    "shuffled": "shuffled tokens",
    "repeated": "repeated token",
}
RATES_SUFFIX = "-rates"


def protections(optimizer: str, clipped: bool = True) -> dict[str, dict[str, float | None]]:
    """What may stand between a bad batch and the weights, by name; only LaProp and MVN-Grad have a z_clip."""
    choices: dict[str, dict[str, float | None]] = {"no clipping": {}}
    if clipped:
        choices["norm clipping"] = {"clip": CLIP}
    if clipped and "z_clip" in RULES[optimizer].options:
        choices["z_clip"] = {"z_clip": Z_CLIP}
    return choices


def find_best_rates(task: str, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The rate of each cell with the lowest validation loss.

    Raises:
        InvalidInput: a run of the queue of rates is missing, or all of a cell diverged.
    """
    queue = TASKS[task]
    if len(queue.rates) == 1:
        return dict.fromkeys(COUPLED, queue.rates[0])
    losses = dict[str, dict[float, float]]()
    for recipe in _make_rate_runs(queue):
        if recipe.key not in runs:
            raise InvalidInput(f"run the queue {task}{RATES_SUFFIX} first: {recipe.key} is missing")
        run = runs[recipe.key]
        loss = run.get("validation_loss") if run["status"] == "finished" else None
        if loss is not None and math.isfinite(loss):
            losses.setdefault(recipe.optimizer, {})[recipe.lr] = loss
    if lost := [cell for cell in COUPLED if cell not in losses]:
        raise InvalidInput(f"all runs of {task}{RATES_SUFFIX} with {', '.join(lost)} diverged; try lower rates")
    return {cell: min(of_cell, key=of_cell.__getitem__) for cell, of_cell in losses.items()}


def _make_rate_runs(queue: Queue) -> list[Any]:
    return [queue.make(cell, lr=lr, seed=TUNING_SEED) for cell in COUPLED for lr in queue.rates]


def make_queue(name: str, runs: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """All recipes of a queue; most depend on the runs of a queue of rates, which must be complete."""
    if name == UNCLIPPED:
        return make_unclipped_runs(find_best_rates("text", runs))
    queue = TASKS[name.removesuffix(RATES_SUFFIX)]
    if name.endswith(RATES_SUFFIX):
        return _make_rate_runs(queue)
    return make_runs(queue.make, find_best_rates(name, runs), queue.injections, SEEDS, queue.clipped)


def make_unclipped_runs(best_rates: Mapping[str, float]) -> list[SpikedText]:
    """Each cell at its best rate, without clipping and with the norm clipped, seed by seed."""
    return [
        text_recipe(cell, seed=seed, lr=best_rates[cell], clip=clip)
        for seed in UNCLIPPED_SEEDS
        for cell in COUPLED
        for clip in (None, CLIP)
    ]


def make_runs(
    make: Callable[..., Any],
    best_rates: Mapping[str, float],
    injections: Sequence[str],
    seeds: Sequence[int],
    clipped: bool = True,
) -> list[Any]:
    """All runs of recipes that `make(optimizer, **settings)` returns, at multiples of the best rate of each cell.

    They go seed by seed, so that a queue that is cut leaves whole seeds. Runs that differ in rate and injection are
    neighbours: they share a captured step.
    """
    return [
        make(cell, seed=seed, lr=factor * best_rates[cell], injection=injection, **settings)
        for seed in seeds
        for cell in COUPLED
        for settings in protections(cell, clipped).values()
        for factor in RATE_FACTORS
        for injection in injections
    ]
