"""Gradients mu + sigma xi of fixed mu and sigma: the averages v and s, and the normalized gradient z.

ass:stationary says E[v] = mu^2 + sigma^2 and E[s] = sigma^2. But m already contains g and
is noisy, so the variance of g - m is sigma^2 2 beta1^2 / (1 + beta1).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mvngrad.rule import LAPROP, MVNGRAD, Hyper
from mvngrad_lab.arrays import NUMPY, Floats, to_json
from mvngrad_lab.experiments import Tick
from mvngrad_lab.recipe import Recipe


@dataclass(frozen=True)
class Moments(Recipe):
    name: ClassVar[str] = "moments"
    betas: tuple[tuple[float, float], ...] = ((0.5, 0.99), (0.9, 0.99), (0.9, 0.999), (0.99, 0.999))
    ratios: tuple[float, ...] = (0.1, 0.01, 0.001)
    """sigma / mu."""
    coordinates: int = 2000
    eps: float = 1e-3
    """Of the bound on |z|."""


def make_recipe(quick: bool, data: Path | None) -> Moments:
    return Moments(coordinates=300) if quick else Moments()


def measure(beta1: float, beta2: float, sigma: float, coordinates: int, mu: float = 1.0) -> dict[str, float]:
    """Means over coordinates after 8 windows of the averages: v, s and z, relative to what the paper says they are."""
    rng, hyper = np.random.default_rng(0), Hyper(lr=0.0, beta1=beta1, beta2=beta2, eps=0.0)
    states: dict[Any, Any] = {rule: rule.init(np.zeros(coordinates)) for rule in (LAPROP, MVNGRAD)}
    states[MVNGRAD]["m"] = np.full(coordinates, mu)  # from 0 the first deviations are mu, which s forgets slowly
    steps, g = round(8 / (1 - max(beta1, beta2))), np.zeros(coordinates)
    for t in range(1, steps + 1):
        g = mu + sigma * rng.standard_normal(coordinates)
        for rule, state in states.items():
            states[rule] = rule.update(0.0, g, state, t, hyper, NUMPY)[1]
    correction = 1 - beta2**steps
    v, s = states[LAPROP]["v"] / correction, states[MVNGRAD]["s"] / correction
    return {
        "beta1": beta1,
        "beta2": beta2,
        "sigma": sigma,
        "v": float(v.mean()) / (mu**2 + sigma**2),
        "s": float(s.mean()) / sigma**2,
        "sign_error": float(abs(abs(g / np.sqrt(v)) - 1).mean()),
        "z": float(np.median(g / np.sqrt(s))) / (mu / sigma),
    }


def measure_largest_z(beta1: float, beta2: float, eps: float, G: float = 1.0) -> dict[str, float]:
    """The largest |z| of MVN-Grad over sequences with |g| <= G: constant, random signs, uniform, and rare jumps."""
    rng, n = np.random.default_rng(0), 2000
    sequences: list[Floats] = [
        np.full(n, G),
        rng.choice([-G, G], n),
        rng.uniform(-G, G, n),
        np.where(rng.random(n) < 0.01, -G, G),
    ]
    hyper, largest = Hyper(lr=0.0, beta1=beta1, beta2=beta2, eps=eps), 0.0
    for gradients in sequences:
        state = MVNGRAD.init(np.zeros(1))
        for g in gradients:
            state = MVNGRAD.update(0.0, np.array([g]), state, np.inf, hyper, NUMPY)[1]
            largest = max(largest, abs(g) / (float(np.sqrt(state["s"][0])) + eps))
    return {"beta1": beta1, "beta2": beta2, "largest": largest, "bound": G / eps}


def run(recipe: Moments, data: Path | None, tick: Tick) -> dict[str, Any]:
    rows = [measure(*betas, sigma, recipe.coordinates) for betas in recipe.betas for sigma in recipe.ratios]
    tick(0.8)
    return to_json(rows=rows, largest=[measure_largest_z(*betas, recipe.eps) for betas in recipe.betas])
