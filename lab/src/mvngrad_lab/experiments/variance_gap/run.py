"""thm:var_adabelief_mvngrad and prop:approx_mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.experiments.variance_gap.simulation import variance_gap
from mvngrad_lab.recipe import Recipe


@dataclass(frozen=True)
class Gap(Recipe):
    name: ClassVar[str] = "variance-gap"
    points: int = 161
    """Tracking errors."""
    samples: int = 1_000_000
    """Gradients behind each Monte Carlo estimate."""


def make_recipe(quick: bool, data: Path | None) -> Gap:
    return Gap(points=41, samples=100_000) if quick else Gap()


def run(recipe: Gap, data: Path | None, tick: Tick) -> dict[str, Any]:
    result: dict[str, Any] = to_json(variance_gap(points=recipe.points, samples=recipe.samples))
    return result
