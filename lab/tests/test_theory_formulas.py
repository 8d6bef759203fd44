"""The paper's bounds at numbers that can be worked out by hand: one that is too weak passes every inequality."""

import math

import numpy as np
import pytest

from mvngrad.rule import ADABELIEF, ADAM, LAPROP, MVNGRAD
from mvngrad_lab.experiments.convergence.simulation import STEEPEST, Bounded
from mvngrad_lab.experiments.separation.dimension import at_the_proofs_start
from mvngrad_lab.experiments.separation.simulation import (
    Quadratic,
    laprop_horizon,
    laprop_lower_bound,
    laprop_start,
    stable,
)
from mvngrad_lab.experiments.spike.simulation import Spike
from mvngrad_lab.experiments.variance_gap.simulation import NORMAL, Past, lower_bound, variance


def test_spike():
    """thm:spike. (1-beta2) beta2^t M^2 = 8, 4, 2, 1: forgotten at t = 3; D = sqrt(d + 2 u^2) + eps = 2 + 1/2."""
    halves = Spike(beta1=0.5, beta2=0.5, d=2.0, u=-1.0, eps=0.5)
    assert halves.forgetting_time(4.0) == 3
    assert halves.carry_over(4.0) == pytest.approx(0.5 * 0.5**3 * 4 / 2.5)
    assert halves.adam_growth == 0  # 1 - 2 ln(1/2)/ln(1/2) = -1
    assert Spike(beta1=0.5, beta2=0.5**4).adam_growth == pytest.approx(0.5)


def test_what_no_update_after_a_spike_exceeds():
    """1/sqrt(1-beta2) = 2 and beta1 = 1/2."""
    low, high = (Spike(beta1=0.5, beta2=0.75, u=1.0, eps=eps) for eps in (1.0, 0.1))
    assert [low.bound(rule) for rule in (LAPROP, MVNGRAD, ADABELIEF)] == pytest.approx([2, 4, 3])
    assert [high.bound(rule) for rule in (LAPROP, MVNGRAD, ADABELIEF)] == pytest.approx([10, 10, 12])
    assert low.bound(ADAM) == high.bound(ADAM) == pytest.approx(math.sqrt(1.5))


def test_convergence():
    """thm:mvngrad_convergence with G = 2, Delta_0 = 5, L = 2 and 2 G + eps = 9/2; eta T = 5."""
    sigma = 2 - STEEPEST
    problem = Bounded(beta1=0.5, eps=0.5, sigma=sigma, d=10, start=1.0)
    assert (problem.G, problem.gap, problem.largest_rate) == pytest.approx((2, 5, 1 / 12))
    assert problem.rate(50) == pytest.approx(0.025)
    assert problem.terms(10, 0.5, 0.75) == pytest.approx((9, 720, 4320, 7290 * sigma**3))
    assert problem.bound(10, 0.5, 0.75) == pytest.approx(12 + 1920 + 12960 * sigma**3)
    assert problem.covariance_bound(0.75) == pytest.approx(math.sqrt(12 * sigma**3))


def test_separation():
    """thm:laprop_omega_d_eps2, and (i): 2 (F(x_0) - F_star) / (alpha (1-delta^2)) over the squared target."""
    assert laprop_lower_bound(Quadratic(c=0.5), 4, 16) == pytest.approx(0.25)
    problem, d, target = Quadratic(L=3.0, beta=0.5), 30, 0.25
    x = np.full(d, laprop_start(problem, laprop_horizon(problem, target, d)))
    found = at_the_proofs_start(problem, [d], target).steps["MVN-Grad, the theorem's count"]
    assert found == [math.ceil(stable(problem, x, 1).bound / target**2)]


def test_tracking():
    """prop:approx_mean with beta1 = 1/2: 3/4 m^2 Var(Y) - 1/2 |m| (delta Var(Y) + sigma/eps^2)."""
    past = Past(m=-4.0, beta1=0.5, sigma=2.0, eps=0.5)
    spread = variance(past.y(past.gradients(NORMAL.points, 0.25)), NORMAL.weights)
    assert lower_bound(past, 0.25) == pytest.approx(12 * spread - 2 * (0.25 * spread + 8))
