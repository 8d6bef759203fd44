"""MVN-Grad and LaProp in the low-variance limit (thm:separation_MVN-Grad_LaProp_smallvar)."""

import math
from itertools import islice

import numpy as np
import pytest

from mvngrad.rule import LAPROP, MVNGRAD
from mvngrad_lab.experiments.separation.run import (
    PROOF,
    Quadratic,
    check_laprop,
    check_lemmas,
    count_from_one_start,
    count_from_proofs_start,
    simulate_s,
)

START = np.linspace(0.5, 1.5, 50)


@pytest.mark.parametrize("problem", [PROOF, Quadratic(L=3.0, beta=0.5, delta=0.9, sigma=0.01, share=0.5)])
def test_at_constant_s_mvngrad_is_heavy_ball_and_its_potential_descends(problem):
    """lem:mvn_to_hb_stoch and lem:potential_descent_hsnr, at every step."""
    result = check_lemmas(problem, START, 150)
    assert max(result["variance_error"], result["heavy_ball_error"]) < 1e-9
    assert min(result["slack"]) > -1e-9


def test_laprop_in_its_place_is_no_heavy_ball_and_does_not_descend():
    result = check_lemmas(PROOF, START, 150, LAPROP)
    assert result["heavy_ball_error"] > 0.01
    assert min(result["slack"]) < -0.01


def test_the_step_size_condition_is_sharp():
    """eq:stepsize_mvn_stoch: smoothness is an equality here, so the descent is one at the limit and fails beyond it."""
    assert np.abs(check_lemmas(PROOF, START, 100)["slack"]).max() < 1e-14
    assert max(check_lemmas(Quadratic(share=1.05), START, 100)["slack"]) < 0


def test_the_sum_of_squared_gradients_stays_under_the_bound():
    """The last display of the proof of (i), which at the largest step size is an equality in expectation."""
    many = np.linspace(0.5, 1.5, 20_000)
    half, whole = (check_lemmas(Quadratic(share=share), many, 250) for share in (0.5, 1.0))
    assert half["sums"][-1] < half["bound"]
    assert whole["sums"][-1] == pytest.approx(whole["bound"], rel=0.02)


@pytest.mark.parametrize("problem", [PROOF, Quadratic(L=3.0, beta=0.5, delta=0.9, c=0.3)])
@pytest.mark.parametrize("d", [1, 64])
def test_laprop_on_signs_is_the_closed_form_whatever_the_noise(problem, d):
    """lem:laprop_finite_horizon and thm:laprop_omega_d_eps2."""
    error, smallest = check_laprop(problem, 300, d)
    assert error < 1e-12
    assert smallest == pytest.approx(problem.laprop_gradient(300, d), rel=1e-9)
    assert smallest >= problem.laprop_lower_bound(300, d) > 0
    assert check_laprop(problem, 300, d, MVNGRAD)[0] > 0.1


@pytest.mark.parametrize("beta2", [0.9, 0.99])
def test_with_a_memory_laprop_stays_above_the_closed_form(beta2):
    """v remembers larger gradients, so z < 1: the lower bound holds all the more, up to the proof's horizon."""
    horizon, x = 300, np.full(4, PROOF.laprop_coordinate(300)[0])
    path = Quadratic(delta=0.0).path(LAPROP, x, beta2, start={"v": x**2})
    smallest = min(np.linalg.norm(now) for now, _ in islice(path, horizon))
    assert smallest > 1.5 * PROOF.laprop_gradient(horizon, 4)


def test_the_horizon_is_the_first_that_suffices():
    d, target = 30, 0.25
    T = PROOF.laprop_horizon(target, d)
    for horizon, reached in ((T, T), (T - 1, None)):
        x = np.full(d, PROOF.laprop_coordinate(horizon)[0])
        assert PROOF.count_steps(target, LAPROP, x, horizon) == reached


def test_formulas_at_numbers_worked_out_by_hand():
    """thm:laprop_omega_d_eps2, and (i): 2 (F(x_0) - F_star) / (alpha (1-delta^2)) over the squared target."""
    assert Quadratic(c=0.5).laprop_lower_bound(4, 16) == pytest.approx(0.25)
    problem, d, target = Quadratic(L=3.0, beta=0.5), 30, 0.25
    x = np.full(d, problem.laprop_coordinate(problem.laprop_horizon(target, d))[0])
    bound = check_lemmas(problem, x, 1)["bound"]
    assert bound == pytest.approx(2 * (1.5 * x @ x) / (0.25 * 0.75))  # alpha = (1 - beta^2)/L
    counted = count_from_proofs_start(problem, [d], target)["steps"]["MVN-Grad, the theorem's count"]
    assert counted == [math.ceil(bound / target**2)]


def test_from_the_proofs_start_laprop_needs_d_steps_and_mvngrad_its_logarithm():
    result = count_from_proofs_start(PROOF, [1, 10, 30, 100, 300])
    exponents = result["exponents"]
    assert exponents["LaProp, signs"] == pytest.approx(1, abs=0.02)
    assert exponents["MVN-Grad, s fixed"] < 0.25
    # F(x_0) = L/2 a^2 d with a^2 ~ T ~ d: what (i) promises on the instance of (ii) is worse than what (ii) forbids
    assert exponents["MVN-Grad, the theorem's count"] == pytest.approx(2, abs=0.25)
    measured, promised = (result["steps"][f"MVN-Grad, {name}"] for name in ("s fixed", "the theorem's count"))
    assert all(steps <= count for steps, count in zip(measured, promised, strict=True))


def test_from_one_start_the_dimension_enters_through_the_signs():
    exponents = count_from_one_start(PROOF, [1, 10, 100, 300, 1000])["exponents"]
    assert exponents["LaProp, signs"] == pytest.approx(1, abs=0.12)
    assert exponents["LaProp, signs, tuned constant rate"] < 0.5
    for name in ("LaProp, beta2 = 0.99", "MVN-Grad, s fixed", "MVN-Grad, beta2 = 0.99"):
        assert exponents[name] < 0.2


def test_at_a_fixed_gap_a_constant_rate_frees_the_signs_of_the_dimension_too():
    exponents = count_from_one_start(PROOF, [10, 100, 300, 1000], fixed_gap=True)["exponents"]
    assert exponents["LaProp, signs"] == pytest.approx(1, abs=0.15)
    for name in ("LaProp, signs, tuned constant rate", "MVN-Grad, s fixed"):
        assert abs(exponents[name]) < 0.1


def test_s_rests_at_the_noise_only_while_the_lag_of_m_is_smaller():
    for share, rests in ((1.0, False), (1e-3, True)):
        result = simulate_s(Quadratic(share=share), start=100.0)
        near = [s for s, ratio in zip(result["observed"], result["ratios"], strict=True) if ratio < 5]
        assert (max(near) < 1.2) == rests
        assert (result["limit"] > 100) == rests
