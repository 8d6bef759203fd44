"""thm:mvngrad_convergence: MVN-Grad on a smooth nonconvex function with bounded noise, and the theorem's bound.

F(x) = sum_i x_i^2 / (1 + x_i^2) is 2-smooth with |F'| <= 3 sqrt(3)/8 and minimum 0. The noise of each coordinate has
two values, sigma sqrt((1-p)/p) with probability p and -sigma sqrt(p/(1-p)) otherwise: mean 0, variance sigma^2, random
signs for p = 1/2, skewed for p < 1/2. No bias correction, as in the paper's theory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np

from mvngrad.rule import MVNGRAD, Hyper
from mvngrad_lab.arrays import NUMPY, Floats, fit_exponent, to_json
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.experiments import Tick
from mvngrad_lab.recipe import Recipe

L = 2.0
STEEPEST = 3 * math.sqrt(3) / 8
"""max |F'|, at x^2 = 1/3."""


def gradient(x: Floats) -> Floats:
    return np.asarray(2 * x / (1 + x * x) ** 2)


@dataclass(frozen=True)
class Problem:
    """The problem and the constants of the theorem."""

    beta1: float = 0.5
    eps: float = 1.0
    sigma: float = 0.5
    p: float = 0.5
    d: int = 10
    start: float = 1.0
    """Every coordinate of x_0."""
    c: float = 1 / 3
    """The theorem requires "a constant c > 0" so small that the second term of the proof's last display dominates the
    third. With c = 1/3 the third is at most the second, which gives C_1 = 6."""

    def __post_init__(self) -> None:
        if self.eps > self.G:
            raise InvalidInput(f"eps={self.eps} is invalid; the theorem requires eps <= G = {self.G:.3g}")

    @property
    def noise_values(self) -> tuple[float, float]:
        """The value with probability p, and the other."""
        return self.sigma * math.sqrt((1 - self.p) / self.p), -self.sigma * math.sqrt(self.p / (1 - self.p))

    def draw_noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return np.where(rng.random(shape) < self.p, *self.noise_values)

    @property
    def G(self) -> float:
        """The largest possible |g|."""
        return STEEPEST + max(map(abs, self.noise_values))

    @property
    def gap(self) -> float:
        """Delta_0 = F(x_0) - F_star."""
        return self.d * self.start**2 / (1 + self.start**2)

    @property
    def largest_rate(self) -> float:
        """The theorem's c (1-beta1)^2 eps / (L beta1^2)."""
        return self.c * (1 - self.beta1) ** 2 * self.eps / (L * self.beta1**2)

    def rate(self, T: int) -> float:
        """The eta ~ 1/sqrt(T) that balances the first two terms of the bound, at most `largest_rate`."""
        return min(self.largest_rate, math.sqrt(2 * self.gap * self.eps**2 / (L * self.d * self.G**2 * T)))

    def terms(self, T: int, eta: float, beta2: float) -> tuple[float, float, float, float]:
        """The four terms of the proof's last display: descent, smoothness, virtual iterates, bias floor."""
        reach, d, G, eps = 2 * self.G + self.eps, self.d, self.G, self.eps
        return (
            2 * reach * self.gap / (eta * T),
            reach * L * eta * d * G**2 / eps**2,
            3 * reach * (L * self.beta1 * eta / (1 - self.beta1)) ** 2 * d * G**2 / eps**3,
            18 * self.beta1**2 * d * (1 - beta2) * G * reach**2 * self.sigma**3 / eps**4,
        )

    def bound(self, T: int, eta: float, beta2: float) -> float:
        """eq:general_rate, with C_1 = 6 and C_2 = 162 beta1^2: the proof's display with 2 G + eps <= 3 G."""
        C1, C2 = 3 * max(2.0, 1 + 3 * self.c), 18 * 9 * self.beta1**2
        G, d, eps = self.G, self.d, self.eps
        descent = C1 * G * self.gap / (eta * T) + C1 * L * eta * d * G**3 / eps**2
        return descent + C2 * d * (1 - beta2) * G**3 * self.sigma**3 / eps**4

    def covariance_bound(self, beta2: float) -> float:
        """eq:cov_bound."""
        return self.beta1 * math.sqrt(6 * self.G * (1 - beta2) * self.sigma**3) / self.eps**2

    def slopes(self, T: int, eta: float, beta2: float, runs: int, seed: int) -> Iterator[Floats]:
        """grad F(x_t)[run, coordinate] for t = 0, ..., T-1 of MVN-Grad."""
        rng, hyper = np.random.default_rng(seed), Hyper(lr=eta, beta1=self.beta1, beta2=beta2, eps=self.eps)
        x = np.full((runs, self.d), self.start)
        state = MVNGRAD.init(x)
        for _ in range(T):
            slope = gradient(x)
            yield slope
            x, state = MVNGRAD.update(x, slope + self.draw_noise(rng, x.shape), state, math.inf, hyper, NUMPY)


SYMMETRIC = Problem()
SKEWED = Problem(p=0.1)
RARE = Problem(p=1e-4, sigma=1e-3, eps=0.5)
"""Spikes of 0.1 so rare that s has forgotten one before the next, and almost no noise otherwise."""
PROBLEMS = {"symmetric": SYMMETRIC, "skewed": SKEWED, "rare": RARE}


def simulate_rate(problem: Problem = SYMMETRIC, longest: int = 30_000, runs: int = 32, seed: int = 0) -> dict[str, Any]:
    """1/T sum_{t<T} |grad F(x_t)|^2 with a 99% interval, against T, at beta2 = 1 - 1/T and eta ~ 1/sqrt(T)."""
    grid = [round(100 * 10 ** (k / 2)) for k in range(round(2 * math.log10(longest / 100)) + 1)]
    settings = [(T, problem.rate(T), 1 - 1 / T) for T in grid]
    averages = np.array(
        [sum((slope * slope).sum(axis=1) for slope in problem.slopes(*each, runs, seed)) / each[0] for each in settings]
    )
    measured = averages.mean(axis=1)
    return {
        "problem": problem,
        "T": grid,
        "eta": [eta for _, eta, _ in settings],
        "measured": measured,
        "half_width": NormalDist().inv_cdf(0.995) * averages.std(axis=1, ddof=1) / math.sqrt(runs),
        "display": [sum(problem.terms(*each)) for each in settings],  # the proof's last display
        "bound": [problem.bound(*each) for each in settings],
        "trivial": problem.d * STEEPEST**2,  # no run can exceed d max |F'|^2: a bound above it says nothing
        "exponent": fit_exponent(grid, measured),  # of T; the theorem's is -1/2
    }


def simulate_scaling(T: int = 1000, runs: int = 16) -> dict[str, Any]:
    """The average squared gradient against d and against 1/eps, with its exponents and those of the optimized bound.

    F(x_0) grows as d, so that G^2 sqrt(d L Delta_0) / (eps sqrt(T)) grows as d.
    """

    def measure(problem: Problem) -> float:
        slopes = problem.slopes(T, problem.rate(T), 1 - 1 / T, runs, seed=0)
        return float(sum((slope * slope).sum(axis=1).mean() for slope in slopes)) / T

    dimensions, epsilons = [2, 8, 32, 128], [0.125, 0.25, 0.5, 1.0]
    by_d = [measure(replace(SYMMETRIC, d=d)) for d in dimensions]
    by_eps = [measure(replace(SYMMETRIC, eps=eps)) for eps in epsilons]
    return {
        "d": fit_exponent(dimensions, by_d),
        "inverse_eps": fit_exponent([1 / eps for eps in epsilons], by_eps),
        "bound": {"d": 1.0, "inverse_eps": 1.0},
    }


def measure_bias(
    problem: Problem, beta2: float, runs: int = 500, steps: int = 200, seed: int = 0
) -> tuple[float, float]:
    """(E[xi w] / E[w], the largest |Cov(xi, w)|) at a constant x, where w = 1 / (sqrt(s) + eps).

    A method that follows E[z] = grad F E[w] + E[xi w] (eq:ez_decomp) comes to rest at grad F = -E[xi w] / E[w]. Neither
    depends on x, because g - m does not. The noise has two values, so both conditional expectations are sums of two
    terms, from the two steps that the rule could take; only the past is drawn.
    """
    rng, hyper = np.random.default_rng(seed), Hyper(beta1=0.0, beta_mean=problem.beta1, beta2=beta2, eps=problem.eps)
    state = MVNGRAD.init(np.zeros(runs))
    state["s"] += problem.sigma**2 * 2 * problem.beta1**2 / (1 + problem.beta1)
    product, normalizer, largest = 0.0, 0.0, 0.0
    warmup = min(20_000, round(4 / (1 - beta2)) + 50)
    for t in range(warmup + steps):
        if t >= warmup:
            xw, w = np.zeros(runs), np.zeros(runs)
            for probability, xi in zip((problem.p, 1 - problem.p), problem.noise_values, strict=True):
                _, branch = MVNGRAD.update(0.0, np.full(runs, xi), state, math.inf, hyper, NUMPY)
                xw += probability * branch["u"]  # beta1 = 0: u is z, which is xi w
                w += probability / (np.sqrt(branch["s"]) + problem.eps)
            product, normalizer = product + float(xw.mean()), normalizer + float(w.mean())
            largest = max(largest, float(abs(xw).max()))
        _, state = MVNGRAD.update(0.0, problem.draw_noise(rng, (runs,)), state, math.inf, hyper, NUMPY)
    return product / normalizer, largest


def simulate_floor(problem: Problem = SKEWED, points: int = 7, runs: int = 500, seed: int = 0) -> dict[str, Any]:
    """The squared gradient that remains as eta -> 0 and T -> inf, d (E[xi w] / E[w])^2, against 1 - beta2.

    The exponent is that of (1-beta2), over its smaller half; the bound's is 1. It is None at p = 1/2: with symmetric
    noise the two signs of every past cancel, there is no floor, and the measured one is Monte Carlo error.
    """
    distances = 2.0 ** -np.linspace(1, 9, points)  # 1 - beta2
    biases, covariances = np.array([measure_bias(problem, 1 - q, runs, seed=seed) for q in distances]).T
    floor = problem.d * biases**2
    small = distances <= math.sqrt(distances[0] * distances[-1])
    return {
        "problem": problem,
        "rest": distances,
        "floor": floor,
        "bound": [problem.terms(1, 1.0, 1 - q)[3] for q in distances],
        "covariance": covariances,
        "covariance_bound": [problem.covariance_bound(1 - q) for q in distances],
        "exponent": fit_exponent(distances[small], floor[small]) if problem.p != 0.5 else None,
    }


@dataclass(frozen=True)
class Rates(Recipe):
    name: ClassVar[str] = "convergence"
    longest: int = 30_000
    """The largest T."""
    runs: int = 32
    points: int = 7
    """Values of 1 - beta2."""


def make_recipe(quick: bool, data: Path | None) -> Rates:
    return Rates(longest=3000, runs=16, points=5) if quick else Rates()


def run(recipe: Rates, data: Path | None, tick: Tick) -> dict[str, Any]:
    return to_json(
        rate=simulate_rate(longest=recipe.longest, runs=recipe.runs),
        scaling=simulate_scaling(T=1000 if recipe.runs > 16 else 300),
        floors={name: simulate_floor(problem, recipe.points) for name, problem in PROBLEMS.items()},
    )
