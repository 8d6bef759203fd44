"""The grid of 30-epoch runs, from the files in results/ and the store."""

from __future__ import annotations

import json
from pathlib import Path

from mvngrad_lab import store
from mvngrad_lab.experiments.floor import arms
from mvngrad_lab.report.records import Sources, TableResult

GRID_FILE = "floor-cifar100-grid.json"
OLD_GRID_FILE = "sweep-cifar100-bs1024-scaled.json"


def read_accuracies(*roots: Path) -> dict[str, float]:
    """Test accuracy by key, of all finished runs in stores and in exported grids; a diverged run has 0."""
    accuracies = {run.key: run.result.get("test_accuracy", 0.0) for run in store.load_runs(*roots)}
    for path in [root / name for root in roots for name in (GRID_FILE, OLD_GRID_FILE)]:
        if path.exists():
            rows = json.loads(path.read_text(encoding="utf-8"))["runs"]
            accuracies |= {row["key"]: row["metrics"].get("test_accuracy", 0.0) for row in rows}
    return accuracies


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
