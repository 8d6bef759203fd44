"""The runs of this experiment, from the files in results/ and the store, as the report reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from mvngrad_lab import store
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.experiments.floor import arms
from mvngrad_lab.recipe import COUPLED, TrainingRecipe
from mvngrad_lab.report import ENVIRONMENT, Sources, TableResult, join_environments
from mvngrad_lab.tasks.cifar100.recipe import Cifar100, paper

OLD_GRID_FILE = "sweep-cifar100-bs1024-scaled.json"
get_file_name = partial(store.get_queue_file, "floor")


class Run(NamedTuple):
    """What the report needs of a finished run."""

    result: Mapping[str, Any]
    environment: Mapping[str, Any]
    gradient_rms: Sequence[float | None] = ()
    """Root mean square of the last gradient of each epoch; older runs have none."""
    curve: Sequence[tuple[int, float]] = ()
    """Epoch and test accuracy at each evaluation; runs that no file of a queue has keep none."""


Runs = Mapping[str, Run]
"""By key."""
Recipes = Mapping[str, Sequence[TrainingRecipe]]
"""By the name of their arm."""


def read_runs(*roots: Path) -> dict[str, Run]:
    """Every finished run in stores and in exported files, by key; one trained again in a store is read from there."""
    runs = {run.key: Run(run.result, run.environment) for run in store.load_runs(*roots)}
    for root in roots:
        for path in (*sorted(root.glob(get_file_name("*"))), root / OLD_GRID_FILE):
            for row in store.read_exported(path):
                environment = {name: row[name] for name in ENVIRONMENT if name in row}
                result = {"status": row["status"], **row["metrics"]}
                if row["key"] in runs and runs[row["key"]].result != result:
                    continue
                curve = [(at["epoch"], at["test_accuracy"]) for at in row.get("curve", ()) if "test_accuracy" in at]
                runs[row["key"]] = Run(result, environment, row.get("gradient_rms", ()), curve)
    return runs


def get_accuracies(runs: Runs) -> dict[str, float]:
    """Test accuracy by key; a diverged run has 0, and so has a language model."""
    return {key: run.result.get("test_accuracy", 0.0) for key, run in runs.items()}


def read_accuracies(*roots: Path) -> dict[str, float]:
    return get_accuracies(read_runs(*roots))


def collect(sources: Sources) -> list[TableResult]:
    runs, tables = read_runs(*sources.folders), []
    new = {recipe.key for recipe in arms.grid_queue()}
    if new & runs.keys():
        tables.append(_collect_grid(runs))
    tables += [
        _collect_dial(runs),
        _collect_batch_128(runs),
        _collect_as_published(runs),
        _collect_beta_mean(runs),
    ]
    try:
        selected = arms.select_arms(get_accuracies(runs))
    except InvalidInput:  # the grid is not complete
        return [table for table in tables if table.run_keys]
    tables += [_collect_table(runs, selected), _collect_decay(runs, selected)]
    return [table for table in tables if table.run_keys]


def _make_table(
    name: str, runs: Runs, queue: Iterable[TrainingRecipe], shared: dict[str, Any], **result: Any
) -> TableResult:
    """The record of the runs of a queue, with these settings shared by all, and this result."""
    recipes = {recipe.key: recipe for recipe in queue}
    done = tuple(key for key in recipes if key in runs)
    environment = join_environments([runs[key].environment for key in done], ENVIRONMENT)
    left = len(recipes) - len(done)
    return TableResult(name, shared, environment, {**result, "done": len(done), "of": len(recipes)}, done, left)


def _get_value(runs: Runs, recipe: TrainingRecipe, metric: str = "test_accuracy") -> float | None:
    """A number of the recipe's run; None if it is to come or has diverged."""
    return runs[recipe.key].result.get(metric) if recipe.key in runs else None


def _by_seed(runs: Runs, recipes: Iterable[Any]) -> dict[str, float | None]:
    """Test accuracy by seed of the runs that are done; None has diverged."""
    return {str(recipe.seed): _get_value(runs, recipe) for recipe in recipes if recipe.key in runs}


def _count_done(runs: Runs, grid: Recipes) -> dict[str, list[int]]:
    """By arm, how many runs of its grid are done, and how many there are."""
    return {arm: [sum(recipe.key in runs for recipe in recipes), len(recipes)] for arm, recipes in grid.items()}


def _best(runs: Runs, recipes: Sequence[TrainingRecipe], metric: str = "test_accuracy") -> dict[str, Any]:
    """The best value among recipes, its rate, and how many are done."""
    sign = 1 if metric.endswith("accuracy") else -1
    values = [(value, recipe.lr) for recipe in recipes if (value := _get_value(runs, recipe, metric)) is not None]
    best, lr = max(values, key=lambda pair: sign * pair[0]) if values else (None, None)
    return {"best": best, "lr": lr, "done": sum(recipe.key in runs for recipe in recipes), "of": len(recipes)}


def _describe_settings(recipe: Any) -> dict[str, Any]:
    return {name: getattr(recipe, name) for name in ("lr", "beta1", "beta2", "eps", "eps_s", "weight_decay")}


def _collect_grid(runs: Runs) -> TableResult:
    grid, accuracies = arms.grid(), get_accuracies(runs)
    if all(recipe.key in accuracies for recipes in grid.values() for recipe in recipes):
        for arm, recipe in zip(grid, arms.double_rate_runs(arms.select(accuracies, grid)), strict=True):
            grid[arm].append(recipe)  # the 17th configuration
    rows = {
        arm: [
            {"lr": r.lr, "beta1": r.beta1, "beta2": r.beta2, "test_accuracy": accuracies[r.key]}
            for r in recipes
            if r.key in accuracies
        ]
        for arm, recipes in grid.items()
    }
    queue = [recipe for recipes in grid.values() for recipe in recipes]
    return _make_table("floor", runs, queue, {"batch_size": 1024, "epochs": 30, "seed": 0}, arms=rows)


def _collect_table(runs: Runs, selected: arms.Selected) -> TableResult:
    """The nine arms at 200 epochs, and Table 1's runs where an arm selected other settings than the paper."""
    seeds = (*arms.SEEDS, *arms.MORE_SEEDS)
    published = {
        arm: _by_seed(runs, [paper(arms.GRID_ARMS[arm], 1024, seed) for seed in (0, *seeds)])
        for arm in arms.OLD_ARMS
        if arms.long_run(selected[arm], 1) != paper(arms.GRID_ARMS[arm], 1024, 1)
    }
    return _make_table(
        "floor-table",
        runs,
        [*arms.table_runs(selected), *arms.more_seeds_runs(selected)],
        {"batch_size": 1024, "epochs": 200},
        arms={arm: _by_seed(runs, arms.table_runs({arm: recipe}, seeds)) for arm, recipe in selected.items()},
        selected={arm: _describe_settings(recipe) for arm, recipe in selected.items()},
        published=published,
        decoupled={
            arm: _by_seed(runs, arms.table_runs({arm: recipe}))
            for arm, recipe in _select_decay("decoupled", runs, selected).items()
        },
        curves={
            arm: [runs[r.key].curve for r in arms.table_runs({arm: recipe}, seeds) if _has_curve(runs.get(r.key))]
            for arm, recipe in selected.items()
        },
    )


def _has_curve(run: Run | None) -> bool:
    """Whether the run has an accuracy at every evaluation; a diverged one ends early."""
    return run is not None and bool(run.curve) and run.result["status"] == "finished"


def _collect_decay(runs: Runs, selected: arms.Selected) -> TableResult:
    grid, chosen = dict[str, list[Cifar100]](), dict[str, Cifar100]()
    for name in arms.DECAYS:
        grid |= arms.decay_grid(name, selected)
        chosen |= _select_decay(name, runs, selected)
    compared = [f"{cell}-{floor}" for cell in ("adam", "mvngrad") for floor in ("floor", "none")]
    # With decay: the same rates and betas, which the grid has.
    with_decay = {arm: [r for r in arms.grid()[arm] if r.beta1 == selected[arm].beta1] for arm in compared}
    no_decay: Recipes = {
        arm: [r for r in arms.no_decay_runs(selected) if _get_epsilon(r) == _get_epsilon(selected[arm])]
        for arm in compared
    }
    queue = [*(r for recipes in grid.values() for r in recipes), *arms.table_runs(chosen)]
    return _make_table(
        "floor-decay",
        runs,
        [*queue, *arms.no_decay_runs(selected)],
        {"batch_size": 1024},
        arms={
            arm: _by_seed(runs, arms.table_runs({arm: recipe}))
            for arm, recipe in {**{arm: selected[arm] for arm in compared}, **chosen}.items()
        },
        selected={arm: _describe_settings(recipe) for arm, recipe in chosen.items()},
        grid=_count_done(runs, grid),
        with_decay={arm: _best(runs, recipes) for arm, recipes in with_decay.items()},
        no_decay={arm: _best(runs, recipes) for arm, recipes in no_decay.items()},
    )


def _select_decay(name: str, runs: Runs, selected: arms.Selected) -> dict[str, Cifar100]:
    """The selected recipes of a queue with another weight decay; empty if its grid is not complete."""
    try:
        return arms.select(get_accuracies(runs), arms.decay_grid(name, selected))
    except InvalidInput:
        return {}


def _get_epsilon(recipe: TrainingRecipe) -> tuple[Any, ...]:
    """The optimizer and its epsilon, which tell the arms of a grid apart."""
    return recipe.optimizer, recipe.eps, recipe.eps_s


def _collect_dial(runs: Runs) -> TableResult:
    images, language = arms.dial(), arms.language_dial()
    return _make_table(
        "floor-dial",
        runs,
        [*images, *language],
        {"seed": 0},
        images=_fill_dial(runs, images, arms.DIAL, "test_accuracy"),
        language=_fill_dial(runs, language, arms.LANGUAGE_DIAL, "validation_loss"),
    )


def _fill_dial(
    runs: Runs, recipes: Sequence[TrainingRecipe], floors: Mapping[float, tuple[float, ...]], metric: str
) -> dict[str, Any]:
    """For each cell and floor the best of its rates; at the last floor, SGD, one run is all four cells.

    `gradient_rms` is the median over epochs of the best runs of all cells at the lowest floor at which they kept it,
    or None if none did: most stored runs without a floor are older and did not. `gradient_rms_by_floor` has all floors
    at which they did.
    """
    chunks = iter(recipes)  # in the order of arms.dial: floors, cells, rates
    cells: dict[str, dict[str, Any]] = {cell: {} for cell in (*COUPLED, "sgd")}
    sizes: dict[str, list[float]] = {f"{floor:g}": [] for floor in sorted(floors)}
    for floor, rates in floors.items():
        for cell in COUPLED if floor < 1 else ("sgd",):
            some = [next(chunks) for _ in rates]
            best = cells[cell][f"{floor:g}"] = {**_best(runs, some, metric), "rates": list(rates)}
            is_whole = best["done"] == len(some)
            kept = [runs[recipe.key].gradient_rms for recipe in some if is_whole and recipe.lr == best["lr"]]
            sizes[f"{floor:g}"] += [size for each in kept for size in each if size is not None]
    medians = {floor: median(of) for floor, of in sizes.items() if of}
    return {"cells": cells, "gradient_rms": next(iter(medians.values()), None), "gradient_rms_by_floor": medians}


def _collect_batch_128(runs: Runs) -> TableResult:
    grid = arms.batch_128_grid()
    try:
        selected = arms.select(get_accuracies(runs), grid)
    except InvalidInput:
        selected = {}
    rows = {arm: _by_seed(runs, arms.table_runs({arm: recipe})) for arm, recipe in selected.items()}
    queue = [*(r for recipes in grid.values() for r in recipes), *arms.table_runs(selected)]
    return _make_table(
        "floor-batch-128",
        runs,
        queue,
        {"batch_size": 128, "epochs": 200},
        arms=rows,
        grid=_count_done(runs, grid),
        rates={arm: recipe.lr for arm, recipe in selected.items()},
    )


def _collect_as_published(runs: Runs) -> TableResult:
    recipes = arms.as_published_runs()
    rows: dict[str, dict[str, Any]] = {"1024": {}, "128": {}}
    for recipe in recipes:
        mixed, clean = (_get_value(runs, recipe, name) for name in ("train_accuracy_mixed", "train_accuracy"))
        rows[str(recipe.batch_size)][recipe.optimizer] = {"mixed": mixed, "clean": clean, "done": recipe.key in runs}
    # The other seeds are those of the order of Table 1; `keep_runs` keeps what a table has.
    everything = [*recipes, *arms.as_published_runs((4, 5))]
    return _make_table("floor-as-published", runs, everything, {"epochs": 200}, batches=rows)


def _collect_beta_mean(runs: Runs) -> TableResult:
    """Runs with beta_mean = beta2, and those with the default that differ in nothing else."""
    pairs: dict[str, dict[str, Any]] = {}
    kinds = {"with a floor": ("cifar100", 1e-8), "without a floor": ("cifar100", 1e-16), "language": ("wikitext103", 0)}
    for kind, (name, eps_s) in kinds.items():
        changed = [r for r in arms.beta_mean_runs() if (r.name, r.eps_s) == (name, eps_s)]
        default = [dataclasses.replace(recipe, beta_mean=None) for recipe in changed]
        metric = "validation_loss" if name == "wikitext103" else "test_accuracy"
        pairs[kind] = {"changed": _best(runs, changed, metric), "default": _best(runs, default, metric)}
    return _make_table("floor-beta-mean", runs, arms.beta_mean_runs(), {"seed": 0}, pairs=pairs)
