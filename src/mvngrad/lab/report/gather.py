"""Results that are made of many runs: one table of the paper from the trainings behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mvngrad.lab.recipes.cifar100 import SELECTED, Cifar100, paper
from mvngrad.lab.store import Run

SEEDS = (0, 1, 2)
CELLS = {"Adam": "adam", "LaProp": "laprop", "AdaBelief": "adabelief", "MVN-Grad": "mvngrad"}
BATCHES = (128, 1024)
KEPT = ("test_accuracy", "train_accuracy", "seconds", "setup_seconds")


def table1() -> list[Cifar100]:
    """The 24 runs of Table 1, seeds innermost: neighbours share what is compiled and captured."""
    return [paper(optimizer, batch, seed) for batch in BATCHES for optimizer in CELLS.values() for seed in SEEDS]  # type: ignore[arg-type]


def gathered(runs: Sequence[Run]) -> list[Run]:
    """The runs, and what they add up to."""
    wanted, found = {recipe.key: recipe for recipe in table1()}, {run.key: run for run in runs}
    done = [found[key] for key in wanted if key in found]
    if not done:
        return list(runs)
    cells: dict[str, dict[str, Any]] = {}
    for batch in BATCHES:
        for cell, optimizer in CELLS.items():
            mine = [
                found[k] for k, r in wanted.items() if (r.batch_size, r.optimizer) == (batch, optimizer) and k in found
            ]
            row: dict[str, Any] = {name: [run.result.get(name) for run in mine] for name in KEPT}
            row |= {
                "seeds": [run.recipe["seed"] for run in mine],
                "diverged": sum(r.result["status"] != "finished" for r in mine),
            }
            cells.setdefault(str(batch), {})[cell] = row
    recipe = {name: value for name, value in done[0].recipe.items() if name not in _varied()}
    result = {"cells": cells, "done": len(done), "of": len(wanted), "data": done[0].result.get("data", "")}
    # What several runs share, or all that they had.
    environment = {
        name: ", ".join(sorted({str(run.environment.get(name)) for run in done})) for name in done[0].environment
    }
    return [*runs, Run("table1", "table1", recipe, environment, result)]


def _varied() -> set[str]:
    """The fields in which the runs of the table differ."""
    settings = [recipe.settings for recipe in table1()]
    return {name for name in settings[0] if len({str(each[name]) for each in settings}) > 1}


assert {(optimizer, batch) for optimizer in CELLS.values() for batch in BATCHES} == SELECTED.keys()
