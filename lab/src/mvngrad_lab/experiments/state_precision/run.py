"""MVN-Grad at batch 1024 with its state in float32, bf16 and int8: the trainings that Table 1 does not have."""

from __future__ import annotations

from pathlib import Path

from mvngrad_lab.experiments import OnEvent, Tick
from mvngrad_lab.experiments.state_precision.records import state_precision
from mvngrad_lab.training.train import require_gpu, train_missing


def train_all(root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
    """Train what is not stored; the runs with float32 state belong to Table 1."""
    require_gpu("state-precision", "trains 6 networks for 200 epochs each")
    recipes = [recipe for recipe in state_precision() if recipe.state_dtype != "float32"]
    train_missing(recipes, root, data, tick, on_event)
