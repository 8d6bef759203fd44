"""Results that are made of many runs: one table of the report from the trainings behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mvngrad.diagnostics.diagnosis import Diagnosis
from mvngrad_lab.experiments import find_experiments
from mvngrad_lab.recipe import DECOUPLED, TrainingRecipe
from mvngrad_lab.store import FinishedRun
from mvngrad_lab.tasks.cifar100.recipe import BATCH_SIZES, STATES, state_precision, table1
from mvngrad_lab.tasks.language.recipe import RATES, TUNED, Language, on_stand_in, rates, shortened, table2, tuned

CELLS = {"Adam": "adam", "LaProp": "laprop", "AdaBelief": "adabelief", "MVN-Grad": "mvngrad"}
VARIANCE, SECOND_MOMENT = ("AdaBelief", "MVN-Grad"), ("Adam", "LaProp")
KEPT = ("test_accuracy", "train_accuracy")
KEPT_OF_TEXT = (
    "validation_loss", "validation_perplexity", "wikitext103_loss", "wikitext103_perplexity", "train_loss",
    "loss_spikes", "norm_spikes", "nonfinite_steps", "curve",
)  # fmt: skip


def gathered(runs: Sequence[FinishedRun], monitors: Mapping[str, Diagnosis] | None = None) -> list[FinishedRun]:
    """The runs, and what they add up to; `monitors` has what those say that stood beside some of them."""
    found = {run.key: run for run in runs}
    tables = (
        _table("table1", table1(), found, _cells),
        # Without a run of its own it would only say what Table 1 does.
        _table("state-precision", state_precision(), found, _states)
        if any(recipe.key in found for recipe in state_precision() if recipe.state_dtype != "float32")
        else None,
        _table("table2", on_stand_in(), found, partial(_language, monitors or {})),
    )
    return [*runs, *(table for table in tables if table is not None)]


def worth_keeping(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """What a repository should keep: the runs behind the tables, and what else took a GPU; no try-outs."""
    behind = {recipe.key for recipe in (*table1(), *state_precision(), *on_stand_in())}
    on_gpu = {experiment.name for experiment in find_experiments().values() if experiment.gpu}
    return [run for run in runs if run.key in behind or run.name in on_gpu]


def _table(
    name: str, recipes: Sequence[TrainingRecipe], found: dict[str, FinishedRun], fill: Any
) -> FinishedRun | None:
    """A run that stands for many, with what they share: settings, and devices and versions, all that they had."""
    done = [found[recipe.key] for recipe in recipes if recipe.key in found]
    if not done:
        return None
    settings = [recipe.settings for recipe in recipes]
    same = {key: value for key, value in settings[0].items() if len({str(each[key]) for each in settings}) == 1}
    environment = {
        key: ", ".join(sorted({str(run.environment[key]) for run in done if key in run.environment}))
        for key in dict.fromkeys(key for run in done for key in run.environment)
    }
    data = "; ".join(sorted({run.result["data"] for run in done if "data" in run.result}))
    result = {**fill(found), "done": len(done), "of": len(recipes), "behind": [run.key for run in done], "data": data}
    return FinishedRun(name, name, same, environment, result)


def _row(recipes: Sequence[TrainingRecipe], found: dict[str, FinishedRun], kept: Sequence[str]) -> dict[str, Any]:
    """Values over the seeds that are there; the time of a run that shared its GPU says nothing and is None."""
    mine = [found[recipe.key] for recipe in recipes if recipe.key in found]
    values = {name: [run.result.get(name) for run in mine] for name in kept}
    values["seconds"] = [None if "beside" in run.environment else run.result["seconds"] for run in mine]
    return {
        **values,
        "seeds": [run.recipe["seed"] for run in mine],
        "to_come": len(recipes) - len(mine),
        "diverged": sum(run.result["status"] != "finished" for run in mine),
    }


def _cells(found: dict[str, FinishedRun]) -> dict[str, Any]:
    cells: dict[str, dict[str, Any]] = {}
    for batch in BATCH_SIZES:
        for cell, optimizer in CELLS.items():
            mine = [recipe for recipe in table1() if (recipe.batch_size, recipe.optimizer) == (batch, optimizer)]
            cells.setdefault(str(batch), {})[cell] = _row(mine, found, KEPT)
    return {"cells": cells}


def _states(found: dict[str, FinishedRun]) -> dict[str, Any]:
    kept = ("test_accuracy", "state_bytes", "parameters")
    states = {
        state: _row([recipe for recipe in state_precision() if recipe.state_dtype == state], found, kept)
        for state in STATES
    }
    return {"states": states}


def _language(monitors: Mapping[str, Diagnosis], found: dict[str, FinishedRun]) -> dict[str, Any]:
    """The 30M runs, the rates that were tried beside them, the runs at the best of these, and the 124M runs."""
    tried = {
        cell: {
            f"{lr:g}": _row([r for r in rates() if (r.optimizer, r.lr) == (optimizer, lr)], found, KEPT_OF_TEXT)
            for lr in RATES
        }
        for cell, optimizer in CELLS.items()
    }
    small = {
        name: {
            cell: _row([recipe for recipe in recipes if recipe.optimizer == optimizer], found, KEPT_OF_TEXT)
            for cell, optimizer in CELLS.items()
        }
        for name, recipes in (("cells", table2()), ("tuned", tuned()))
    }
    return {
        **small,
        "monitored": [_monitored(r, monitors[r.key]) for r in (*table2(), *shortened()) if r.key in monitors],
        "rates": tried,
        "best_rate": {cell: _best(row) for cell, row in tried.items()},
        "tuned_rate": {cell: f"{TUNED[optimizer]:g}" for cell, optimizer in CELLS.items()},
        "large": {
            f"{cell}W": _row([r for r in shortened() if r.optimizer == f"{optimizer}w"], found, KEPT_OF_TEXT)
            for cell, optimizer in CELLS.items()
        },
    }


def _monitored(recipe: Language, said: Diagnosis) -> dict[str, Any]:
    """Of the first group, which has the matrices, over the records that are judged: the last."""
    group = said.groups[0]
    return {
        "optimizer": group.trained_with + "W" * (recipe.optimizer in DECOUPLED),
        "model": recipe.model,
        "steps": said.steps,
        **{each.topic: [each.verdict, each.numbers.get("snr", each.numbers.get("share"))] for each in group.statements},
    }


def _best(tried: dict[str, dict[str, Any]]) -> str | None:
    """The rate of the lowest validation loss; None while one is to come. A run that diverged has lost."""
    if not all(row["seeds"] for row in tried.values()):
        return None
    losses = {lr: row["validation_loss"][0] for lr, row in tried.items() if not row["diverged"]}
    return min(losses, key=losses.__getitem__, default=None)
