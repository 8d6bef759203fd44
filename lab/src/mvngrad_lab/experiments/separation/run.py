"""thm:separation_MVN-Grad_LaProp_smallvar: variance against second moment where noise is small.

The construction of the proof: F = L/2 |x|^2 in d dimensions, g = grad F + xi with xi_i = +-delta |grad_i F| at random,
no bias correction. The theorem's two limits are settings of the rule: LaProp with beta2 = 0 and eps = 0 is momentum on
signs, and MVN-Grad with beta2 -> 1 keeps the s it starts with, here sigma^2.

The theorem says neither where the methods start nor how far its limits hold. So steps are counted from the proof's
start and from one that depends on no horizon, with the limits and without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mvngrad.rule import ADABELIEF, ADAM, LAPROP, MVNGRAD, Hyper, Rule
from mvngrad_lab.arrays import NUMPY, Floats, fit_exponent, to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.recipe import Recipe

Noise = Callable[[np.random.Generator, Floats], Floats]
"""xi for the true gradient."""

ENDLESS = 1 - 2.0**-53
"""The largest beta2 below 1: s does not change, except by rounding."""


def draw_signs(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return 2 * rng.integers(0, 2, shape, dtype=np.int8).astype(np.float64) - 1


@dataclass(frozen=True)
class Quadratic:
    """The objective, the noise and the two methods of the theorem. The paper gives no numbers; these are ours."""

    L: float = 1.0
    beta: float = 0.9
    delta: float = 0.5
    """|xi_i| <= delta |grad_i F|."""
    sigma: float = 1.0
    """The root of the constant s."""
    c: float = 1.0
    """LaProp's eta_t = c / (L sqrt(t+1))."""
    share: float = 1.0
    """alpha as a fraction of the largest that eq:stepsize_mvn_stoch allows."""

    def F(self, x: Floats) -> float:
        return self.L / 2 * float(x @ x)

    def relative_noise(self, rng: np.random.Generator, gradient: Floats) -> Floats:
        """xi of the high-SNR oracle (ass:oracle_second_variance)."""
        return self.delta * abs(gradient) * draw_signs(rng, gradient.shape)

    def additive_noise(self, rng: np.random.Generator, gradient: Floats) -> Floats:
        """+-sigma: the isotropic noise of ass:stationary, with which s stays near sigma^2."""
        return self.sigma * draw_signs(rng, gradient.shape)

    @property
    def alpha(self) -> float:
        return self.share * (1 - self.beta**2) / self.L

    @property
    def mvngrad_rate(self) -> float:
        """eta = alpha sigma / (1-beta)."""
        return self.alpha * self.sigma / (1 - self.beta)

    @property
    def upper_bound(self) -> float:
        """The bound of (i) on the expected sum of squared gradients, per F(x_0)."""
        return 2 / (self.alpha * (1 - self.delta**2))

    def laprop_rate(self, t: Any) -> Any:
        return self.c / (self.L * np.sqrt(t + 1))

    def step(
        self, rule: Rule, x: Floats, g: Floats, state: dict[str, Any], rate: float, beta2: float | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        """One step of the rule. Without beta2 the limit of the theorem: signs for LaProp, a constant s for MVN-Grad."""
        limit = ENDLESS if rule.centered else 0.0
        hyper = Hyper(lr=rate, beta1=self.beta, beta2=limit if beta2 is None else beta2, eps=0.0)
        return rule.update(x, g, state, math.inf, hyper, NUMPY)

    def make_state(self, rule: Rule, x: Floats) -> dict[str, Any]:
        """s at sigma^2, all else at 0."""
        return {name: np.full_like(x, self.sigma**2 if name == "s" else 0.0) for name in rule.state_names}

    def path(
        self,
        rule: Rule,
        x: Floats,
        beta2: float | None = None,
        rates: Iterable[float] | None = None,
        noise: Noise | None = None,
        start: dict[str, Floats] | None = None,
        seed: int = 0,
    ) -> Iterator[tuple[Floats, dict[str, Any]]]:
        """x_t and the state for t = 1, 2, ... from x_0 = x; by default at the theorem's rates, from `make_state`."""
        rng, noise = np.random.default_rng(seed), noise or self.relative_noise
        state = self.make_state(rule, x) | (start or {})
        if rates is None:
            rates = repeat(self.mvngrad_rate) if rule.centered else map(self.laprop_rate, count())
        for rate in rates:
            gradient = self.L * x
            x, state = self.step(rule, x, gradient + noise(rng, gradient), state, rate, beta2)
            yield x, state

    def count_steps(self, target: float, rule: Rule, x: Floats, limit: int, **options: Any) -> int | None:
        """The first t with |grad F(x_t)| <= target; None if that takes more than `limit` steps."""
        if self.L * np.linalg.norm(x) <= target:
            return 0
        path = islice(self.path(rule, x, **options), limit)
        return next((t for t, (now, _) in enumerate(path, start=1) if self.L * np.linalg.norm(now) <= target), None)

    # LaProp on signs, in closed form

    def laprop_coordinate(self, horizon: int) -> Floats:
        """Each coordinate of x_0, ..., x_T (lem:laprop_finite_horizon).

        It starts at a of eq:a-def-stoch: as far as `horizon` steps go, and half a step more.
        """
        t = np.arange(horizon)
        moves = self.laprop_rate(t) * (1 - self.beta ** (t + 1))
        return np.asarray(moves.sum() + moves[-1] / 2 - np.concatenate([[0.0], np.cumsum(moves)]))

    def laprop_gradient(self, horizon: int, d: int) -> float:
        """The smallest |grad F(x_t)| up to T, L/2 (1-beta^T) eta_{T-1} sqrt(d) (lem:laprop_finite_horizon)."""
        return float(self.L / 2 * (1 - self.beta**horizon) * self.laprop_rate(horizon - 1) * math.sqrt(d))

    def laprop_lower_bound(self, horizon: int, d: int) -> float:
        """c sqrt(d) / (4 sqrt(T)), if 1 - beta^T >= 1/2 (thm:laprop_omega_d_eps2)."""
        return self.c * math.sqrt(d / horizon) / 4

    def laprop_horizon(self, target: float, d: int) -> int:
        """The smallest T, where 1 - beta^T >= 1/2 and the gradient at T decreases with T, that reaches the target."""
        first = next(T for T in count(1) if self.laprop_gradient(T + 1, 1) < self.laprop_gradient(T, 1))
        first = max(first, math.ceil(math.log(0.5) / math.log(self.beta)))
        return next(T for T in count(first) if self.laprop_gradient(T, d) <= target)


PROOF = Quadratic()


def check_lemmas(problem: Quadratic, x: Floats, steps: int, rule: Rule = MVNGRAD, seed: int = 0) -> dict[str, Any]:
    """Check both lemmas at each step of MVN-Grad with s = sigma^2.

    "heavy_ball_error" is the largest |x_t - x_{t-1} - (beta (x_{t-1} - x_{t-2}) - alpha g_t)| / |x_0|
    (lem:mvn_to_hb_stoch), "variance_error" the largest |s_t / sigma^2 - 1|, "slack" the difference of the two sides of
    eq:one_step_descent, Phi_{t-1} - alpha/2 (|grad F(x_{t-1})|^2 - E|xi_t|^2) - E[Phi_t], over Phi_0.

    Phi is quadratic and separable and xi_t a random sign times a known size, so the conditional expectation of Phi_t is
    its mean over xi_t and -xi_t, exactly: the rule takes each step with both.
    """
    alpha, weight = problem.alpha, problem.beta**2 / (2 * problem.alpha)
    rng, state = np.random.default_rng(seed), problem.make_state(rule, x)
    last_move, scale, start = np.zeros_like(x), float(np.linalg.norm(x)), problem.F(x)
    gradients, slack, heavy_ball_errors, variance_errors = [], [], [], [0.0]
    for _ in range(steps):
        gradient = problem.L * x
        xi = problem.relative_noise(rng, gradient)
        other_move = problem.step(rule, x, gradient - xi, state, problem.mvngrad_rate)[0] - x
        new, state = problem.step(rule, x, gradient + xi, state, problem.mvngrad_rate)
        move = new - x
        heavy_ball = problem.beta * last_move - alpha * (gradient + xi)
        heavy_ball_errors.append(float(np.linalg.norm(move - heavy_ball)) / scale)
        if "s" in state:
            variance_errors.append(float(abs(state["s"] / problem.sigma**2 - 1).max()))
        after = np.mean([problem.F(x + each) + weight * (each @ each) for each in (move, other_move)])
        allowed = problem.F(x) + weight * (last_move @ last_move) - alpha / 2 * (gradient @ gradient - xi @ xi)
        slack.append((allowed - after) / start)
        gradients.append(gradient @ gradient)
        x, last_move = new, move
    return {
        "gradients": gradients,
        "heavy_ball_error": max(heavy_ball_errors),
        "variance_error": max(variance_errors),
        "slack": slack,
        "sums": np.cumsum(gradients),
        "bound": problem.upper_bound * start,
    }


def check_laprop(problem: Quadratic, horizon: int, d: int, rule: Rule = LAPROP) -> tuple[float, float]:
    """The largest error of lem:laprop_finite_horizon, relative to x_0, and the smallest |grad F|, both by the rule."""
    expected = problem.laprop_coordinate(horizon)
    rates = problem.laprop_rate(np.arange(horizon))
    path = [x for x, _ in problem.path(rule, np.full(d, expected[0]), rates=rates)]
    error = np.abs(np.array(path) - expected[1:, None]).max() / expected[0]
    return float(error), problem.L * float(np.linalg.norm(path, axis=1).min())


def _with_exponents(target: float, dimensions: list[int], steps: dict[str, list[int | None]]) -> dict[str, Any]:
    """Steps until |grad F| <= target in each dimension d, and the k of steps ~ d^k over the upper half of them."""
    upper, exponents = len(dimensions) // 2, {}
    for name, counts in steps.items():
        reached = [(d, n) for d, n in zip(dimensions[upper:], counts[upper:], strict=True) if n]
        if len(reached) > 1:
            exponents[name] = fit_exponent(*zip(*reached, strict=True))
    return {"target": target, "dimensions": dimensions, "steps": steps, "exponents": exponents}


def count_from_proofs_start(problem: Quadratic, dimensions: list[int], target: float = 0.25) -> dict[str, Any]:
    """Both methods from the proof's x_0(T), where T is the horizon that LaProp needs in d dimensions.

    LaProp's coordinates are equal whatever the noise, so 10 of them represent d. Also the theorem's own count for
    MVN-Grad, 2 (F(x_0) - F_star) / (alpha (1-delta^2) target^2): F(x_0) grows with d, and so does the count.
    """
    steps: dict[str, list[int | None]] = {}
    for d in dimensions:
        T, few = problem.laprop_horizon(target, d), min(d, 10)
        x = np.full(d, problem.laprop_coordinate(T)[0])
        scaled = target * math.sqrt(few / d) * (1 + 1e-9)
        for name, counted in {
            "LaProp, signs": problem.count_steps(scaled, LAPROP, x[:few], T),
            "MVN-Grad, s fixed": problem.count_steps(target, MVNGRAD, x, 10 * T),
            "Adam, beta2 = 0.99": problem.count_steps(scaled, ADAM, x[:few], 10 * T, beta2=0.99),
            "MVN-Grad, the theorem's count": math.ceil(problem.upper_bound * problem.F(x) / target**2),
        }.items():
            steps.setdefault(name, []).append(counted)
    return _with_exponents(target, dimensions, steps)


def count_from_one_start(
    problem: Quadratic, dimensions: list[int], target: float = 0.1, limit: int = 40_000, fixed_gap: bool = False
) -> dict[str, Any]:
    """Every reading of the theorem from one start: x_0 uniform in [1/2, 3/2]^d, over sqrt(d) with `fixed_gap`.

    The O(1/eps^2) of (i) hides F(x_0) - F_star, which only with `fixed_gap` is the same in every dimension.

    Besides the theorem's two limits: LaProp with beta2 = 0.99; LaProp on signs with a constant rate chosen for d and
    the target; and MVN-Grad with beta2 = 0.99, so that s changes, and additive noise.
    """
    quiet = replace(problem, sigma=1e-3 * target)
    steps: dict[str, list[int | None]] = {}
    for d in dimensions:
        x = np.random.default_rng(d).uniform(0.5, 1.5, d) / (math.sqrt(d) if fixed_gap else 1.0)
        tuned = repeat(4 * target / (problem.L * math.sqrt(d)))
        readings: dict[str, tuple[Quadratic, Rule, dict[str, Any]]] = {
            "LaProp, signs": (problem, LAPROP, {}),
            "LaProp, beta2 = 0.99": (problem, LAPROP, {"beta2": 0.99}),
            "LaProp, signs, tuned constant rate": (problem, LAPROP, {"rates": tuned}),
            "MVN-Grad, s fixed": (problem, MVNGRAD, {}),
            "AdaBelief, s fixed": (problem, ADABELIEF, {}),
            "MVN-Grad, beta2 = 0.99": (quiet, MVNGRAD, {"beta2": 0.99, "noise": quiet.additive_noise}),
        }
        for name, (model, rule, options) in readings.items():
            steps.setdefault(name, []).append(model.count_steps(target, rule, x, limit, **options))
    return _with_exponents(target, dimensions, steps)


def simulate_rates(problem: Quadratic, horizons: list[int], d: int = 100) -> dict[str, Any]:
    """1/T sum_{t<T} |grad F(x_t)|^2 against T, and its exponent: MVN-Grad with s fixed, and Adam with beta2 = 0.99 at
    the rate c / sqrt(T) of its theorem and at a constant one.
    """
    x = np.random.default_rng(d).uniform(0.5, 1.5, d)
    averages: dict[str, list[float]] = {}
    for T in horizons:
        readings: dict[str, tuple[Rule, dict[str, Any]]] = {
            "MVN-Grad, s fixed": (MVNGRAD, {}),
            "Adam, rate 1/√T": (ADAM, {"beta2": 0.99, "rates": repeat(problem.c / (problem.L * math.sqrt(T)))}),
            "Adam, constant rate": (ADAM, {"beta2": 0.99, "rates": repeat(1e-3)}),
        }
        for name, (rule, options) in readings.items():
            path = [x, *(now for now, _ in islice(problem.path(rule, x, **options), T - 1))]
            averages.setdefault(name, []).append(float((problem.L**2 * np.square(path)).sum()) / T)
    exponents = {name: fit_exponent(horizons, values) for name, values in averages.items()}
    return {"T": horizons, "averages": averages, "exponents": exponents}


def simulate_s(
    problem: Quadratic, start: float = 1e3, beta2: float = 0.99, d: int = 200, seed: int = 0
) -> dict[str, Any]:
    """Does `s` come to rest at sigma^2, as (i) assumes, while the gradient is still large (ours)?

    m lags behind a gradient that shrinks, and s counts the lag as noise. "ratios" are K = |grad_i F| / sigma on the way
    down, with noise +-sigma; "observed" is s over its value from noise alone, sigma^2 2 beta^2/(1+beta); "limit" is
    the K at which the lag of m, alpha L beta/(1-beta) K sigma, is as large as the noise.
    """
    x = np.full(d, start * problem.sigma / problem.L)
    ratios, observed = [], []
    usual = problem.sigma**2 * 2 * problem.beta**2 / (1 + problem.beta)
    at_gradient = {"m": problem.L * x}  # m starts at the gradient, so that the first one is no spike
    path = problem.path(MVNGRAD, x, beta2, noise=problem.additive_noise, start=at_gradient, seed=seed)
    for now, state in islice(path, 20_002):
        ratios.append(float(abs(problem.L * now).mean()) / problem.sigma)
        observed.append(float(state["s"].mean()) / usual)
        if ratios[-1] < 1:
            break
    lag = problem.alpha * problem.L * problem.beta / (1 - problem.beta)
    return {"ratios": ratios, "observed": observed, "limit": 1 / lag}


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
    return to_json(
        problem=PROOF,
        stable=check_lemmas(half, np.linspace(0.5, 1.5, D, dtype=np.float64), recipe.steps),
        closed_form_error=error,
        smallest_gradient=smallest,
        lower_bound=PROOF.laprop_lower_bound(horizon, D),
        horizon=horizon,
        proofs_start=count_from_proofs_start(PROOF, dimensions),
        one_start=count_from_one_start(PROOF, dimensions),
        fixed_gap=count_from_one_start(PROOF, [d for d in dimensions if d <= 1000], fixed_gap=True),
        resting=simulate_s(PROOF),
        rates=simulate_rates(PROOF, [30, 100, 300, 1000, 3000][: 3 if recipe.largest < 10_000 else 5]),
    )
