"""Run thm:spike, rem:adam_bound, cor:multi_spike, fig:thm_ssr_1_1 and fig:thm_ssr_1_2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mvngrad.rule import ADAM
from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.experiments.spike.simulation import (
    EARLY_CARRY_OVER,
    LONG_HORIZON,
    Spike,
    make_sizes,
    simulate_spike,
    simulate_spike_trains,
)
from mvngrad_lab.recipe import Recipe

BOUNDED = ((0.9, 0.999), (0.9, 0.9), (0.9, 0.82), (0.5, 0.6))
"""Betas with beta2 > beta1^2."""


@dataclass(frozen=True)
class Spikes(Recipe):
    name: ClassVar[str] = "spike"
    per_decade: int = 40
    """Sizes M per decade, from 1 to 1e8."""
    trains_per_decade: int = 8
    z_clip: float = 5.0


def make_recipe(quick: bool, data: Path | None) -> Spikes:
    return Spikes(per_decade=10, trains_per_decade=4) if quick else Spikes()


def run(recipe: Spikes, data: Path | None, tick: Tick) -> dict[str, Any]:
    panels = {}
    for done, (name, panel) in enumerate({"long horizon": LONG_HORIZON, "early carry-over": EARLY_CARRY_OVER}.items()):
        panels[name] = simulate_spike(panel, recipe.per_decade, recipe.z_clip)
        tick((done + 1) / 3)
    trains = simulate_spike_trains(per_decade=recipe.trains_per_decade)
    bounded = [simulate_bounded_adam(beta1, beta2) for beta1, beta2 in BOUNDED]
    result: dict[str, Any] = to_json({"panels": panels, "trains": trains, "adam_bounded": bounded})
    return result


def simulate_bounded_adam(beta1: float, beta2: float) -> dict[str, float]:
    """rem:adam_bound, with d so small that v holds only the spike."""
    panel = Spike(beta1=beta1, beta2=beta2, d=1e-30, u=1.0)
    peak = panel.peaks(ADAM, make_sizes(panel, 4)).max()
    return {"beta1": beta1, "beta2": beta2, "peak": peak, "bound": panel.bound(ADAM)}
