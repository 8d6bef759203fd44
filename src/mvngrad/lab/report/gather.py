"""Results that are made of many runs: one table of the report from the trainings behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mvngrad.lab.recipes.cifar100 import BATCH_SIZES, STATES, Cifar100, state_precision, table1
from mvngrad.lab.store import Run
from mvngrad.lab.targets import TARGETS

CELLS = {"Adam": "adam", "LaProp": "laprop", "AdaBelief": "adabelief", "MVN-Grad": "mvngrad"}
KEPT = ("test_accuracy", "train_accuracy", "seconds", "setup_seconds")


def gathered(runs: Sequence[Run]) -> list[Run]:
    """The runs, and what they add up to."""
    found = {run.key: run for run in runs}
    tables = (
        _table("table1", table1(), found, _cells),
        # Without a run of its own it would only say what Table 1 does.
        _table("state-precision", state_precision(), found, _states)
        if any(recipe.key in found for recipe in state_precision() if recipe.state_dtype != "float32")
        else None,
    )
    return [*runs, *(table for table in tables if table is not None)]


def worth_keeping(runs: Sequence[Run]) -> list[Run]:
    """What a repository should keep: the runs behind the tables, and what else took a GPU; no try-outs."""
    behind = {recipe.key for recipe in (*table1(), *state_precision())}
    return [run for run in runs if run.key in behind or (run.name in TARGETS and TARGETS[run.name].gpu)]


def _table(name: str, recipes: list[Cifar100], found: dict[str, Run], fill: Any) -> Run | None:
    """A run that stands for many, with what they share: settings, and devices and versions, all that they had."""
    done = [found[recipe.key] for recipe in recipes if recipe.key in found]
    if not done:
        return None
    settings = [recipe.settings for recipe in recipes]
    same = {key: value for key, value in settings[0].items() if len({str(each[key]) for each in settings}) == 1}
    environment = {
        key: ", ".join(sorted({str(run.environment.get(key)) for run in done})) for key in done[0].environment
    }
    result = {**fill(found), "done": len(done), "of": len(recipes), "data": done[0].result.get("data", "")}
    return Run(name, name, same, environment, result)


def _row(recipes: list[Cifar100], found: dict[str, Run], kept: Sequence[str]) -> dict[str, Any]:
    """Values over the seeds that are there."""
    mine = [found[recipe.key] for recipe in recipes if recipe.key in found]
    return {
        **{name: [run.result.get(name) for run in mine] for name in kept},
        "seeds": [run.recipe["seed"] for run in mine],
        "diverged": sum(run.result["status"] != "finished" for run in mine),
    }


def _cells(found: dict[str, Run]) -> dict[str, Any]:
    cells: dict[str, dict[str, Any]] = {}
    for batch in BATCH_SIZES:
        for cell, optimizer in CELLS.items():
            mine = [recipe for recipe in table1() if (recipe.batch_size, recipe.optimizer) == (batch, optimizer)]
            cells.setdefault(str(batch), {})[cell] = _row(mine, found, KEPT)
    return {"cells": cells}


def _states(found: dict[str, Run]) -> dict[str, Any]:
    kept = ("test_accuracy", "seconds", "state_bytes", "parameters")
    states = {
        state: _row([recipe for recipe in state_precision() if recipe.state_dtype == state], found, kept)
        for state in STATES
    }
    return {"states": states}
