"""Run thm:var_adabelief_mvngrad and prop:approx_mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.experiments.variance_gap import simulation
from mvngrad_lab.recipe import Recipe


@dataclass(frozen=True)
class Gap(Recipe):
    name: ClassVar[str] = "variance-gap"
    points: int = 161
    """Tracking errors."""
    samples: int = 1_000_000
    """Gradients of each Monte Carlo estimate."""


def make_recipe(quick: bool, data: Path | None) -> Gap:
    return Gap(points=41, samples=100_000) if quick else Gap()


def run(recipe: Gap, data: Path | None, tick: Tick) -> dict[str, Any]:
    past, samples = simulation.Past(), recipe.samples
    runs = max(500, samples // 100)
    result: dict[str, Any] = to_json(
        {
            "past": past,
            "symmetric": [simulation.simulate_symmetric_noise(past, noise, samples) for noise in simulation.NOISES],
            "tracking": simulation.simulate_tracking_error(past, recipe.points, samples),
            "condition": simulation.simulate_condition(past),
            "stationary": [
                simulation.simulate_training_pasts(beta2, mu, runs=runs)
                for beta2 in (0.95, 0.999)
                for mu in (0.1, 1.0, 10.0)
            ],
        }
    )
    return result
