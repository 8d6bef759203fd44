"""thm:separation_MVN-Grad_LaProp_smallvar and the lemmas of its proof."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.experiments.separation.dimension import separation
from mvngrad_lab.recipe import Recipe


@dataclass(frozen=True)
class Dimensions(Recipe):
    name: ClassVar[str] = "separation"
    largest: int = 10_000
    """Dimension."""
    steps: int = 300
    """Along which the lemmas are checked."""
    horizon: int = 1000
    """Of LaProp's closed form."""


def make_recipe(quick: bool, data: Path | None) -> Dimensions:
    return Dimensions(largest=1000, steps=100, horizon=300) if quick else Dimensions()


def run(recipe: Dimensions, data: Path | None, tick: Tick) -> dict[str, Any]:
    found = separation(largest=recipe.largest, steps=recipe.steps, horizon=recipe.horizon)
    result: dict[str, Any] = to_json(found)
    return result
