"""Theorem thm:spike: how an isolated gradient spike of size M travels through each cell.

The model: g_0 = M u, then g_t = u for ever; m and momentum start at 0, the normalizer at d; no bias correction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mvngrad.rule import SCALAR, Hyper, Rule


@dataclass(frozen=True)
class Spike:
    """The single-spike model; the defaults are the paper's long-horizon panel (fig:thm_ssr_1_1)."""

    beta1: float = 0.9
    beta2: float = 0.6
    eps: float = 1e-8
    d: float = 1.0
    u: float = 1e-3
    horizon: int = 1000

    def updates(self, rule: Rule, size: float, z_clip: float | None = None) -> Iterator[float]:
        """The update Delta_t for t = 0, ..., horizon after a spike of `size` times u."""
        hyper = Hyper(lr=1.0, beta1=self.beta1, beta2=self.beta2, eps=self.eps, z_clip=z_clip)
        state = {slot: self.d if slot in "vs" else 0.0 for slot in rule.slots}
        for t in range(self.horizon + 1):
            x, state = rule.update(0.0, self.u * (size if t == 0 else 1), state, math.inf, hyper, SCALAR)
            yield -x

    def peak(self, rule: Rule, size: float, z_clip: float | None = None) -> float:
        """max |Delta_t| over the horizon, what fig:thm_ssr_1 plots against M."""
        return max(map(abs, self.updates(rule, size, z_clip)))

    def bound(self, rule: Rule) -> float:
        """Z_LP or Z_MV of the proof: what a normalize-then-momentum cell never exceeds, whatever M."""
        first = 1 / math.sqrt(1 - self.beta2) / (self.beta1 if rule.variance else 1)
        return max(first, abs(self.u) / self.eps)

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
