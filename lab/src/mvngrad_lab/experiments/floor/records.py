"""The runs of this experiment, from the files in results/ and the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mvngrad_lab import store
from mvngrad_lab.experiments.floor import arms
from mvngrad_lab.report.records import Sources, TableResult

OLD_GRID_FILE = "sweep-cifar100-bs1024-scaled.json"


def get_file_name(queue: str) -> str:
    """The file in results/ that has the finished runs of a queue."""
    return f"floor-{queue}.json"


def read_results(*roots: Path) -> dict[str, dict[str, Any]]:
    """The result of every finished run in stores and in exported files, by key."""
    results = {run.key: run.result for run in store.load_runs(*roots)}
    for root in roots:
        for path in (*sorted(root.glob(get_file_name("*"))), root / OLD_GRID_FILE):
            if path.exists():
                rows = json.loads(path.read_text(encoding="utf-8"))["runs"]
                results |= {row["key"]: {"status": row["status"], **row["metrics"]} for row in rows}
    return results


def read_accuracies(*roots: Path) -> dict[str, float]:
    """Test accuracy of every finished run, by key; a diverged run has 0, and so has a language model."""
    return {key: result.get("test_accuracy", 0.0) for key, result in read_results(*roots).items()}


def collect(sources: Sources) -> list[TableResult]:
    accuracies, grid = read_accuracies(*sources.folders), arms.grid()
    new = {recipe.key for recipe in arms.grid_queue()}
    if not new & accuracies.keys():
        return []
    rows = {
        arm: [
            {"lr": r.lr, "beta1": r.beta1, "beta2": r.beta2, "test_accuracy": accuracies[r.key]}
            for r in recipes
            if r.key in accuracies
        ]
        for arm, recipes in grid.items()
    }
    done = tuple(recipe.key for recipes in grid.values() for recipe in recipes if recipe.key in accuracies)
    total = sum(map(len, grid.values()))
    shared = {"batch_size": 1024, "epochs": 30, "seed": 0}
    result = {"arms": rows, "done": len(done), "of": total}
    return [TableResult("floor", shared, {}, result, done, total - len(done))]
