"""Theorem thm:var_adabelief_mvngrad and Proposition prop:approx_mean: which order of the two steps is calmer.

From one frozen past (m, s, u before the step) the next gradient g = m + e + xi is drawn again and again, with xi
symmetric about zero and e the error of m as a guess of the mean. The gap is Var(AdaBelief's update) - Var(MVN-Grad's).
Every update is the rule's own; expectations are by Monte Carlo, and by quadrature where a sign or an identity is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from mvngrad.rule import ADABELIEF, MVNGRAD, Hyper, Rule
from mvngrad_lab.arrays import NUMPY, Floats

Draw = Callable[[np.random.Generator, int], Floats]


@dataclass(frozen=True)
class Noise:
    """A distribution symmetric about zero, of variance 1: how to draw from it, and points that integrate over it."""

    name: str
    draw: Draw
    points: Floats
    weights: Floats


def _normal(count: int = 120) -> Noise:
    points, weights = np.polynomial.hermite_e.hermegauss(count)
    return Noise("normal", lambda rng, n: rng.standard_normal(n), points, weights / weights.sum())


def _uniform(count: int = 200) -> Noise:
    points, weights = np.polynomial.legendre.leggauss(count)
    root = math.sqrt(3)
    return Noise("uniform", lambda rng, n: rng.uniform(-root, root, n), root * points, weights / 2)


def _signs() -> Noise:
    return Noise("signs", lambda rng, n: rng.choice([-1.0, 1.0], n), np.array([-1.0, 1.0]), np.array([0.5, 0.5]))


NORMAL, UNIFORM, SIGNS = _normal(), _uniform(), _signs()
NOISES = (NORMAL, UNIFORM, SIGNS)


@dataclass(frozen=True)
class Past:
    """F_{t-1}, as much of it as one step needs; t = inf leaves bias correction out, as the theory does."""

    m: Any = 0.7
    """A number; or, like s, an array of shape (n, 1): n pasts at once."""
    s: Any = 0.2
    u: float = 1.0
    sigma: float = 1.0
    """The standard deviation of xi."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-3
    t: float = math.inf

    def update(self, rule: Rule, g: Floats) -> Floats:
        """Delta_t for each gradient g."""
        return np.asarray(-self._step(rule, g)[0])

    def _step(self, rule: Rule, g: Floats) -> tuple[Any, dict[str, Any]]:
        hyper = Hyper(lr=1.0, beta1=self.beta1, beta2=self.beta2, eps=self.eps)
        state = {slot: np.full_like(g, getattr(self, slot)) for slot in rule.state_names}
        return rule.update(np.zeros_like(g), g, state, self.t, hyper, NUMPY)

    def gradients(self, xi: Floats, error: Any) -> Floats:
        return np.asarray(self.m + error + self.sigma * xi)

    def y(self, g: Floats) -> Floats:
        """Y_t = 1 / (sqrt(s_t) + eps)."""
        s = self._step(MVNGRAD, g)[1]["s"] / (1 - self.beta2**self.t)
        return np.asarray(1 / (np.sqrt(s) + self.eps))

    @property
    def y_max(self) -> float:
        """The largest Y_t can be: s_t >= beta2 s_{t-1}. The proposition uses 1/eps in its place."""
        return 1 / (math.sqrt(self.beta2 * self.s / (1 - self.beta2**self.t)) + self.eps)


USUAL = Past()
"""A mean of the noise's size, and the betas of the paper's own diagnostic (app:mnist-vgap)."""


def variance(values: Floats, weights: Floats) -> Any:
    """Var of a function of xi from its values[..., k] at the points of a `Noise`."""
    return (values - (values @ weights)[..., None]) ** 2 @ weights


def gap(past: Past, noise: Noise = NORMAL, error: Any = 0.0, cells: tuple[Rule, Rule] = (ADABELIEF, MVNGRAD)) -> Any:
    """Delta Var_t by quadrature over the rule's updates; `error`, like m and s, may be an array of shape (n, 1)."""
    g = past.gradients(noise.points, error)
    first, second = (variance(past.update(rule, g), noise.weights) for rule in cells)
    return first - second


def closed_form(past: Past, noise: Noise = NORMAL, error: float = 0.0) -> float:
    """(2 beta1 - beta1^2) m^2 Var(Y): the gap where error = 0 (thm:var_adabelief_mvngrad)."""
    spread = variance(past.y(past.gradients(noise.points, error)), noise.weights)
    return float(past.beta1 * (2 - past.beta1) * past.m**2 * spread / (1 - past.beta1**past.t) ** 2)


def lower_bound(
    past: Past, delta: float, noise: Noise = NORMAL, error: float | None = None, sharp: bool = False
) -> float:
    """The proposition's bound for a tracking error of at most delta (prop:approx_mean), Var(Y) taken at `error`.

    `sharp` (ours) stops in the proof at |Cov(Y, xi Y)| <= sqrt(Var Y E[xi^2 Y^2]) <= sqrt(Var Y) sigma max Y,
    from which the proposition goes on to sigma/eps^2.
    """
    spread = variance(past.y(past.gradients(noise.points, delta if error is None else error)), noise.weights)
    coupling = math.sqrt(spread) * past.sigma * past.y_max if sharp else past.sigma / past.eps**2
    gain = past.beta1 * (2 - past.beta1) * past.m**2 * spread
    loss = 2 * past.beta1 * (1 - past.beta1) * abs(past.m) * (delta * spread + coupling)
    return float((gain - loss) / (1 - past.beta1**past.t) ** 2)


@dataclass(frozen=True)
class Estimate:
    """A Monte Carlo estimate with a confidence interval by batch means."""

    value: float
    low: float
    high: float
    samples: int
    batches: int
    level: float


def estimate(
    past: Past,
    noise: Noise = NORMAL,
    error: float = 0.0,
    samples: int = 400_000,
    batches: int = 100,
    level: float = 0.99,
    seed: int = 0,
    cells: tuple[Rule, Rule] = (ADABELIEF, MVNGRAD),
) -> Estimate:
    """Delta Var_t as one measures it on a network: the gap of sample variances in each of many independent batches.

    Both cells see the same gradients. A batch's gap is unbiased, so the mean over batches is, and the batches' own
    spread gives the normal interval.
    """
    g = past.gradients(noise.draw(np.random.default_rng(seed), samples), error).reshape(batches, -1)
    first, second = (past.update(rule, g).var(axis=1, ddof=1) for rule in cells)
    gaps = first - second
    value, half = gaps.mean(), NormalDist().inv_cdf((1 + level) / 2) * gaps.std(ddof=1) / math.sqrt(batches)
    return Estimate(float(value), float(value - half), float(value + half), samples, batches, level)


def turning_error(past: Past, noise: Noise = NORMAL, sign: int = 1, largest: float = 100.0) -> float | None:
    """The smallest |e|, in the direction `sign`, at which the gap turns negative; None if it does not up to `largest`.

    A scan brackets the first change of sign and bisection closes in, so that the gap is >= 0 just before and < 0 after.
    """
    scan = np.concatenate([[0.0], np.geomspace(1e-3, largest, 400)])
    negative = [gap(past, noise, sign * size) < 0 for size in scan]
    if True not in negative:
        return None
    first = negative.index(True)
    low, high = (float(scan[first - 1]), float(scan[first])) if first else (0.0, 0.0)
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if gap(past, noise, sign * middle) < 0 else (middle, high)
    return sign * high


@dataclass(frozen=True)
class Symmetric:
    """thm:var_adabelief_mvngrad for one distribution: the three values that have to agree."""

    noise: str
    estimate: Estimate
    closed_form: float
    quadrature: float


@dataclass(frozen=True)
class Tracking:
    """prop:approx_mean over the tracking error."""

    errors: Floats
    gaps: Floats
    bound: Floats
    sharp: Floats
    turning: dict[str, float | None]
    """Direction of the error -> where the gap turns negative."""
    around: dict[str, Estimate]
    """The gap by Monte Carlo on both sides of the first of these."""
    largest_delta: float | None
    """The largest delta at which the proposition still promises a gap >= 0; None if it promises none even at 0."""
    largest_delta_sharp: float | None


@dataclass(frozen=True)
class Stationary:
    """The gap from many pasts, each the end of a run of independent gradients mu + xi of variance 1."""

    beta2: float
    mu: float
    mean: float
    low: float
    high: float
    """A 99% interval over the runs, which are independent."""
    negative: float
    """The fraction of pasts with a negative gap."""


@dataclass(frozen=True)
class VarianceGap:
    past: Past
    symmetric: list[Symmetric]
    tracking: Tracking
    stationary: list[Stationary]


def _promised(past: Past, sharp: bool) -> float | None:
    """Where `lower_bound`, with Var(Y) at the same error in the worse direction, falls below 0."""

    def worst(delta: float) -> float:
        return min(lower_bound(past, delta, error=sign * delta, sharp=sharp) for sign in (-1, 1))

    if worst(0.0) < 0:
        return None
    low, high = 0.0, 1.0
    while worst(high) >= 0:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if worst(middle) >= 0 else (low, middle)
    return low


def tracking(past: Past = USUAL, points: int = 81, samples: int = 400_000, reach: float = 4.0) -> Tracking:
    """The gap against the tracking error, from -reach to reach."""
    errors = np.linspace(-reach, reach, points)
    turning = {name: turning_error(past, sign=sign) for name, sign in (("against m", -1), ("along m", 1))}
    around: dict[str, Estimate] = {}
    for name, turn in turning.items():
        if turn is not None:
            for side, factor in (("before", 0.8), ("after", 1.25)):
                around[f"{name}, {side}"] = estimate(past, error=factor * turn, samples=samples)
    return Tracking(
        errors=errors,
        gaps=np.array([gap(past, error=error) for error in errors]),
        bound=np.array([lower_bound(past, abs(error), error=error) for error in errors]),
        sharp=np.array([lower_bound(past, abs(error), error=error, sharp=True) for error in errors]),
        turning=turning,
        around=around,
        largest_delta=_promised(past, sharp=False),
        largest_delta_sharp=_promised(past, sharp=True),
    )


def stationary(beta2: float, mu: float = 1.0, beta1: float = 0.9, runs: int = 4000, seed: int = 0) -> Stationary:
    """What the theorem's mechanism leaves where m is an average of noisy gradients, as it is in training (ours).

    m then misses mu by a standard deviation of sqrt((1-beta1)/(1+beta1)) = 0.23 of the noise's, to either side alike.
    """
    rng, hyper = np.random.default_rng(seed), Hyper(lr=0.0, beta1=beta1, beta2=beta2, eps=1e-8)
    state = {"m": np.full(runs, mu), "s": np.full(runs, 2 * beta1**2 / (1 + beta1)), "u": np.zeros(runs)}
    for _ in range(min(2000, round(5 / (1 - beta2)) + 50)):
        _, state = MVNGRAD.update(0.0, mu + NORMAL.draw(rng, runs), state, math.inf, hyper, NUMPY)
    m, s = state["m"][:, None], state["s"][:, None]
    gaps = gap(Past(m=m, s=s, beta1=beta1, beta2=beta2, eps=hyper.eps), NORMAL, mu - m)
    half = NormalDist().inv_cdf(0.995) * gaps.std(ddof=1) / math.sqrt(runs)
    mean = gaps.mean()
    return Stationary(beta2, mu, float(mean), float(mean - half), float(mean + half), float((gaps < 0).mean()))


def variance_gap(past: Past = USUAL, points: int = 81, samples: int = 400_000) -> VarianceGap:
    """Both statements, from one past."""

    def each(noise: Noise) -> Symmetric:
        return Symmetric(
            noise.name, estimate(past, noise, samples=samples), closed_form(past, noise), float(gap(past, noise))
        )

    runs = max(500, samples // 100)
    return VarianceGap(
        past=past,
        symmetric=[each(noise) for noise in NOISES],
        tracking=tracking(past, points, samples),
        stationary=[stationary(beta2, mu, runs=runs) for beta2 in (0.95, 0.999) for mu in (0.1, 1.0, 10.0)],
    )
