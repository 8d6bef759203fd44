"""What the report reads: the runs of the queues, in stores and in exported files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mvngrad_lab import store
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.experiments.spikes import recipes
from mvngrad_lab.experiments.spikes.compare import compare_all
from mvngrad_lab.report import ENVIRONMENT, Sources, TableResult, join_environments
from mvngrad_lab.store import read_rows

get_file_name = partial(store.get_queue_file, "spikes")


def read_runs(*roots: Path) -> dict[str, dict[str, Any]]:
    """Every finished run of this experiment, in stores and in exported files; the first that has a key is read.

    A run without the loss of every step, as in a bundle, cannot be compared and is left out.
    """
    runs: dict[str, dict[str, Any]] = {}
    names = {recipes.SpikedText.name, recipes.SpikedImages.name}
    for root in roots:
        for run in store.load_runs(root):
            if run.name in names:
                rows = read_rows(root / run.key / "metrics.jsonl")
                losses = [loss for row in rows for loss in row.get("losses", [])]
                if losses:
                    runs.setdefault(run.key, {**run.result, "losses": losses, "environment": run.environment})
        for path in (root / get_file_name(queue) for queue in recipes.QUEUES):
            for row in store.read_exported(path):
                result = {"status": row["status"], **row["metrics"], "losses": row["losses"], "environment": row}
                runs.setdefault(row["key"], result)
    return runs


def collect(sources: Sources) -> list[TableResult]:
    runs, tables = read_runs(*sources.folders), []
    for task in recipes.TASKS:
        try:
            queue, best_rates = recipes.make_queue(task, runs), recipes.find_best_rates(task, runs)
        except InvalidInput:  # the best rates are not known yet
            continue
        done = tuple(recipe.key for recipe in queue if recipe.key in runs)
        result = {
            "betas": [queue[0].beta1, queue[0].beta2],
            **compare_all(queue, runs, task.partition("-")[0], best_rates),
        }
        if done:
            tables.append(_make_table(task, runs, result, done, len(queue)))
    return [*tables, *_collect_unclipped(runs)]


def _collect_unclipped(runs: dict[str, dict[str, Any]]) -> list[TableResult]:
    """The final losses, by cell, whether the norm was clipped, and seed; None for a run that diverged."""
    try:
        queue = recipes.make_queue(recipes.UNCLIPPED, runs)
    except InvalidInput:  # the best rates are not known yet
        return []
    done, losses = [recipe for recipe in queue if recipe.key in runs], dict[str, Any]()
    for recipe in done:
        of_cell = losses.setdefault(recipe.optimizer, {"clipped": {}, "unclipped": {}})
        loss = runs[recipe.key].get("validation_loss") if runs[recipe.key]["status"] == "finished" else None
        of_cell["clipped" if recipe.clip else "unclipped"][str(recipe.seed)] = loss
    result = {"losses": losses, "done": len(done), "of": len(queue)}
    keys = tuple(recipe.key for recipe in done)
    return [_make_table(recipes.UNCLIPPED, runs, result, keys, len(queue))] if done else []


def _make_table(
    queue: str, runs: Mapping[str, Mapping[str, Any]], result: dict[str, Any], keys: tuple[str, ...], planned: int
) -> TableResult:
    """The record of the runs of a queue that are done, of `planned` in all."""
    environment = join_environments([runs[key].get("environment", {}) for key in keys], ENVIRONMENT)
    return TableResult(f"spikes-{queue}", {}, environment, result, keys, planned - len(keys))
