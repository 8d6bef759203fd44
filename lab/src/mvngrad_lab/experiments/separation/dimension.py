"""Steps against the dimension: what thm:separation_MVN-Grad_LaProp_smallvar says of the two methods, counted.

The theorem's words leave open where one starts, and how far its limits (signs for LaProp, s = sigma^2 for MVN-Grad)
carry. So steps are counted from the proof's start and from one that knows no horizon, in the limits and out of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mvngrad.rule import LAPROP, MVNGRAD, Rule
from mvngrad_lab.arrays import Floats, fit_exponent
from mvngrad_lab.experiments.separation.simulation import (
    PROOF,
    Quadratic,
    Rate,
    Stable,
    laprop_error,
    laprop_gradient,
    laprop_horizon,
    laprop_lower_bound,
    laprop_start,
    stable,
)


def constant(rate: float) -> Rate:
    return lambda t: rate


@dataclass(frozen=True)
class Iterations:
    """Steps until |grad F| <= target, against the dimension d."""

    target: float
    dimensions: list[int]
    steps: dict[str, list[int | None]]
    exponents: dict[str, float]
    """k of steps ~ d^k, over the upper half of the dimensions."""


def _iterations(target: float, dimensions: list[int], steps: dict[str, list[int | None]]) -> Iterations:
    upper = len(dimensions) // 2
    exponents = {}
    for name, counts in steps.items():
        known = [(d, n) for d, n in zip(dimensions[upper:], counts[upper:], strict=True) if n]
        if len(known) > 1:
            exponents[name] = fit_exponent([d for d, _ in known], [n for _, n in known])
    return Iterations(target, dimensions, steps, exponents)


def at_the_proofs_start(problem: Quadratic, dimensions: list[int], target: float = 0.25) -> Iterations:
    """Both methods from the proof's x_0(T), where T is the horizon that LaProp needs in d dimensions.

    LaProp's coordinates are copies of one another whatever the noise, so 10 of them stand for d. Also the theorem's own
    count for MVN-Grad, 2 (F(x_0) - F_star) / (alpha (1-delta^2) target^2): F(x_0) grows with d, and so does the count.
    """
    steps: dict[str, list[int | None]] = {}
    for d in dimensions:
        T, few = laprop_horizon(problem, target, d), min(d, 10)
        a, scaled = laprop_start(problem, T), target * math.sqrt(few / d) * (1 + 1e-9)
        x = np.full(d, a)
        count = 2 * problem.F(x) / (problem.alpha * (1 - problem.delta**2) * target**2)
        for name, found in {
            "LaProp, signs": problem.steps_to(scaled, LAPROP, np.full(few, a), problem.laprop_rate, T),
            "MVN-Grad, s fixed": problem.steps_to(target, MVNGRAD, x, constant(problem.eta), 10 * T),
            "MVN-Grad, the theorem's count": math.ceil(count),
        }.items():
            steps.setdefault(name, []).append(found)
    return _iterations(target, dimensions, steps)


def at_one_start(
    problem: Quadratic, dimensions: list[int], target: float = 0.1, limit: int = 40_000, fixed_gap: bool = False
) -> Iterations:
    """Every reading from one start that knows no horizon: x_0 uniform in [1/2, 3/2]^d, over sqrt(d) for a `fixed_gap`.

    The O(1/eps^2) of (i) hides F(x_0) - F_star, which only then is the same in every dimension.

    Beside the theorem's two limits: LaProp with a memory of 100 steps in v; LaProp on signs with a constant rate chosen
    for d and the target; and MVN-Grad with s left to itself, a memory of 100 steps and additive noise.
    """
    quiet = replace(problem, sigma=1e-3 * target)
    steps: dict[str, list[int | None]] = {}
    for d in dimensions:
        x = np.random.default_rng(d).uniform(0.5, 1.5, d) / (math.sqrt(d) if fixed_gap else 1.0)
        tuned = 4 * target / (problem.L * math.sqrt(d))

        def count(rule: Rule, rate: Rate, problem: Quadratic = problem, x: Floats = x, **how: Any) -> int | None:
            return problem.steps_to(target, rule, x, rate, limit, **how)

        for name, found in {
            "LaProp, signs": count(LAPROP, problem.laprop_rate),
            "LaProp, beta2 = 0.99": count(LAPROP, problem.laprop_rate, beta2=0.99),
            "LaProp, signs, tuned constant rate": count(LAPROP, constant(tuned)),
            "MVN-Grad, s fixed": count(MVNGRAD, constant(problem.eta)),
            "MVN-Grad, beta2 = 0.99": count(MVNGRAD, constant(quiet.eta), quiet, beta2=0.99, noise=quiet.additive),
        }.items():
            steps.setdefault(name, []).append(found)
    return _iterations(target, dimensions, steps)


@dataclass(frozen=True)
class Resting:
    """How far s is from sigma^2 where the noise is +-sigma and the gradient K sigma, on the way down."""

    ratios: Floats
    """K = |grad_i F| / sigma."""
    observed: Floats
    """s / (sigma^2 2 beta^2/(1+beta)): 1 where s is the noise's."""
    limit: float
    """K at which the gradient's own change, alpha L beta/(1-beta) K sigma behind m, is as large as the noise."""


def resting(problem: Quadratic, start: float = 1e3, beta2: float = 0.99, d: int = 200, seed: int = 0) -> Resting:
    """Whether `s` comes to rest at sigma^2, as (i) assumes, while the gradient is still large (ours).

    m lags behind a gradient that shrinks, and s takes the lag for noise.
    """
    x = np.full(d, start * problem.sigma / problem.L)  # and m at its gradient, so that s knows of no spike
    ratios, observed = [], []
    usual = problem.sigma**2 * 2 * problem.beta**2 / (1 + problem.beta)
    path = problem.path(
        MVNGRAD, x, constant(problem.eta), beta2=beta2, noise=problem.additive, start={"m": problem.L * x}, seed=seed
    )
    for t, (now, _, state) in enumerate(path):
        ratios.append(float(abs(problem.L * now).mean()) / problem.sigma)
        observed.append(float(state["s"].mean()) / usual)
        if ratios[-1] < 1 or t > 20_000:
            break
    lag = problem.alpha * problem.L * problem.beta / (1 - problem.beta)
    return Resting(np.array(ratios), np.array(observed), 1 / lag)


@dataclass(frozen=True)
class Separation:
    problem: Quadratic
    stable: Stable
    closed_form_error: float
    """The largest |x_t - closed form| / a of LaProp by the rule."""
    smallest_gradient: float
    """LaProp's, at the horizon, by the rule."""
    smallest_gradient_expected: float
    lower_bound: float
    horizon: int
    proofs_start: Iterations
    one_start: Iterations
    fixed_gap: Iterations
    """The same for starts of about one F(x_0), up to d = 1000."""
    resting: Resting


def separation(
    problem: Quadratic = PROOF, largest: int = 10_000, steps: int = 300, horizon: int = 1000, d: int = 100
) -> Separation:
    """Everything of the theorem; `largest` is the largest dimension."""
    dimensions = [round(size) for size in np.logspace(0, math.log10(largest), 2 * round(math.log10(largest)) + 1)]
    error, smallest = laprop_error(problem, horizon, d)
    return Separation(
        problem=problem,
        # at the largest alpha the bound on the sums is an equality in expectation, which a single run may exceed
        stable=stable(replace(problem, share=problem.share / 2), np.linspace(0.5, 1.5, d), steps),
        closed_form_error=error,
        smallest_gradient=smallest,
        smallest_gradient_expected=laprop_gradient(problem, horizon, d),
        lower_bound=laprop_lower_bound(problem, horizon, d),
        horizon=horizon,
        proofs_start=at_the_proofs_start(problem, dimensions),
        one_start=at_one_start(problem, dimensions),
        fixed_gap=at_one_start(problem, [d for d in dimensions if d <= 1000], fixed_gap=True),
        resting=resting(problem),
    )
