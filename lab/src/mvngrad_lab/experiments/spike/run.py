"""thm:spike and cor:multi_spike: what one gradient spike of size M, and many, do to the updates of each optimizer.

One spike: g_0 = M u, then g_t = u. m and the momentum start at 0, the normalizer at d, without bias correction.
All sizes M of a grid are simulated at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mvngrad.rule import ADABELIEF, ADAM, CELLS, LAPROP, MVNGRAD, Hyper, Rule
from mvngrad_lab.arrays import NUMPY, Floats, fit_exponent, to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.recipe import Recipe


@dataclass(frozen=True)
class Spike:
    """The model of one spike; the defaults are the paper's long-horizon panel (fig:thm_ssr_1_1)."""

    beta1: float = 0.9
    beta2: float = 0.6
    eps: float = 1e-8
    d: float = 1.0
    u: float = 1e-3
    horizon: int = 1000

    def run_rule(
        self, rule: Rule, gradients: Iterable[Floats], **hyper: Any
    ) -> Iterator[tuple[Floats, dict[str, Any]]]:
        """The update Delta_t of each gradient, and the state after it."""
        settings = Hyper(**{"lr": 1.0, "beta1": self.beta1, "beta2": self.beta2, "eps": self.eps, **hyper})
        state: dict[str, Any] = {name: self.d if name in "vs" else 0.0 for name in rule.state_names}
        for g in gradients:
            x, state = rule.update(0.0, g, state, math.inf, settings, NUMPY)
            yield -x, state

    def updates(self, rule: Rule, sizes: Floats, z_clip: float | None = None) -> Iterator[Floats]:
        """Delta_t for t = 0, ..., horizon."""
        gradients = [self.u * sizes, *[np.full_like(sizes, self.u)] * self.horizon]
        return (update for update, _ in self.run_rule(rule, gradients, z_clip=z_clip))

    def peaks(self, rule: Rule, sizes: Floats, z_clip: float | None = None) -> Floats:
        """max |Delta_t| over the horizon, what fig:thm_ssr_1 plots against M."""
        return np.asarray(np.abs(list(self.updates(rule, sizes, z_clip))).max(axis=0))

    def normalized_gradients(self, rule: Rule, gradients: Floats, z_clip: float | None = None) -> Floats:
        """z_t of gradients[t]. With beta1 = 0 in the momentum, and beta_mean in the mean, u is z."""
        path = self.run_rule(rule, gradients, beta1=0.0, beta_mean=self.beta1, z_clip=z_clip)
        return np.array([state["u"] for _, state in path])

    @property
    def resonance(self) -> float:
        """The M after which m equals the gradients that follow, so that g - m is 0 from t = 1 on."""
        return 1 / (1 - self.beta1)

    @property
    def plateau(self) -> float:
        """|u|/eps, the limit of AdaBelief and MVN-Grad: constant gradients have no variance, so s decays to 0."""
        return abs(self.u) / self.eps

    def bound(self, rule: Rule) -> float:
        """The largest possible |Delta_t| for every M; infinite for Adam if beta2 <= beta1^2.

        LaProp and MVN-Grad: Z_LP and Z_MV of the proof. Adam: rem:adam_bound. AdaBelief's bound is ours: for t >= 1
        m_t = u - (u - m_t) and s_t >= (1-beta2) (u - m_t)^2, hence |Delta_t| <= |u|/eps + 1/sqrt(1-beta2).
        """
        root = math.sqrt(1 - self.beta2)
        if rule == ADAM:
            ratio = self.beta1**2 / self.beta2
            return (1 - self.beta1) / root / math.sqrt(1 - ratio) if ratio < 1 else math.inf
        if rule == ADABELIEF:
            return max((1 - self.beta1) / self.beta1 / root, self.plateau + 1 / root)
        return max(1 / root / (self.beta1 if rule.centered else 1), self.plateau)

    def adam(self, sizes: Floats, t: Any) -> Any:
        """Adam's update at t in closed form (thm:spike, Part II)."""
        b1, b2 = self.beta1, self.beta2
        m = self.u * ((1 - b1) * b1**t * sizes + (1 - b1**t))
        v = b2 ** (t + 1) * self.d + self.u**2 * ((1 - b2) * b2**t * sizes**2 + (1 - b2**t))
        return m / (v**0.5 + self.eps)

    @property
    def adam_growth(self) -> float:
        """The k of Adam's peak ~ M^k for large M: beta2^t* = M^-2 leaves beta1^t* M = M^(1 - 2 ln beta1/ln beta2)."""
        return max(0.0, 1 - 2 * math.log(self.beta1) / math.log(self.beta2))

    def forgetting_times(self, sizes: Floats) -> Floats:
        """t*: the first t >= 1 at which v has forgotten the spike, (1-beta2) beta2^t M^2 <= 1."""
        return np.array([next(t for t in count(1) if (1 - self.beta2) * self.beta2**t * M**2 <= 1) for M in sizes])

    def carry_over(self, sizes: Floats) -> Floats:
        """The proof's lower bound on Adam's update at t*, (1-beta1) beta1^t* M |u| / D."""
        D = math.sqrt(self.d + 2 * self.u**2) + self.eps
        return np.asarray((1 - self.beta1) * self.beta1 ** self.forgetting_times(sizes) * sizes * abs(self.u) / D)


LONG_HORIZON = Spike()
EARLY_CARRY_OVER = Spike(beta1=0.99999, beta2=0.1, d=10.0, u=10.0, horizon=50)


def make_sizes(panel: Spike, per_decade: int = 20) -> Floats:
    """M from 1 to 1e8, denser towards the resonance from both sides, and the resonance itself.

    The paper does not give its values of M; a grid without 1/(1-beta1) does not show the resonance.
    """
    offsets = 10.0 ** -np.linspace(0.5, 6, max(2, per_decade // 2))
    near = panel.resonance * np.concatenate([1 - offsets, [1.0], 1 + offsets])
    grid = np.concatenate([np.logspace(0, 8, 8 * per_decade + 1), near])
    sizes: Floats = np.unique(grid[(grid >= 1) & (grid <= 1e8)])
    return sizes


def simulate_spike(panel: Spike, per_decade: int = 20, z_clip: float = 5.0) -> dict[str, Any]:
    """One panel of fig:thm_ssr_1: the peaks against M, their bounds, and Adam's update at t*."""
    sizes = make_sizes(panel, per_decade)
    peaks = {rule.name: panel.peaks(rule, sizes) for rule in CELLS}
    times = panel.forgetting_times(sizes)
    large = sizes >= 1e5
    resonance = int(np.argmin(abs(sizes - panel.resonance)))
    return {
        "panel": panel,
        "sizes": sizes,
        "peaks": peaks,
        "clipped": panel.peaks(MVNGRAD, sizes, z_clip),
        "z_clip": z_clip,
        "bounds": {rule.name: bound for rule in CELLS if math.isfinite(bound := panel.bound(rule))},
        "plateau": panel.plateau,
        "resonance": panel.resonance,
        "at_resonance": {name: values[resonance] for name, values in peaks.items()},
        "adam_at_forgetting": abs(panel.adam(sizes, times)),
        "carry_over": panel.carry_over(sizes),
        "forgetting_times": times,
        "adam_growth": fit_exponent(sizes[large], peaks[ADAM.name][large]),  # over the last three decades of M
        "adam_growth_expected": panel.adam_growth,
    }


def simulate_spike_trains(
    panel: Spike = LONG_HORIZON, per_decade: int = 4, rate: float = 0.05, steps: int = 300, seed: int = 0
) -> dict[str, Any]:
    """cor:multi_spike: spikes at random times, a fraction `rate` of all, each M u times a random number in +-[1, 10].

    LaProp bounds every |z_t|. MVN-Grad bounds those of spikes, |g_t| >= 2 |m_{t-1}|; between spikes only |u|/eps bounds
    its update. The condition is needed: if the gradient jumps to M u and stays there ("shifted"), m follows, s decays
    to 0, and |z_t| tends to M |u|/eps.
    """
    generator, z_clip = np.random.default_rng(seed), 5.0
    sizes = np.logspace(0, 8, 8 * per_decade + 1)
    is_drawn = generator.random((steps, len(sizes))) < rate
    factors = generator.uniform(1, 10, is_drawn.shape) * generator.choice([-1.0, 1.0], is_drawn.shape)
    g = panel.u * np.where(is_drawn, factors * sizes, 1.0)
    updates, states = zip(*panel.run_rule(MVNGRAD, g), strict=True)
    means_before = np.array([np.zeros(len(sizes)), *[state["m"] for state in states[:-1]]])
    is_spike = is_drawn & (abs(g) >= 2 * abs(means_before))
    z = panel.normalized_gradients(MVNGRAD, g)
    shift = np.broadcast_to(panel.u * sizes, g.shape)
    root = math.sqrt(1 - panel.beta2)
    bound = 2 / (panel.beta1 * root)
    return {
        "sizes": sizes,
        "spikes": is_spike.sum(0).astype(np.float64),
        "laprop": abs(panel.normalized_gradients(LAPROP, g)).max(0),
        "laprop_bound": 1 / root,
        "mvngrad": np.where(is_spike, abs(z), 0.0).max(0),
        "mvngrad_bound": bound,
        "mvngrad_update": np.abs(updates).max(0),
        "mvngrad_update_bound": max(bound, panel.plateau),
        "shifted": abs(panel.normalized_gradients(MVNGRAD, shift)).max(0),
        "shifted_expected": sizes * panel.plateau,
        "shifted_clipped": abs(panel.normalized_gradients(MVNGRAD, shift, z_clip)).max(0),
        "z_clip": z_clip,
    }


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
    return to_json(panels=panels, trains=trains, adam_bounded=bounded)


def simulate_bounded_adam(beta1: float, beta2: float) -> dict[str, float]:
    """rem:adam_bound, with d so small that v holds only the spike."""
    panel = Spike(beta1=beta1, beta2=beta2, d=1e-30, u=1.0)
    peak = panel.peaks(ADAM, make_sizes(panel, 4)).max()
    return {"beta1": beta1, "beta2": beta2, "peak": peak, "bound": panel.bound(ADAM)}
