"""Run thm:separation_MVN-Grad_LaProp_smallvar and the lemmas of its proof."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.experiments.separation.simulation import (
    PROOF,
    check_laprop,
    check_lemmas,
    count_from_one_start,
    count_from_proofs_start,
    simulate_rates,
    simulate_s,
)
from mvngrad_lab.recipe import Recipe

D = 100
"""The dimension in which the lemmas and LaProp's closed form are checked."""


@dataclass(frozen=True)
class Dimensions(Recipe):
    name: ClassVar[str] = "separation"
    largest: int = 10_000
    """The largest dimension in which steps are counted."""
    steps: int = 300
    """Steps for which the lemmas are checked."""
    horizon: int = 1000
    """The T of LaProp's closed form."""


def make_recipe(quick: bool, data: Path | None) -> Dimensions:
    return Dimensions(largest=1000, steps=100, horizon=300) if quick else Dimensions()


def run(recipe: Dimensions, data: Path | None, tick: Tick) -> dict[str, Any]:
    decades, horizon = math.log10(recipe.largest), recipe.horizon
    dimensions = [round(size) for size in np.logspace(0, decades, 2 * round(decades) + 1)]
    error, smallest = check_laprop(PROOF, horizon, D)
    # at the largest alpha the bound on the sums is an equality in expectation, which a single run may exceed
    half = replace(PROOF, share=PROOF.share / 2)
    result: dict[str, Any] = to_json(
        {
            "problem": PROOF,
            "stable": check_lemmas(half, np.linspace(0.5, 1.5, D, dtype=np.float64), recipe.steps),
            "closed_form_error": error,
            "smallest_gradient": smallest,
            "lower_bound": PROOF.laprop_lower_bound(horizon, D),
            "horizon": horizon,
            "proofs_start": count_from_proofs_start(PROOF, dimensions),
            "one_start": count_from_one_start(PROOF, dimensions),
            "fixed_gap": count_from_one_start(PROOF, [d for d in dimensions if d <= 1000], fixed_gap=True),
            "resting": simulate_s(PROOF),
            "rates": simulate_rates(PROOF, [30, 100, 300, 1000, 3000][: 3 if recipe.largest < 10_000 else 5]),
        }
    )
    return result
