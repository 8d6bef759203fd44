"""Theorem thm:spike: how an isolated gradient spike of size M travels through each cell.

The model: g_0 = M u, then g_t = u for ever; m and momentum start at 0, the normalizer at d; no bias correction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mvngrad.rule import ADABELIEF, ADAM, CELLS, MVNGRAD, SCALAR, Hyper, Rule
from mvngrad_lab.arrays import NUMPY, Floats, fit_exponent

Size = Any
"""M: a float, or an array of them, all of which are then followed at once."""


@dataclass(frozen=True)
class Spike:
    """The single-spike model; the defaults are the paper's long-horizon panel (fig:thm_ssr_1_1)."""

    beta1: float = 0.9
    beta2: float = 0.6
    eps: float = 1e-8
    d: float = 1.0
    u: float = 1e-3
    horizon: int = 1000

    def updates(self, rule: Rule, size: Size, z_clip: float | None = None) -> Iterator[Any]:
        """The update Delta_t for t = 0, ..., horizon after a spike of `size` times u."""
        hyper = Hyper(lr=1.0, beta1=self.beta1, beta2=self.beta2, eps=self.eps, z_clip=z_clip)
        ops = NUMPY if isinstance(size, np.ndarray) else SCALAR
        state = {slot: 0 * size + (self.d if slot in "vs" else 0.0) for slot in rule.state_names}
        for t in range(self.horizon + 1):
            g = self.u * (size if t == 0 else 1 + 0 * size)
            x, state = rule.update(0.0, g, state, math.inf, hyper, ops)
            yield -x

    def peak(self, rule: Rule, size: float, z_clip: float | None = None) -> float:
        """max |Delta_t| over the horizon, what fig:thm_ssr_1 plots against M."""
        return max(abs(float(update)) for update in self.updates(rule, size, z_clip))

    def peaks(self, rule: Rule, sizes: Floats, z_clip: float | None = None) -> Floats:
        """`peak` of every size."""
        highest = np.zeros_like(sizes)
        for update in self.updates(rule, sizes, z_clip):
            highest = np.maximum(highest, abs(update))
        return highest

    @property
    def resonance(self) -> float:
        """The M that leaves m equal to the gradients that follow, so that g - m vanishes from t = 1 on."""
        return 1 / (1 - self.beta1)

    @property
    def plateau(self) -> float:
        """|u|/eps, what a variance cell tends to as s forgets: the constant gradients after the spike have none."""
        return abs(self.u) / self.eps

    def bound(self, rule: Rule) -> float:
        """What the cell never exceeds, whatever M; infinite for Adam where beta2 <= beta1^2.

        LaProp and MVN-Grad: Z_LP and Z_MV of the proof. Adam: rem:adam_bound. AdaBelief is ours, and as free of M: for
        t >= 1 m_t = u - (u - m_t), and s_t >= (1-beta2) (u - m_t)^2, hence |Delta_t| <= |u|/eps + 1/sqrt(1-beta2).
        """
        root = math.sqrt(1 - self.beta2)
        if rule == ADAM:
            ratio = self.beta1**2 / self.beta2
            return (1 - self.beta1) / root / math.sqrt(1 - ratio) if ratio < 1 else math.inf
        if rule == ADABELIEF:
            return max((1 - self.beta1) / self.beta1 / root, self.plateau + 1 / root)
        return max(1 / root / (self.beta1 if rule.centered else 1), self.plateau)

    def adam(self, size: Size, t: Any) -> Any:
        """Adam's update at t in closed form (thm:spike, Part II)."""
        v = self.beta2 ** (t + 1) * self.d + self.u**2 * (
            (1 - self.beta2) * self.beta2**t * size**2 + (1 - self.beta2**t)
        )
        return self._mean(size, t) / (v**0.5 + self.eps)

    def adabelief(self, size: Size, t: Any) -> Any:
        """AdaBelief's update at t in closed form. Ours: the paper calls it more involved and gives none.

        u - m_t = beta1^t u (1 - (1-beta1) M) from t = 1 on, so s_t is a geometric sum.
        """
        b1, b2 = self.beta1**2, self.beta2
        many = b1 * (b2**t - b1**t) / (b2 - b1) if b1 != b2 else t * b2**t  # sum of b2^(t-k) b1^k, k = 1..t
        deviations = b2**t * b1 * size**2 + (1 - size / self.resonance) ** 2 * many
        s = b2 ** (t + 1) * self.d + (1 - b2) * self.u**2 * deviations
        return self._mean(size, t) / (s**0.5 + self.eps)

    def _mean(self, size: Size, t: Any) -> Any:
        return (1 - self.beta1) * self.beta1**t * size * self.u + (1 - self.beta1**t) * self.u

    @property
    def adam_growth(self) -> float:
        """The k of Adam's peak ~ M^k for large M: beta2^t* = M^-2 leaves beta1^t* M = M^(1 - 2 ln beta1/ln beta2)."""
        return max(0.0, 1 - 2 * math.log(self.beta1) / math.log(self.beta2))

    def forgetting_time(self, size: float) -> int:
        """t*: the first t >= 1 at which v has forgotten the spike, (1-beta2) beta2^t M^2 <= 1."""
        t = 1
        while (1 - self.beta2) * self.beta2**t * size**2 > 1:
            t += 1
        return t

    def carry_over(self, size: float) -> float:
        """The proof's lower bound on Adam's update at t*, (1-beta1) beta1^t* M |u| / D."""
        t = self.forgetting_time(size)
        return (1 - self.beta1) * self.beta1**t * size * abs(self.u) / (math.sqrt(self.d + 2 * self.u**2) + self.eps)


LONG_HORIZON = Spike()
EARLY_CARRY_OVER = Spike(beta1=0.99999, beta2=0.1, d=10.0, u=10.0, horizon=50)


def sizes(panel: Spike, per_decade: int = 20) -> Floats:
    """M from 1 to 1e8, closing in on the resonance from both sides, and the resonance itself.

    The paper does not give its values of M, and a grid that steps over 1/(1-beta1) does not show the resonance.
    """
    offsets = 10.0 ** -np.linspace(0.5, 6, max(2, per_decade // 2))
    near = panel.resonance * np.concatenate([1 - offsets, [1.0], 1 + offsets])
    grid = np.concatenate([np.logspace(0, 8, 8 * per_decade + 1), near])
    return np.unique(grid[(grid >= 1) & (grid <= 1e8)])


@dataclass(frozen=True)
class SpikeCurves:
    """One panel of fig:thm_ssr_1, with what bounds it."""

    panel: Spike
    sizes: Floats
    peaks: dict[str, Floats]
    """Cell -> peak |Delta_t| for each size."""
    clipped: Floats
    """MVN-Grad with `z_clip`."""
    z_clip: float
    bounds: dict[str, float]
    """Cell -> its bound free of M, where it has one."""
    plateau: float
    resonance: float
    at_resonance: dict[str, float]
    forgetting_times: Floats
    adam_at_forgetting: Floats
    carry_over: Floats
    adam_growth: float
    """The fitted exponent of Adam's peak over the last three decades of M."""
    adam_growth_expected: float


def curves(panel: Spike, per_decade: int = 20, z_clip: float = 5.0) -> SpikeCurves:
    """Everything of one panel."""
    grid = sizes(panel, per_decade)
    peaks = {rule.name: panel.peaks(rule, grid) for rule in CELLS}
    times = np.array([panel.forgetting_time(size) for size in grid])
    large = grid >= 1e5
    on = int(np.argmin(abs(grid - panel.resonance)))
    return SpikeCurves(
        panel=panel,
        sizes=grid,
        peaks=peaks,
        clipped=panel.peaks(MVNGRAD, grid, z_clip),
        z_clip=z_clip,
        bounds={rule.name: bound for rule in CELLS if math.isfinite(bound := panel.bound(rule))},
        plateau=panel.plateau,
        resonance=panel.resonance,
        at_resonance={name: float(values[on]) for name, values in peaks.items()},
        forgetting_times=times.astype(np.float64),
        adam_at_forgetting=np.asarray(abs(panel.adam(grid, times))),
        carry_over=np.array([panel.carry_over(size) for size in grid]),
        adam_growth=fit_exponent(grid[large], peaks[ADAM.name][large]),
        adam_growth_expected=panel.adam_growth,
    )
