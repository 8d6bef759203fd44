"""Each run with bad batches beside the run without them that is otherwise the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from statistics import fmean, median
from typing import Any

from mvngrad_lab.experiments.spikes import recipes

TOLERANCE, WINDOW = 0.05, 10
"""A run has recovered when its mean loss over WINDOW steps stays at most TOLERANCE above that of the run without."""
SHOWN = 100
"""Steps after an event that the figure shows."""
FINAL = {"text": ("validation_loss", 1.0), "images": ("test_accuracy", -1.0), "mnist": ("test_loss", 1.0)}
"""The metric in which damage is measured, and its sign: damage is positive."""

Runs = Mapping[str, Mapping[str, Any]]
"""By key: status, metrics, and the loss of every step."""


def compare_all(queue: Sequence[Any], runs: Runs, task: str, best_rates: Mapping[str, float]) -> dict[str, Any]:
    """The comparison of each run that is done with its run without bad batches, and the excess of the loss after an
    event: its mean over WINDOW steps, as a median over events and seeds, by injection, rate and optimizer, of runs
    without clipping. `best_rates` are those of each cell.
    """
    rows, means = [], dict[str, dict[str, dict[str, list[list[float]]]]]()
    for recipe in queue:
        clean = runs.get(dataclasses.replace(recipe, injection="none").key)
        if recipe.injection == "none" or recipe.key not in runs or clean is None:
            continue
        kinds = recipes.protections(recipe.optimizer)
        given = {name: value for name in ("clip", "z_clip") if (value := getattr(recipe, name)) is not None}
        row = {
            "cell": recipe.optimizer,
            "protection": next(name for name, settings in kinds.items() if settings == given),
            "rate": f"{recipe.lr / best_rates[recipe.optimizer]:g}x",
            "injection": recipe.injection,
            "seed": recipe.seed,
            **compare(recipe, runs[recipe.key], clean, task),
        }
        excess = row.pop("excess")
        if not given:
            cells = means.setdefault(recipe.injection, {}).setdefault(row["rate"], {})
            cells.setdefault(recipe.optimizer, []).extend(average(each) for each in excess)
        rows.append(row)
    shown = {
        injection: {
            rate: {cell: [median(column) for column in zip(*each, strict=True)] for cell, each in cells.items() if each}
            for rate, cells in rates.items()
        }
        for injection, rates in means.items()
    }
    done = sum(recipe.key in runs for recipe in queue)
    return {"rows": rows, "mean_excess": shown, "done": done, "of": len(queue)}


def compare(recipe: Any, run: Mapping[str, Any], clean: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Mean steps to recovery over events, damage in the final metric, and the excess of the loss after each event.

    None stands for an infinite number: the run diverged. Nothing can be compared with a clean run that diverged.
    """
    metric, sign = FINAL[task]
    diverged, comparable = run["status"] != "finished", clean["status"] == "finished"
    row: dict[str, Any] = {"diverged": diverged, "comparable": comparable, "recovery": None, "damage": None}
    if diverged or not comparable:
        return {**row, "excess": []}
    losses, steps = run["losses"], len(clean["losses"])
    difference = [
        a - b if a is not None and b is not None and isfinite(a - b) else inf
        for a, b in zip(losses, clean["losses"], strict=True)
    ]
    bad = sorted(recipes.find_bad_steps(recipe, steps))
    events = recipes.find_events(recipe.seed, steps)
    times, excess = [], []
    for event, end in zip(events, [*events[1:], steps], strict=True):
        start = max(step for step in bad if event <= step < end) + 1
        times.append(find_recovery(difference[start:end]))
        excess.append(difference[start : start + SHOWN])
    damage = sign * (run[metric] - clean[metric])
    whole = [part for part in excess if len(part) == SHOWN]
    return {**row, "recovery": fmean(times), "damage": damage, "excess": whole}


def average(difference: Sequence[float]) -> list[float]:
    """The mean over WINDOW steps from each step on."""
    return [fmean(difference[start : start + WINDOW]) for start in range(len(difference) - WINDOW + 1)]


def find_recovery(difference: Sequence[float]) -> int:
    """Steps until the mean of the next WINDOW differences is within TOLERANCE and stays so; all if it never does.

    Damage may come late: momentum that is divided by the root as it falls again.

    >>> find_recovery([1.0] * 5 + [0.0] * 20), find_recovery([0.0] * 12 + [1.0] * 5 + [0.0] * 20)
    (5, 17)
    >>> find_recovery([1.0] * 30), find_recovery([0.0] * 30)
    (30, 0)
    """
    means = average(difference)
    late = [start for start, mean in enumerate(means) if mean > TOLERANCE]
    if late and late[-1] == len(means) - 1:
        return len(difference)
    return late[-1] + 1 if late else 0
