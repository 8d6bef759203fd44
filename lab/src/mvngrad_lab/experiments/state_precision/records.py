"""The tables of state formats from the trainings that are done."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from mvngrad_lab import store
from mvngrad_lab.experiments.state_precision import arms
from mvngrad_lab.recipe import StateDtype
from mvngrad_lab.report import ENVIRONMENT, MakeRow, Row, Sources, TableResult, join_environments, make_table
from mvngrad_lab.tasks.cifar100.recipe import Cifar100, paper

SEEDS = (0, 1, 2)
STATES: tuple[StateDtype, ...] = ("float32", "bf16", "int8")


def state_precision() -> list[Cifar100]:
    """MVN-Grad at batch 1024 with its state in each precision; the runs in float32 are also runs of Table 1."""
    return [dataclasses.replace(paper("mvngrad", 1024, seed), state_dtype=state) for state in STATES for seed in SEEDS]


def collect(sources: Sources) -> list[TableResult]:
    return [*_collect_200_epochs(sources), *_collect_queues(sources.folders)]


def _collect_200_epochs(sources: Sources) -> list[TableResult]:
    """The runs with float32 state are of Table 1; without another one there is nothing to compare them with."""
    recipes = state_precision()
    if not any(recipe.key in sources.runs for recipe in recipes if recipe.state_dtype != "float32"):
        return []

    def fill(make_row: MakeRow) -> dict[str, dict[str, Row]]:
        return {"states": {state: make_row([r for r in recipes if r.state_dtype == state]) for state in STATES}}

    return make_table("state-precision", recipes, sources, ("test_accuracy", "state_bytes", "parameters"), fill)


# The queues

METRICS = {"images": "test_accuracy", "adamw": "validation_loss"}
get_file_name = partial(store.get_queue_file, "state-precision")


def read_runs(*roots: Path) -> dict[str, dict[str, Any]]:
    """Settings, result and environment of every finished run of the queues, in stores and in exported files."""
    runs: dict[str, dict[str, Any]] = {}
    for root in roots:
        for run in store.load_runs(root):
            runs.setdefault(run.key, {"settings": run.recipe, "result": run.result, "environment": run.environment})
        for path in (root / get_file_name(queue) for queue in arms.QUEUES):
            for row in store.read_exported(path):
                result = {"status": row["status"], **row["metrics"]}
                runs.setdefault(row["key"], {"settings": row["settings"], "result": result, "environment": row})
    return runs


def _collect_queues(folders: tuple[Path, ...]) -> list[TableResult]:
    runs, tables = read_runs(*folders), []
    settings = {key: run["settings"] for key, run in runs.items()}
    for name in arms.QUEUES:
        queue, values = arms.make_queue(name), dict[str, dict[str, float | None]]()
        keys = {at: key for at, recipe in queue.items() if (key := arms.find_key(recipe, settings)) is not None}
        if not keys:
            continue
        for arm, seed in queue:
            row = values.setdefault(arm, {})
            if (arm, seed) in keys:  # None has diverged
                row[str(seed)] = runs[keys[arm, seed]]["result"].get(METRICS[name])
        done = [runs[key] for key in keys.values()]
        environment = join_environments([run["environment"] for run in done], (*ENVIRONMENT, *arms.PEERS))
        data = "; ".join(sorted({run["result"]["data"] for run in done if "data" in run["result"]}))
        result = {"arms": values, "done": len(done), "of": len(queue), "data": data}
        shared = {key: done[0]["settings"][key] for key in ("lr", "beta1", "beta2", "weight_decay", "batch_size")}
        left = len(queue) - len(done)
        tables.append(TableResult(f"state-precision-{name}", shared, environment, result, tuple(keys.values()), left))
    return tables
