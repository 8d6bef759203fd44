"""thm:var_adabelief_mvngrad and prop:approx_mean: momentum before or after normalizing, which update varies less?

The state before a step (m, s, u) is fixed, and the next gradient g = m + e + xi is drawn many times: xi is symmetric
about 0, e is the error of m as an estimate of the mean. The gap is Var(AdaBelief's update) - Var(MVN-Grad's update).
Updates are computed by the rule, expectations by Monte Carlo, or by quadrature where a sign or an identity is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np

from mvngrad.rule import ADABELIEF, MVNGRAD, Hyper, Rule
from mvngrad_lab.arrays import NUMPY, Floats, to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.recipe import Recipe


@dataclass(frozen=True)
class Noise:
    """A distribution symmetric about 0 with variance 1: how to draw from it, and a quadrature rule for it."""

    name: str
    draw: Callable[[np.random.Generator, int], Floats]
    points: Floats
    weights: Floats


def _normal(count: int = 120) -> Noise:
    points, weights = np.polynomial.hermite_e.hermegauss(count)
    return Noise("normal", lambda rng, n: rng.standard_normal(n), points, weights / weights.sum())


def _uniform(count: int = 200) -> Noise:
    points, weights = np.polynomial.legendre.leggauss(count)
    root = math.sqrt(3)
    return Noise("uniform", lambda rng, n: rng.uniform(-root, root, n), root * points, weights / 2)


NORMAL, UNIFORM = _normal(), _uniform()
SIGNS = Noise("signs", lambda rng, n: rng.choice([-1.0, 1.0], n), np.array([-1.0, 1.0]), np.array([0.5, 0.5]))
NOISES = (NORMAL, UNIFORM, SIGNS)


@dataclass(frozen=True)
class Past:
    """The state before the step; the defaults are the betas of the paper's own diagnostic (app:mnist-vgap)."""

    m: Any = 0.7
    """A number or, like s, an array of shape (n, 1): n pasts at once."""
    s: Any = 0.2
    u: float = 1.0
    sigma: float = 1.0
    """The standard deviation of xi."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-3
    t: float = math.inf
    """The step number; infinite means no bias correction, as in the paper's theory."""

    def gradients(self, xi: Floats, error: Any) -> Floats:
        return np.asarray(self.m + error + self.sigma * xi)

    def update(self, rule: Rule, g: Floats) -> Floats:
        """Delta_t for each gradient g."""
        return np.asarray(-self._step(rule, g)[0])

    def y(self, g: Floats) -> Floats:
        """Y_t = 1 / (sqrt(s_t) + eps)."""
        s = self._step(MVNGRAD, g)[1]["s"] / (1 - self.beta2**self.t)
        return np.asarray(1 / (np.sqrt(s) + self.eps))

    def _step(self, rule: Rule, g: Floats) -> tuple[Any, dict[str, Any]]:
        hyper = Hyper(lr=1.0, beta1=self.beta1, beta2=self.beta2, eps=self.eps)
        state = {name: np.full_like(g, getattr(self, name)) for name in rule.state_names}
        return rule.update(np.zeros_like(g), g, state, self.t, hyper, NUMPY)

    @property
    def y_max(self) -> float:
        """The largest possible Y_t, from s_t >= beta2 s_{t-1}. The proposition uses 1/eps instead."""
        return 1 / (math.sqrt(self.beta2 * self.s / (1 - self.beta2**self.t)) + self.eps)


def variance(values: Floats, weights: Floats) -> Any:
    """Var of a function of xi from its values[..., k] at the points of a `Noise`."""
    return (values - (values @ weights)[..., None]) ** 2 @ weights


def gap(past: Past, noise: Noise = NORMAL, error: Any = 0.0, cells: tuple[Rule, Rule] = (ADABELIEF, MVNGRAD)) -> Any:
    """Delta Var_t by quadrature; `error`, like m and s, may be an array of shape (n, 1)."""
    g = past.gradients(noise.points, error)
    first, second = (variance(past.update(rule, g), noise.weights) for rule in cells)
    return first - second


def variance_of_y(past: Past, noise: Noise, error: float) -> float:
    return float(variance(past.y(past.gradients(noise.points, error)), noise.weights))


def closed_form(past: Past, noise: Noise = NORMAL) -> float:
    """(2 beta1 - beta1^2) m^2 Var(Y): the gap where error = 0 (thm:var_adabelief_mvngrad)."""
    spread = variance_of_y(past, noise, 0.0)
    return float(past.beta1 * (2 - past.beta1) * past.m**2 * spread / (1 - past.beta1**past.t) ** 2)


def lower_bound(past: Past, delta: float, error: float | None = None, sharp: bool = False) -> float:
    """The proposition's bound for a tracking error of at most delta (prop:approx_mean), Var(Y) taken at `error`.

    `sharp` (ours) uses |Cov(Y, xi Y)| <= sqrt(Var Y E[xi^2 Y^2]) <= sqrt(Var Y) sigma max Y, a step of the proof; the
    proposition then bounds it by sigma/eps^2.
    """
    spread = variance_of_y(past, NORMAL, delta if error is None else error)
    coupling = math.sqrt(spread) * past.sigma * past.y_max if sharp else past.sigma / past.eps**2
    gain = past.beta1 * (2 - past.beta1) * past.m**2 * spread
    loss = 2 * past.beta1 * (1 - past.beta1) * abs(past.m) * (delta * spread + coupling)
    return float((gain - loss) / (1 - past.beta1**past.t) ** 2)


def half_width(values: Floats, level: float = 0.99) -> float:
    """Half the width of a normal confidence interval for the mean."""
    return float(NormalDist().inv_cdf((1 + level) / 2) * values.std(ddof=1) / math.sqrt(len(values)))


def estimate(
    past: Past,
    noise: Noise = NORMAL,
    error: float = 0.0,
    samples: int = 400_000,
    batches: int = 100,
    level: float = 0.99,
    seed: int = 0,
    cells: tuple[Rule, Rule] = (ADABELIEF, MVNGRAD),
) -> dict[str, Any]:
    """Delta Var_t by Monte Carlo, as on a network: the mean gap of sample variances over independent batches.

    Both optimizers see the same gradients. The gap of a batch is unbiased, and the spread of the batches gives the
    confidence interval.
    """
    g = past.gradients(noise.draw(np.random.default_rng(seed), samples), error).reshape(batches, -1)
    first, second = (past.update(rule, g).var(axis=1, ddof=1) for rule in cells)
    value, half = float((first - second).mean()), half_width(first - second, level)
    setting = {"samples": samples, "batches": batches, "level": level}
    return {"value": value, "low": value - half, "high": value + half, **setting}


def find_turning_error(past: Past, noise: Noise = NORMAL, sign: int = 1, largest: float = 100.0) -> float | None:
    """The smallest |e|, with this sign, at which the gap becomes negative; None if it does not up to `largest`."""
    scan = np.concatenate([[0.0], np.geomspace(1e-3, largest, 400)])
    negative = [gap(past, noise, sign * size) < 0 for size in scan]
    if True not in negative:
        return None
    first = negative.index(True)
    low, high = float(scan[max(0, first - 1)]), float(scan[first])
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if gap(past, noise, sign * middle) < 0 else (middle, high)
    return sign * high


def simulate_symmetric_noise(past: Past, noise: Noise, samples: int) -> dict[str, Any]:
    """thm:var_adabelief_mvngrad for one distribution: three values that must agree."""
    return {
        "noise": noise.name,
        "estimate": estimate(past, noise, samples=samples),
        "closed_form": closed_form(past, noise),
        "quadrature": gap(past, noise),
    }


def simulate_tracking_error(past: Past, points: int = 81, samples: int = 400_000, reach: float = 4.0) -> dict[str, Any]:
    """prop:approx_mean: the gap and its bounds against the tracking error, from -reach to reach.

    "turning" says where the gap becomes negative, in either direction; "around" has estimates on both sides of it.
    """
    errors = np.linspace(-reach, reach, points)
    turning = {name: find_turning_error(past, sign=sign) for name, sign in (("against m", -1), ("along m", 1))}
    around = {
        f"{name}, {side}": estimate(past, error=factor * turn, samples=samples)
        for name, turn in turning.items()
        if turn is not None
        for side, factor in (("before", 0.8), ("after", 1.25))
    }
    return {
        "errors": errors,
        "gaps": [gap(past, error=error) for error in errors],
        "bound": [lower_bound(past, abs(error), error=error) for error in errors],
        "sharp": [lower_bound(past, abs(error), error=error, sharp=True) for error in errors],
        "turning": turning,
        "around": around,
    }


def simulate_condition(past: Past) -> dict[str, Any]:
    """The last sentence of prop:approx_mean: where its condition on |m| holds, the gap is not negative.

    The gap at tracking errors of both signs, for |m| from 1 to 10^8 times sigma and several eps and delta, with s at
    its value in training.
    """
    rows = []
    s = past.sigma**2 * 2 * past.beta1**2 / (1 + past.beta1)
    for eps in (1e-3, 1e-1, 1.0):
        for delta in (0.1, 1.0):
            for m in 10.0 ** np.arange(0, 8.5, 0.5):
                here = replace(past, m=m, s=s, eps=eps)
                for error in (-delta, delta):
                    spread = variance_of_y(here, NORMAL, error)
                    needed = 2 * (1 - here.beta1) * (delta * spread + here.sigma / eps**2)
                    holds = (2 - here.beta1) * m * spread >= needed
                    rows.append({"m": m, "eps": eps, "holds": holds, "gap": float(gap(here, NORMAL, error))})
    return {
        "settings": len(rows),
        "holds": sum(row["holds"] for row in rows),
        "smallest_gap": min((row["gap"] for row in rows if row["holds"]), default=None),
        "smallest_m": {
            f"{eps:g}": min((row["m"] for row in rows if row["holds"] and row["eps"] == eps), default=None)
            for eps in (1e-3, 1e-1, 1.0)
        },
    }


def simulate_training_pasts(
    beta2: float, mu: float = 1.0, beta1: float = 0.9, runs: int = 4000, seed: int = 0
) -> dict[str, Any]:
    """The gap where m is an average of noisy gradients, as in training (ours): many runs of gradients mu + xi.

    The error of m then has a standard deviation of sqrt((1-beta1)/(1+beta1)) = 0.23 of the noise's, and either sign.
    """
    rng, hyper = np.random.default_rng(seed), Hyper(lr=0.0, beta1=beta1, beta2=beta2, eps=1e-8)
    state = {"m": np.full(runs, mu), "s": np.full(runs, 2 * beta1**2 / (1 + beta1)), "u": np.zeros(runs)}
    for _ in range(min(2000, round(5 / (1 - beta2)) + 50)):
        _, state = MVNGRAD.update(0.0, mu + NORMAL.draw(rng, runs), state, math.inf, hyper, NUMPY)
    m, s = state["m"][:, None], state["s"][:, None]
    gaps = gap(Past(m=m, s=s, beta1=beta1, beta2=beta2, eps=hyper.eps), NORMAL, mu - m)
    mean, half = float(gaps.mean()), half_width(gaps)
    negative = float((gaps < 0).mean())
    return {"beta2": beta2, "mu": mu, "mean": mean, "low": mean - half, "high": mean + half, "negative": negative}


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
    past, samples = Past(), recipe.samples
    pasts = [(beta2, mu) for beta2 in (0.95, 0.999) for mu in (0.1, 1.0, 10.0)]
    return to_json(
        past=past,
        symmetric=[simulate_symmetric_noise(past, noise, samples) for noise in NOISES],
        tracking=simulate_tracking_error(past, recipe.points, samples),
        condition=simulate_condition(past),
        stationary=[simulate_training_pasts(beta2, mu, runs=max(500, samples // 100)) for beta2, mu in pasts],
    )
