"""Theorem thm:mvngrad_convergence: MVN-Grad on a smooth nonconvex function with bounded noise, against its bound.

F(x) = sum_i x_i^2 / (1 + x_i^2), which is 2-smooth with |F'| <= 3 sqrt(3)/8 and F_star = 0. The noise of a coordinate
has two values, sigma sqrt((1-p)/p) with probability p and -sigma sqrt(p/(1-p)) otherwise: mean 0, variance sigma^2,
signs at p = 1/2 and skewed below. No bias correction, as in the theory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from mvngrad.rule import MVNGRAD, Hyper
from mvngrad_lab.arrays import NUMPY, Floats, fit_exponent

L = 2.0
STEEPEST = 3 * math.sqrt(3) / 8
"""max |F'|, at x^2 = 1/3."""


def gradient(x: Floats) -> Floats:
    return np.asarray(2 * x / (1 + x * x) ** 2)


@dataclass(frozen=True)
class Bounded:
    """The problem and the constants of the theorem."""

    beta1: float = 0.5
    eps: float = 1.0
    sigma: float = 0.5
    p: float = 0.5
    d: int = 10
    start: float = 1.0
    """Every coordinate of x_0."""
    c: float = 1 / 3
    """The theorem asks for 'a constant c > 0', small enough for the third term of the proof's last display to be
    dominated by the second. With c = 1/3 it is at most the second, which gives C_1 = 6."""

    def __post_init__(self) -> None:
        if self.eps > self.G:
            raise ValueError(f"eps={self.eps} is invalid; the theorem asks for eps <= G = {self.G:.3g}")

    @property
    def values(self) -> tuple[float, float]:
        """The two values of the noise, the likely one last."""
        return self.sigma * math.sqrt((1 - self.p) / self.p), -self.sigma * math.sqrt(self.p / (1 - self.p))

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return np.where(rng.random(shape) < self.p, *self.values)

    @property
    def G(self) -> float:
        """What no |g| exceeds."""
        return STEEPEST + max(map(abs, self.values))

    @property
    def gap(self) -> float:
        """Delta_0 = F(x_0) - F_star."""
        return self.d * self.start**2 / (1 + self.start**2)

    @property
    def largest_rate(self) -> float:
        """The theorem's c (1-beta1)^2 eps / (L beta1^2)."""
        return self.c * (1 - self.beta1) ** 2 * self.eps / (L * self.beta1**2)

    def rate(self, T: int) -> float:
        """The eta that balances the first two terms of the bound, where the theorem allows it: ~ 1/sqrt(T)."""
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

    def averages(self, T: int, eta: float, beta2: float, runs: int, seed: int = 0) -> Floats:
        """1/T sum_{t<T} |grad F(x_t)|^2 of each run."""
        rng, hyper = np.random.default_rng(seed), Hyper(lr=eta, beta1=self.beta1, beta2=beta2, eps=self.eps)
        x = np.full((runs, self.d), self.start)
        state, total = MVNGRAD.init(x), np.zeros(runs)
        for _ in range(T):
            slope = gradient(x)
            total += (slope * slope).sum(axis=1)
            x, state = MVNGRAD.update(x, slope + self.draw(rng, x.shape), state, math.inf, hyper, NUMPY)
        return total / T


USUAL = Bounded()
SKEWED = Bounded(p=0.1)
RARE = Bounded(p=1e-4, sigma=1e-3, eps=0.5)
"""Noise that is nearly always nearly nothing: spikes of 0.1, so rare that s has forgotten the last."""


@dataclass(frozen=True)
class RateCurve:
    """The average squared gradient against T, at beta2 = 1 - 1/T and eta ~ 1/sqrt(T)."""

    problem: Bounded
    T: list[int]
    eta: list[float]
    measured: Floats
    half_width: Floats
    """Of a 99% normal interval over independent runs."""
    display: Floats
    """The proof's last display."""
    bound: Floats
    """eq:general_rate."""
    trivial: float
    """d max |F'|^2, which no run can exceed: below it the bound says something."""
    exponent: float
    """k of measured ~ T^k; the theorem's rate is -1/2."""


def rate_curve(problem: Bounded = USUAL, longest: int = 30_000, runs: int = 32, seed: int = 0) -> RateCurve:
    """Half a decade of T at a time, from 100."""
    grid = [round(100 * 10 ** (k / 2)) for k in range(round(2 * math.log10(longest / 100)) + 1)]
    rates = [problem.rate(T) for T in grid]
    found = [problem.averages(T, eta, 1 - 1 / T, runs, seed=seed) for T, eta in zip(grid, rates, strict=True)]
    measured = np.array([averages.mean() for averages in found])
    spread = np.array([averages.std(ddof=1) for averages in found]) / math.sqrt(runs)
    settings = [(T, eta, 1 - 1 / T) for T, eta in zip(grid, rates, strict=True)]
    return RateCurve(
        problem=problem,
        T=grid,
        eta=rates,
        measured=measured,
        half_width=NormalDist().inv_cdf(0.995) * spread,
        display=np.array([sum(problem.terms(*setting)) for setting in settings]),
        bound=np.array([problem.bound(*setting) for setting in settings]),
        trivial=problem.d * STEEPEST**2,
        exponent=fit_exponent(grid, measured),
    )


@dataclass(frozen=True)
class Floor:
    """What is left of the squared gradient as eta -> 0 and T -> inf, against 1 - beta2."""

    problem: Bounded
    rest: Floats
    """1 - beta2."""
    floor: Floats
    """d (E[xi w] / E[w])^2."""
    bound: Floats
    """The fourth of the proof's terms."""
    covariance: Floats
    """The largest |c_t| = |Cov(xi_t, w_t | F_{t-1})| seen."""
    covariance_bound: Floats
    exponent: float | None
    """k of floor ~ (1-beta2)^k, over the smaller half of 1 - beta2; the bound's is 1. None at p = 1/2: with symmetric
    noise the two signs of every past cancel, there is no floor, and what is left of it here is Monte Carlo error."""


def bias(problem: Bounded, beta2: float, runs: int = 500, steps: int = 200, seed: int = 0) -> tuple[float, float]:
    """(E[xi w] / E[w], the largest |Cov(xi, w)|) where x stands still.

    A method that follows E[z] = grad F E[w] + E[xi w] (eq:ez_decomp) comes to rest at grad F = -E[xi w] / E[w]. Neither
    depends on x: g - m does not. With two values of the noise both conditional expectations are sums of two terms, from
    the two steps that the rule could take; only the past is drawn.
    """
    rng, hyper = np.random.default_rng(seed), Hyper(beta1=0.0, beta_mean=problem.beta1, beta2=beta2, eps=problem.eps)
    state = MVNGRAD.init(np.zeros(runs))
    state["s"] += problem.sigma**2 * 2 * problem.beta1**2 / (1 + problem.beta1)
    product, normalizer, largest = 0.0, 0.0, 0.0
    warm = min(20_000, round(4 / (1 - beta2)) + 50)
    for t in range(warm + steps):
        if t >= warm:
            xw, w = np.zeros(runs), np.zeros(runs)
            for probability, xi in zip((problem.p, 1 - problem.p), problem.values, strict=True):
                _, branch = MVNGRAD.update(0.0, np.full(runs, xi), state, math.inf, hyper, NUMPY)
                xw += probability * branch["u"]  # beta1 = 0: u is z, which is xi w
                w += probability / (np.sqrt(branch["s"]) + problem.eps)
            product, normalizer = product + float(xw.mean()), normalizer + float(w.mean())
            largest = max(largest, float(abs(xw).max()))
        _, state = MVNGRAD.update(0.0, problem.draw(rng, (runs,)), state, math.inf, hyper, NUMPY)
    return product / normalizer, largest


def floor(problem: Bounded = SKEWED, points: int = 7, runs: int = 500, seed: int = 0) -> Floor:
    """1 - beta2 from 1/2 to 1/512."""
    rest = 2.0 ** -np.linspace(1, 9, points)
    found = [bias(problem, 1 - q, runs, seed=seed) for q in rest]
    floors = problem.d * np.array([ratio for ratio, _ in found]) ** 2
    small = rest <= math.sqrt(rest[0] * rest[-1])
    return Floor(
        problem=problem,
        rest=rest,
        floor=floors,
        bound=np.array([problem.terms(1, 1.0, 1 - q)[3] for q in rest]),
        covariance=np.array([largest for _, largest in found]),
        covariance_bound=np.array([problem.covariance_bound(1 - q) for q in rest]),
        exponent=fit_exponent(rest[small], floors[small]) if problem.p != 0.5 else None,
    )


@dataclass(frozen=True)
class Settled:
    """A run at fixed beta2 that starts at the minimum: where the bias takes it."""

    beta2: float
    eta: float
    T: int
    mean: float
    """The mean of grad_i F over the second half and over all coordinates."""
    expected: float
    """-E[xi w] / E[w]."""
    average: float
    """1/T sum |grad F(x_t)|^2."""
    bound: float
    """The proof's last display, at Delta_0 = 0."""


def settled(
    problem: Bounded, beta2: float, eta: float = 0.005, T: int = 4000, runs: int = 50, seed: int = 0
) -> Settled:
    """The floor by the dynamics themselves: a finite eta adds its noise to the squares, and O(eta) to the mean."""
    still = replace(problem, start=0.0)
    rng, hyper = np.random.default_rng(seed), Hyper(lr=eta, beta1=still.beta1, beta2=beta2, eps=still.eps)
    x = np.zeros((runs, still.d))
    state, squares, late = MVNGRAD.init(x), 0.0, 0.0
    for t in range(T):
        slope = gradient(x)
        squares += float((slope * slope).sum(axis=1).mean())
        late += float(slope.mean()) if t >= T // 2 else 0.0
        x, state = MVNGRAD.update(x, slope + still.draw(rng, x.shape), state, math.inf, hyper, NUMPY)
    return Settled(
        beta2=beta2,
        eta=eta,
        T=T,
        mean=late / (T - T // 2),
        expected=-bias(still, beta2, seed=seed)[0],
        average=squares / T,
        bound=sum(still.terms(T, eta, beta2)),
    )


@dataclass(frozen=True)
class Convergence:
    rate: RateCurve
    floors: dict[str, Floor]
    settled: list[Settled]


def convergence(longest: int = 30_000, runs: int = 32, points: int = 7) -> Convergence:
    """The rate at beta2 = 1 - 1/T, the floor at fixed beta2 for three kinds of noise, and runs that settle on it."""
    problems = {"symmetric": USUAL, "skewed": SKEWED, "rare": RARE}
    return Convergence(
        rate=rate_curve(longest=longest, runs=runs),
        floors={name: floor(problem, points) for name, problem in problems.items()},
        settled=[settled(SKEWED, beta2, T=min(4000, 10 * longest)) for beta2 in (0.5, 0.8, 0.95)],
    )
