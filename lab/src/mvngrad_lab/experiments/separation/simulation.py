"""Theorem thm:separation_MVN-Grad_LaProp_smallvar: variance against second moment where noise is small.

The construction of the proof: F = L/2 |x|^2 in d dimensions, g = grad F + xi with xi_i = +-delta |grad_i F| at random,
no bias correction. The theorem's two limits are settings of the rule itself: LaProp with beta2 = 0 and eps = 0
is momentum on signs, and MVN-Grad with an endless memory keeps the s it starts with, here sigma^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mvngrad.rule import LAPROP, MVNGRAD, Hyper, Rule
from mvngrad_lab.arrays import NUMPY, Floats

Rate = Callable[[int], float]
"""eta_t for t = 0, 1, ..."""
Noise = Callable[[np.random.Generator, Floats], Floats]
"""xi for the true gradient."""

ENDLESS = 1 - 2.0**-53
"""The largest beta2 below 1: s stays what it was, to rounding."""


def signs(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """+-1 at random."""
    return 2 * rng.integers(0, 2, shape, dtype=np.int8).astype(np.float64) - 1


@dataclass(frozen=True)
class Quadratic:
    """The objective, the oracle and the two methods of the theorem."""

    L: float = 1.0
    beta: float = 0.9
    delta: float = 0.5
    """|xi_i| <= delta |grad_i F|."""
    sigma: float = 1.0
    """Where s has come to rest."""
    c: float = 1.0
    """LaProp's eta_t = c / (L sqrt(t+1))."""
    share: float = 1.0
    """alpha as a part of the largest that eq:stepsize_mvn_stoch allows."""

    def F(self, x: Floats) -> float:
        return self.L / 2 * float(x @ x)

    def relative(self, rng: np.random.Generator, gradient: Floats) -> Floats:
        """xi of the high-SNR oracle (ass:oracle_second_variance)."""
        return self.delta * abs(gradient) * signs(rng, gradient.shape)

    def additive(self, rng: np.random.Generator, gradient: Floats) -> Floats:
        """+-sigma, the isotropic noise that ass:stationary describes and that keeps s at about sigma^2."""
        return self.sigma * signs(rng, gradient.shape)

    @property
    def alpha(self) -> float:
        return self.share * (1 - self.beta**2) / self.L

    @property
    def eta(self) -> float:
        """MVN-Grad's learning rate, alpha sigma / (1-beta)."""
        return self.alpha * self.sigma / (1 - self.beta)

    def laprop_rate(self, t: int) -> float:
        return self.c / (self.L * math.sqrt(t + 1))

    def step(
        self, rule: Rule, x: Floats, g: Floats, state: dict[str, Any], rate: float, beta2: float | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        """One step of the rule. Without beta2 the limit of the theorem: signs for LaProp, a fixed s for MVN-Grad."""
        limit = ENDLESS if rule.centered else 0.0
        hyper = Hyper(lr=rate, beta1=self.beta, beta2=limit if beta2 is None else beta2, eps=0.0)
        return rule.update(x, g, state, math.inf, hyper, NUMPY)

    def init(self, rule: Rule, x: Floats) -> dict[str, Any]:
        """s at sigma^2, all else at 0."""
        return {slot: np.full_like(x, self.sigma**2 if slot == "s" else 0.0) for slot in rule.state_names}

    def path(
        self,
        rule: Rule,
        x: Floats,
        rate: Rate,
        beta2: float | None = None,
        noise: Noise | None = None,
        start: dict[str, Floats] | None = None,
        seed: int = 0,
    ) -> Iterator[tuple[Floats, Floats, dict[str, Any]]]:
        """(x_t, g_t, state) for t = 1, 2, ... by the rule from x_0 = x; `start` replaces parts of `init`."""
        rng, noise = np.random.default_rng(seed), noise or self.relative
        state = self.init(rule, x) | (start or {})
        t = 0
        while True:
            gradient = self.L * x
            g = gradient + noise(rng, gradient)
            x, state = self.step(rule, x, g, state, rate(t), beta2)
            t += 1
            yield x, g, state

    def steps_to(self, target: float, rule: Rule, x: Floats, rate: Rate, limit: int, **how: Any) -> int | None:
        """The first t with |grad F(x_t)| <= target, None if not within `limit` steps."""
        if self.L * np.linalg.norm(x) <= target:
            return 0
        for t, (now, _, _) in enumerate(self.path(rule, x, rate, **how), start=1):
            if self.L * np.linalg.norm(now) <= target:
                return t
            if t >= limit:
                return None
        return None


PROOF = Quadratic()
"""The construction with the numbers used throughout; the paper gives none."""


@dataclass(frozen=True)
class Stable:
    """MVN-Grad at s = sigma^2, step by step against the two lemmas."""

    gradients: Floats
    """|grad F(x_t)|^2, t = 0, 1, ..."""
    heavy_ball_error: float
    """The largest |x_t - x_{t-1} - (beta (x_{t-1} - x_{t-2}) - alpha g_t)|, relative to |x_0| (lem:mvn_to_hb_stoch)."""
    variance_error: float
    """The largest |s_t / sigma^2 - 1|."""
    slack: Floats
    """Phi_{t-1} - alpha/2 (|grad F(x_{t-1})|^2 - E|xi_t|^2) - E[Phi_t], over Phi_0: >= 0 by eq:one_step_descent."""
    sums: Floats
    """sum_{k<t} |grad F(x_k)|^2 for t = 1, 2, ..."""
    bound: float
    """2 (F(x_0) - F_star) / (alpha (1-delta^2)), what the expectation of the sums stays under."""


def stable(problem: Quadratic, x: Floats, steps: int, rule: Rule = MVNGRAD, seed: int = 0) -> Stable:
    """Follow the rule from x and ask each step of both lemmas.

    Phi is quadratic and separable and xi_t a random sign times a known size, so the conditional expectation of Phi_t is
    its mean over xi_t and -xi_t, exactly: the rule takes each step with both.
    """
    alpha, weight = problem.alpha, problem.beta**2 / (2 * problem.alpha)
    rng, state = np.random.default_rng(seed), problem.init(rule, x)
    before, scale, start = np.zeros_like(x), float(np.linalg.norm(x)), problem.F(x)
    gradients, slack, ball, drift = [], [], 0.0, 0.0
    for _ in range(steps):
        gradient = problem.L * x
        xi = problem.relative(rng, gradient)
        other = problem.step(rule, x, gradient - xi, state, problem.eta)[0] - x
        new, state = problem.step(rule, x, gradient + xi, state, problem.eta)
        y = new - x
        ball = max(ball, float(np.linalg.norm(y - (problem.beta * before - alpha * (gradient + xi)))) / scale)
        if "s" in state:
            drift = max(drift, float(abs(state["s"] / problem.sigma**2 - 1).max()))
        after = np.mean([problem.F(x + step) + weight * (step @ step) for step in (y, other)])
        allowed = problem.F(x) + weight * (before @ before) - alpha / 2 * (gradient @ gradient - xi @ xi)
        slack.append((allowed - after) / start)
        gradients.append(gradient @ gradient)
        x, before = new, y
    bound = 2 * start / (alpha * (1 - problem.delta**2))
    return Stable(np.array(gradients), ball, drift, np.array(slack), np.cumsum(gradients), bound)


def laprop_start(problem: Quadratic, horizon: int) -> float:
    """a of eq:a-def-stoch: x_0 = a 1 is as far as `horizon` steps go, and half a step more."""
    moves = np.array([problem.laprop_rate(t) * (1 - problem.beta ** (t + 1)) for t in range(horizon)])
    return float(moves.sum() + moves[-1] / 2)


def laprop_closed_form(problem: Quadratic, horizon: int) -> Floats:
    """Each coordinate of x_0, ..., x_T in lem:laprop_finite_horizon."""
    moves = [problem.laprop_rate(t) * (1 - problem.beta ** (t + 1)) for t in range(horizon)]
    return laprop_start(problem, horizon) - np.concatenate([[0.0], np.cumsum(moves)])


def laprop_gradient(problem: Quadratic, horizon: int, d: int) -> float:
    """The smallest |grad F(x_t)| up to the horizon, L/2 (1-beta^T) eta_{T-1} sqrt(d) (lem:laprop_finite_horizon)."""
    rate = problem.laprop_rate(horizon - 1)
    return problem.L / 2 * (1 - problem.beta**horizon) * rate * math.sqrt(d)


def laprop_lower_bound(problem: Quadratic, horizon: int, d: int) -> float:
    """c sqrt(d) / (4 sqrt(T)), once 1 - beta^T >= 1/2 (thm:laprop_omega_d_eps2)."""
    return problem.c * math.sqrt(d / horizon) / 4


def laprop_horizon(problem: Quadratic, target: float, d: int) -> int:
    """The smallest T with 1 - beta^T >= 1/2 from which on a run started at x_0(T) gets to the target within T steps."""
    low = next(T for T in range(1, 10**6) if laprop_gradient(problem, T + 1, 1) < laprop_gradient(problem, T, 1))
    low = max(low, math.ceil(math.log(0.5) / math.log(problem.beta)))
    if laprop_gradient(problem, low, d) <= target:
        return low
    high = 2 * low
    while laprop_gradient(problem, high, d) > target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if laprop_gradient(problem, middle, d) <= target else (middle, high)
    return high


def laprop_error(problem: Quadratic, horizon: int, d: int, rule: Rule = LAPROP) -> tuple[float, float]:
    """The rule against lem:laprop_finite_horizon: the largest error relative to a, and the smallest |grad F|."""
    closed = laprop_closed_form(problem, horizon)
    worst, smallest = 0.0, math.inf
    path = problem.path(rule, np.full(d, closed[0]), problem.laprop_rate)
    for expected, (x, _, _) in zip(closed[1:], path, strict=False):
        worst = max(worst, float(abs(x - expected).max()) / closed[0])
        smallest = min(smallest, problem.L * float(np.linalg.norm(x)))
    return worst, smallest
