"""The nonconvex rate of thm:mvngrad_convergence and its bias floor."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mvngrad_lab.experiments.convergence.run import (
    PROBLEMS,
    RARE,
    SKEWED,
    STEEPEST,
    SYMMETRIC,
    L,
    Problem,
    gradient,
    measure_bias,
    simulate_floor,
    simulate_rate,
)


def test_the_problem_is_as_smooth_and_as_bounded_as_it_says():
    x = np.linspace(-5, 5, 20_001)
    assert abs(gradient(x)).max() == pytest.approx(STEEPEST, rel=1e-6)
    assert abs(np.diff(gradient(x)) / np.diff(x)).max() == pytest.approx(L, rel=1e-5)
    assert np.gradient(x**2 / (1 + x**2), x)[1:-1] == pytest.approx(gradient(x)[1:-1], abs=1e-5)
    for problem in PROBLEMS.values():
        xi = problem.draw_noise(np.random.default_rng(0), (1_000_000,))
        assert xi.mean() == pytest.approx(0, abs=5e-3 * problem.sigma)
        assert xi.std() == pytest.approx(problem.sigma, rel=0.1)
        assert STEEPEST + abs(xi).max() == problem.G
    with pytest.raises(ValueError, match="eps=2"):
        Problem(eps=2.0)


def test_formulas_at_numbers_worked_out_by_hand():
    """thm:mvngrad_convergence with G = 2, Delta_0 = 5, L = 2 and 2 G + eps = 9/2; eta T = 5."""
    sigma = 2 - STEEPEST
    problem = Problem(beta1=0.5, eps=0.5, sigma=sigma, d=10, start=1.0)
    assert (problem.G, problem.gap, problem.largest_rate) == pytest.approx((2, 5, 1 / 12))
    assert problem.rate(50) == pytest.approx(0.025)
    assert problem.terms(10, 0.5, 0.75) == pytest.approx((9, 720, 4320, 7290 * sigma**3))
    assert problem.bound(10, 0.5, 0.75) == pytest.approx(12 + 1920 + 12960 * sigma**3)
    assert problem.covariance_bound(0.75) == pytest.approx(math.sqrt(12 * sigma**3))


@pytest.mark.parametrize("beta1", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_theorems_constants_cover_the_proofs_last_display(name, beta1):
    problem = replace(PROBLEMS[name], beta1=beta1)
    for T in (10, 1000, 100_000):
        for eta in (problem.rate(T), problem.largest_rate):
            terms = problem.terms(T, eta, 0.99)
            assert terms[2] <= terms[1] * (1 + 1e-12)  # the purpose of the step-size condition
            assert sum(terms) <= problem.bound(T, eta, 0.99)
    beyond = problem.terms(10, 1.1 * problem.largest_rate, 0.99)
    assert beyond[2] > beyond[1]


def test_the_average_squared_gradient_falls_as_the_root_of_T_and_under_the_bound():
    result = simulate_rate(longest=3000, runs=16)
    assert result["exponent"] == pytest.approx(-0.5, abs=0.05)
    assert (result["measured"] + result["half_width"] < result["display"]).all()
    assert (np.array(result["display"]) <= result["bound"]).all()
    assert result["display"][-1] < result["trivial"]  # the bound says something
    assert (np.diff(result["half_width"]) < 0).all()


def test_at_the_usual_momentum_the_step_size_condition_hides_the_rate():
    """(1-beta1)^2 in the condition: at beta1 = 0.9 the rate ~ 1/sqrt(T) is allowed from T = 91,000 on."""
    problem = replace(SYMMETRIC, beta1=0.9)
    assert problem.rate(80_000) == problem.largest_rate == problem.rate(100)
    assert problem.rate(100_000) < problem.largest_rate


def test_the_floor_is_quadratic_for_skewed_noise_and_linear_for_rare_spikes():
    """The bound's (1-beta2) is from |sqrt(a) - sqrt(b)| <= sqrt(|a-b|), the worst case, which rare spikes are."""
    skewed, rare = (simulate_floor(problem, points=5, runs=200) for problem in (SKEWED, RARE))
    assert skewed["exponent"] == pytest.approx(2, abs=0.1)
    assert rare["exponent"] == pytest.approx(1, abs=0.1)
    for result in (skewed, rare):
        assert (result["floor"] < result["bound"]).all()
        assert (result["covariance"] <= result["covariance_bound"]).all()
    symmetric = simulate_floor(SYMMETRIC, points=3, runs=200)
    assert symmetric["floor"].max() < 1e-3 * skewed["floor"].max()
    assert symmetric["exponent"] is None


@pytest.mark.parametrize("beta2", [0.5, 0.8])
def test_a_run_from_the_minimum_rests_where_the_bias_says(beta2):
    """The mean gradient over the second half; a finite eta adds its noise to the squares, and O(eta) to the mean."""
    still, T, eta = replace(SKEWED, start=0.0), 2500, 0.005
    slopes = np.array(list(still.slopes(T, eta, beta2, runs=50, seed=0)))
    mean = slopes[T // 2 :].mean()
    assert mean == pytest.approx(-measure_bias(still, beta2)[0], rel=0.02, abs=1.5e-3)
    assert mean > 0.01
    assert (slopes * slopes).sum(axis=2).mean() < sum(still.terms(T, eta, beta2))
