"""The recipes of every arm, in the order in which they run. README.md says why. Standard library only.

The floor is what keeps the divisor from below: eps for Adam and LaProp, sqrt(eps_s / (1 - beta2)) for AdaBelief and
MVN-Grad.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.recipe import COUPLED, OptimizerName, TrainingRecipe, has_eps_s
from mvngrad_lab.tasks.cifar100.recipe import Cifar100, paper
from mvngrad_lab.tasks.language.recipe import STAND_IN, WikiText103, wikitext103

R = TypeVar("R", bound=TrainingRecipe)

BETAS = ((0.7, 0.99), (0.8, 0.999), (0.9, 0.99), (0.95, 0.999))
RATES = (1e-3, 4e-3, 1e-2, 1e-4)
"""Of the grid; the lowest one runs last."""
FLOOR = {False: {"eps": 1e-3}, True: {"eps_s": 1e-8}}
NO_FLOOR = {False: {"eps": 1e-8}, True: {"eps_s": 1e-16}}
"""By whether the cell normalizes by the variance. eps_s = 1e-8 is a floor of 1e-3 at beta2 = 0.99, 3.2e-3 at 0.999."""
SGD_FLOOR: dict[str, Any] = {"beta2": 0.99, "eps_s": 0.01}
"""A floor of 1, a thousand times a gradient: MVN-Grad is SGD at rate lr, with momentum beta1 and dampening beta1."""
SGD_SCALE = 1e3
"""An arm with a floor of 1e-3 tends to SGD at lr / 1e-3, so that both have the same grid of rates."""
SEEDS = (1, 2, 3)
"""Of the runs at 200 epochs: seed 0 was seen in the pilot and selects the settings."""
MORE_SEEDS = (4, 5, 6)
"""Of the same runs, which equivalence needs."""

GRID_ARMS: dict[str, OptimizerName] = {f"{cell}-{floor}": cell for floor in ("floor", "none") for cell in COUPLED}
NEW_ARMS = ("adam-floor", "laprop-floor", "adabelief-none", "mvngrad-none")
"""The paper has the other epsilon for these optimizers; `grid_queue` runs their grid."""
OLD_ARMS = tuple(arm for arm in GRID_ARMS if arm not in NEW_ARMS)
"""The paper's epsilon; their grid is the sweep cifar100-bs1024-scaled."""
Selected = Mapping[str, Cifar100]
"""The best recipe of each arm's grid, by the arm's name."""


def short_run(optimizer: OptimizerName, batch_size: int = 1024, **settings: Any) -> Cifar100:
    """A run of the grid: Table 1's settings but for those named, 30 epochs, one of warm-up, seed 0."""
    return dataclasses.replace(paper(optimizer, batch_size), epochs=30, warmup_epochs=1, **settings)


def get_floor(arm: str) -> dict[str, Any]:
    """The epsilon of one of the eight arms."""
    return (FLOOR if arm.endswith("-floor") else NO_FLOOR)[has_eps_s(GRID_ARMS[arm])]


def grid_recipe(arm: str, beta1: float, beta2: float, lr: float) -> Cifar100:
    """One configuration of one of the eight arms."""
    return short_run(GRID_ARMS[arm], beta1=beta1, beta2=beta2, lr=lr, **get_floor(arm))


def sgd_recipe(momentum: float, rate: float) -> Cifar100:
    """SGD with momentum, as MVN-Grad under a floor of 1, which a CUDA graph can capture."""
    return short_run("mvngrad", beta1=momentum, lr=rate, **SGD_FLOOR)


def grid() -> dict[str, list[Cifar100]]:
    """16 configurations of each of the nine arms."""
    arms = {arm: [grid_recipe(arm, *betas, lr) for betas in BETAS for lr in RATES] for arm in (*NEW_ARMS, *OLD_ARMS)}
    return {**arms, "sgd": [sgd_recipe(beta1, lr * SGD_SCALE) for beta1, _ in BETAS for lr in RATES]}


def grid_queue() -> list[Cifar100]:
    """The new runs of the grid: three rates of four arms, SGD, then the lowest rate.

    Arms take turns at each pair of betas, so that a queue that is cut leaves all of them with as many runs. Runs that
    differ in the rate alone are neighbours: they share a captured step.
    """
    *rates, lowest = RATES
    first = [grid_recipe(arm, *betas, lr) for betas in BETAS for arm in NEW_ARMS for lr in rates]
    last = [grid_recipe(arm, *betas, lowest) for betas in BETAS for arm in NEW_ARMS]
    return [*first, *grid()["sgd"], *last]


def select(accuracies: Mapping[str, float], grids: Mapping[str, list[Cifar100]]) -> dict[str, Cifar100]:
    """The recipe of each grid with the highest test accuracy, by the recipes' keys; of equals, the first in the grid.

    Raises:
        InvalidInput: a run of a grid is missing. A choice among some would favour what ran first.
    """
    missing = [recipe.key for recipes in grids.values() for recipe in recipes if recipe.key not in accuracies]
    if missing:
        raise InvalidInput(
            f"{len(missing)} runs of the grid are missing, the first is {missing[0]}; run the grid first"
        )
    return {arm: max(recipes, key=lambda recipe: accuracies[recipe.key]) for arm, recipes in grids.items()}


def double_rate_runs(selected: Selected) -> list[Cifar100]:
    """One more run of each arm at twice its selected rate: the best of several arms is at the end of the grid."""
    return [dataclasses.replace(recipe, lr=2 * recipe.lr) for recipe in selected.values()]


def long_run(recipe: Cifar100, seed: int) -> Cifar100:
    """A selected configuration as Table 1 runs it: 200 epochs, 5 of warm-up."""
    return dataclasses.replace(recipe, epochs=200, warmup_epochs=5, seed=seed)


def table_runs(selected: Selected, seeds: tuple[int, ...] = SEEDS) -> list[Cifar100]:
    """Each arm as selected, at 200 epochs: seed by seed, so that a queue that is cut leaves whole seeds."""
    return [long_run(recipe, seed) for seed in seeds for recipe in selected.values()]


def more_seeds_runs(selected: Selected) -> list[Cifar100]:
    """Three more seeds of the eight arms, then of SGD."""
    eight = {arm: recipe for arm, recipe in selected.items() if arm != "sgd"}
    return [*table_runs(eight, MORE_SEEDS), *table_runs({"sgd": selected["sgd"]}, MORE_SEEDS)]


def as_published_runs(seeds: tuple[int, ...] = (3,)) -> list[Cifar100]:
    """New seeds of Table 1's settings at both batch sizes: seed 3 for the train accuracy on mixed images, 4 and 5 for
    the order of Table 1, which needs six. One batch size follows the other: an interrupted queue leaves one complete.
    """
    return [paper(cell, batch_size, seed) for batch_size in (1024, 128) for seed in seeds for cell in COUPLED]


DECAYS: dict[str, tuple[str, tuple[float, ...]]] = {
    "decoupled": ("w-none", (0.05, 0.2, 1.0, 5.0)),
    "coupled": ("-tuned", (2e-5, 6e-5, 2e-4, 5e-4)),
    "decoupled-floor": ("w-floor", (0.05, 0.2, 0.5, 1.0)),
}
"""By queue: the ending of its arms' names, and the coefficients tried. -tuned: coupled decay without a floor."""


def decay_grid(name: str, selected: Selected) -> dict[str, list[Cifar100]]:
    """Adam and MVN-Grad with another weight decay: four rates and four coefficients, at the betas of the arm with
    coupled decay of 5e-4 and the same floor. For coupled decay the setting of that arm is a candidate too.
    """
    ending, coefficients = DECAYS[name]
    grids = {}
    for cell in ("adam", "mvngrad"):
        base = selected[f"{cell}-floor" if name == "decoupled-floor" else f"{cell}-none"]
        optimizer = cell if name == "coupled" else f"{cell}w"
        grids[f"{cell}{ending}"] = [
            dataclasses.replace(base, optimizer=optimizer, lr=lr, weight_decay=coefficient)
            for coefficient in coefficients
            for lr in RATES
        ]
        if name == "coupled":
            grids[f"{cell}{ending}"].append(base)
    return grids


def no_decay_runs(selected: Selected) -> list[Cifar100]:
    """Adam and MVN-Grad without weight decay, with and without a floor: four rates at the betas of the decayed arm."""
    return [
        dataclasses.replace(selected[f"{cell}-{floor}"], weight_decay=0.0, lr=lr)
        for floor in ("floor", "none")
        for cell in ("adam", "mvngrad")
        for lr in RATES
    ]


def with_floor(recipe: R, floor: float) -> R:
    """The recipe with this floor under its divisor."""
    if not has_eps_s(recipe.optimizer):
        return dataclasses.replace(recipe, eps=floor)
    assert recipe.beta2 is not None
    return dataclasses.replace(recipe, eps_s=float(f"{floor**2 * (1 - recipe.beta2):.6g}"))


DIAL: dict[float, tuple[float, ...]] = {
    0.0: (4e-4, 1e-3, 4e-3),
    1e-5: (4e-4, 1e-3, 4e-3),
    1e-4: (1e-3, 4e-3, 1e-2),
    1e-3: (4e-3, 1e-2, 2.5e-2),
    1e-2: (4e-2, 1e-1, 2.5e-1),
    1.0: (4.0, 10.0, 25.0),
}
"""Floors, and the rates tried at each, on CIFAR-100. At 1.0 all four cells are SGD, so that one of them is run."""
LANGUAGE_DIAL: dict[float, tuple[float, ...]] = {
    0.0: (1e-3, 3e-3, 1e-2),
    1e-6: (1e-3, 3e-3, 1e-2),
    1e-5: (1e-3, 3e-3, 1e-2),
    1e-4: (1e-3, 3e-3, 1e-2, 3e-2),
    1e-3: (3e-3, 1e-2, 3e-2, 1e-1),
    1.0: (3.0, 10.0, 30.0, 100.0),
}
"""The same for GPT-2 30M on the stand-in text. The lowest of four rates was added where the best of three was at the
end for some cell.
"""


def dial() -> list[Cifar100]:
    """CIFAR-100 at 30 epochs, betas (0.7, 0.99), over floors and rates."""
    return _dial(DIAL, lambda cell: grid_recipe(f"{cell}-none", 0.7, 0.99, 1e-3))


def language_dial() -> list[WikiText103]:
    """GPT-2 30M, 1,000 steps on the stand-in text, betas (0.95, 0.99), over floors and rates."""
    return _dial(
        LANGUAGE_DIAL,
        lambda cell: dataclasses.replace(wikitext103(cell), text=STAND_IN, steps=1_000, warmup_steps=200),
    )


def beta_mean_runs() -> list[TrainingRecipe]:
    """MVN-Grad with beta_mean = beta2: CIFAR-100 with and without a floor, and the language model, at the rates and
    betas of runs with the default that the grid and the language dial have.
    """
    images = [grid_recipe(arm, 0.7, 0.99, lr) for arm in ("mvngrad-floor", "mvngrad-none") for lr in RATES]
    language = [recipe for recipe in language_dial() if (recipe.optimizer, recipe.eps_s) == ("mvngrad", 0.0)]
    return [dataclasses.replace(recipe, beta_mean=recipe.beta2) for recipe in (*images, *language)]


def _dial(floors: Mapping[float, tuple[float, ...]], make: Callable[[OptimizerName], R]) -> list[R]:
    """`make` returns the recipe of a cell without a floor."""
    runs = []
    for floor, rates in floors.items():
        for cell in COUPLED if floor < 1 else COUPLED[-1:]:
            base = with_floor(make(cell), floor) if floor else make(cell)
            runs += [dataclasses.replace(base, lr=lr) for lr in rates]
    return runs


MNIST_SEEDS = (6, 7, 8, 9, 10)
"""Of the dial on MNIST; seeds 1 to 5 were seen before its rule was written."""
EPS_ARMS = ("adabelief-eps", "mvngrad-eps")
"""On MNIST: the variance with a floor that is eps, outside the root, as in Adam and LaProp, and not eps_s."""
MNIST_TABLE_SEEDS = tuple(range(21, 121))
"""Of the eight arms on MNIST; seeds 11 to 20 select their rates."""

BATCH_128_RATES = (5e-4, 1e-3, 5e-3, 1e-2, 2e-4)
"""The paper's at this batch size. The last was added because the lowest was the best without a floor."""


BATCH_128_ARMS = tuple(arm for arm, cell in GRID_ARMS.items() if cell in ("adam", "mvngrad"))


def batch_128_grid() -> dict[str, list[Cifar100]]:
    """Four arms at batch 128 and 30 epochs, at the betas that the paper selected there for the cell."""
    return {
        arm: [short_run(GRID_ARMS[arm], 128, lr=lr, **get_floor(arm)) for lr in BATCH_128_RATES]
        for arm in BATCH_128_ARMS
    }


# Queues


def select_arms(accuracies: Mapping[str, float]) -> dict[str, Cifar100]:
    """The selected recipe of each of the nine arms: the best of its 16, or the 17th at twice the rate if that is
    better. Raises InvalidInput if one of these runs is missing.
    """
    selected = select(accuracies, grid())
    for arm, recipe in zip(selected, double_rate_runs(selected), strict=True):
        if recipe.key not in accuracies:
            raise InvalidInput(f"{arm} has no run at twice its rate; run the queue double-rate first")
        if accuracies[recipe.key] > accuracies[selected[arm].key]:
            selected[arm] = recipe
    return selected


def make_queue(name: str, accuracies: Mapping[str, float]) -> Sequence[TrainingRecipe]:
    """The runs of a queue in their order; most depend on the results of a grid, which must be complete."""
    if name in FIXED:
        return FIXED[name]()
    if name == "batch-128-grid":
        return _flatten(batch_128_grid())
    if name == "batch-128":
        return table_runs(select(accuracies, batch_128_grid()))
    if name == "double-rate":
        return double_rate_runs(select(accuracies, grid()))
    selected = select_arms(accuracies)
    if name == "table":
        return table_runs(selected)
    if name == "more-seeds":
        return more_seeds_runs(selected)
    if name == "no-decay":
        return no_decay_runs(selected)
    decays = decay_grid(name.removesuffix("-grid"), selected)
    return _flatten(decays) if name.endswith("-grid") else table_runs(select(accuracies, decays))


def _flatten(grid: Mapping[str, list[Any]]) -> list[Any]:
    return [recipe for recipes in grid.values() for recipe in recipes]


FIXED: dict[str, Callable[[], Sequence[TrainingRecipe]]] = {
    "grid": grid_queue,
    "dial": dial,
    "language-dial": language_dial,
    "as-published": as_published_runs,
    "as-published-more": lambda: as_published_runs((4, 5)),
    "beta-mean": beta_mean_runs,
}
"""The queues that depend on no result."""
QUEUES = (
    "grid", "double-rate", "table", "more-seeds", "decoupled-grid", "decoupled", "no-decay", "coupled-grid", "coupled",
    "decoupled-floor-grid", "decoupled-floor", "batch-128-grid", "batch-128", "as-published", "dial", "language-dial",
    "beta-mean", "as-published-more",
)  # fmt: skip
"""In the order in which they can run."""
