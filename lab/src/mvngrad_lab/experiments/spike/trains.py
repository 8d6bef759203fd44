"""Corollary cor:multi_spike: what a sequence of spikes does to the normalized gradients z_t = g_t / (sqrt(r_t) + eps).

LaProp bounds every |z_t| by 1/sqrt(1-beta2). MVN-Grad bounds those of spikes, |g_t| >= 2 |m_{t-1}|, by
2/(beta1 sqrt(1-beta2)). The condition is needed: where the gradient jumps to M u and stays there, m follows, and |z_t|
goes to M |u|/eps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mvngrad.rule import LAPROP, MVNGRAD, Hyper, Rule
from mvngrad_lab.arrays import NUMPY, Floats
from mvngrad_lab.experiments.spike.simulation import LONG_HORIZON, Spike


def normalized(rule: Rule, panel: Spike, g: Floats, z_clip: float | None = None) -> Floats:
    """z_t of gradients g[t, ...]. With beta1 = 0 in the momentum, and the mean at its own decay, u is z."""
    hyper = Hyper(beta1=0.0, beta_mean=panel.beta1, beta2=panel.beta2, eps=panel.eps, z_clip=z_clip)
    state = {slot: np.full(g.shape[1:], panel.d if slot in "vs" else 0.0) for slot in rule.state_names}
    z = np.empty_like(g)
    for t, gradient in enumerate(g):
        _, state = rule.update(0.0, gradient, state, math.inf, hyper, NUMPY)
        z[t] = state["u"]
    return z


def average(beta: float, values: Floats) -> Floats:
    """EMA_beta of values[t, ...] from 0: m of the gradients, and the update of their z."""
    averages, last = np.empty_like(values), np.zeros(values.shape[1:])
    for t, value in enumerate(values):
        averages[t] = last = beta * last + (1 - beta) * value
    return averages


@dataclass(frozen=True)
class SpikeTrains:
    """Random spikes of either sign on a constant gradient u, against their size M."""

    sizes: Floats
    spikes: Floats
    """How many of the gradients meet |g_t| >= 2 |m_{t-1}| and are not u, for each size."""
    laprop: Floats
    """The largest |z_t| over all t."""
    laprop_bound: float
    mvngrad: Floats
    """The largest |z_t| over the spikes."""
    mvngrad_bound: float
    mvngrad_update: Floats
    """The largest |Delta_t|; between spikes z_t is bounded by |u|/eps alone."""
    mvngrad_update_bound: float
    shifted: Floats
    """The largest |z_t| where the gradient goes to M u and stays: m follows, the condition fails, s forgets."""
    shifted_expected: Floats
    """M |u| / eps, what it tends to once m has arrived and s has forgotten."""
    shifted_clipped: Floats
    z_clip: float


def spike_trains(
    panel: Spike = LONG_HORIZON, per_decade: int = 4, rate: float = 0.05, steps: int = 300, seed: int = 0
) -> SpikeTrains:
    """Spikes at random times, a fraction `rate` of all, each M u times a random number in +-[1, 10]."""
    generator, z_clip = np.random.default_rng(seed), 5.0
    grid = np.logspace(0, 8, 8 * per_decade + 1)
    here = generator.random((steps, len(grid))) < rate
    factors = generator.uniform(1, 10, here.shape) * generator.choice([-1.0, 1.0], here.shape)
    g = panel.u * np.where(here, factors * grid, 1.0)
    m = average(panel.beta1, g)
    before = np.concatenate([np.zeros((1, len(grid))), m[:-1]])
    spikes = here & (abs(g) >= 2 * abs(before))
    z = normalized(MVNGRAD, panel, g)
    root = math.sqrt(1 - panel.beta2)
    at_spikes = 2 / (panel.beta1 * root)
    shift = np.broadcast_to(panel.u * grid, g.shape)
    return SpikeTrains(
        sizes=grid,
        spikes=spikes.sum(0).astype(np.float64),
        laprop=abs(normalized(LAPROP, panel, g)).max(0),
        laprop_bound=1 / root,
        mvngrad=np.where(spikes, abs(z), 0.0).max(0),
        mvngrad_bound=at_spikes,
        mvngrad_update=abs(average(panel.beta1, z)).max(0),
        mvngrad_update_bound=max(at_spikes, panel.plateau),
        shifted=abs(normalized(MVNGRAD, panel, shift)).max(0),
        shifted_expected=grid * panel.plateau,
        shifted_clipped=abs(normalized(MVNGRAD, panel, shift, z_clip)).max(0),
        z_clip=z_clip,
    )
