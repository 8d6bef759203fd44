"""Run thm:mvngrad_convergence: the rate at beta2 = 1 - 1/T, and the floor at fixed beta2 for three kinds of noise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.experiments.convergence.simulation import PROBLEMS, simulate_floor, simulate_rate, simulate_scaling
from mvngrad_lab.recipe import Recipe


@dataclass(frozen=True)
class Rates(Recipe):
    name: ClassVar[str] = "convergence"
    longest: int = 30_000
    """The largest T."""
    runs: int = 32
    points: int = 7
    """Values of 1 - beta2."""


def make_recipe(quick: bool, data: Path | None) -> Rates:
    return Rates(longest=3000, runs=16, points=5) if quick else Rates()


def run(recipe: Rates, data: Path | None, tick: Tick) -> dict[str, Any]:
    result: dict[str, Any] = to_json(
        {
            "rate": simulate_rate(longest=recipe.longest, runs=recipe.runs),
            "scaling": simulate_scaling(T=1000 if recipe.runs > 16 else 300),
            "floors": {name: simulate_floor(problem, recipe.points) for name, problem in PROBLEMS.items()},
        }
    )
    return result
