"""MVN-Grad against LaProp in the low-variance limit: thm:separation_MVN-Grad_LaProp_smallvar and its lemmas."""

import json
import math

import numpy as np
import pytest

from mvngrad.rule import LAPROP, MVNGRAD
from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments.separation.dimension import (
    at_one_start,
    at_the_proofs_start,
    constant,
    resting,
    separation,
)
from mvngrad_lab.experiments.separation.simulation import (
    PROOF,
    Quadratic,
    laprop_error,
    laprop_gradient,
    laprop_horizon,
    laprop_lower_bound,
    laprop_start,
    stable,
)

START = np.linspace(0.5, 1.5, 50)


@pytest.mark.parametrize("problem", [PROOF, Quadratic(L=3.0, beta=0.5, delta=0.9, sigma=0.01, share=0.5)])
def test_at_rest_mvngrad_is_heavy_ball_and_its_potential_descends(problem):
    """lem:mvn_to_hb_stoch and lem:potential_descent_hsnr, at every step."""
    result = stable(problem, START, 150)
    assert result.variance_error < 1e-9
    assert result.heavy_ball_error < 1e-9
    assert result.slack.min() > -1e-9


def test_laprop_in_its_place_is_no_heavy_ball_and_does_not_descend():
    result = stable(PROOF, START, 150, LAPROP)
    assert result.heavy_ball_error > 0.01
    assert result.slack.min() < -0.01


def test_the_step_size_condition_is_sharp():
    """eq:stepsize_mvn_stoch: smoothness is an equality here, so the descent is one at the limit and fails beyond it."""
    assert abs(stable(PROOF, START, 100).slack).max() < 1e-14
    assert stable(Quadratic(share=1.05), START, 100).slack.max() < 0


def test_the_sum_of_squared_gradients_stays_under_the_bound():
    """The last display of the proof of (i), which at the largest step size is an equality in expectation."""
    many = np.linspace(0.5, 1.5, 20_000)
    half, whole = (stable(Quadratic(share=share), many, 250) for share in (0.5, 1.0))
    assert half.sums[-1] < half.bound
    assert whole.sums[-1] == pytest.approx(whole.bound, rel=0.02)


@pytest.mark.parametrize("problem", [PROOF, Quadratic(L=3.0, beta=0.5, delta=0.9, c=0.3)])
@pytest.mark.parametrize("d", [1, 64])
def test_laprop_on_signs_is_the_closed_form_whatever_the_noise(problem, d):
    """lem:laprop_finite_horizon and thm:laprop_omega_d_eps2."""
    error, smallest = laprop_error(problem, 300, d)
    assert error < 1e-12
    assert smallest == pytest.approx(laprop_gradient(problem, 300, d), rel=1e-9)
    assert smallest >= laprop_lower_bound(problem, 300, d) > 0
    assert laprop_error(problem, 300, d, MVNGRAD)[0] > 0.1


@pytest.mark.parametrize("beta2", [0.9, 0.99])
def test_with_a_memory_laprop_stays_above_the_closed_form(beta2):
    """v remembers larger gradients, so z < 1: the lower bound holds all the more, up to the proof's horizon."""
    horizon, x = 300, np.full(4, laprop_start(PROOF, 300))
    exact = Quadratic(delta=0.0)
    path = exact.path(LAPROP, x, PROOF.laprop_rate, beta2=beta2, start={"v": x**2})
    smallest = min(np.linalg.norm(now) for _, (now, _, _) in zip(range(horizon), path, strict=False))
    assert smallest > 1.5 * laprop_gradient(PROOF, horizon, 4)


def test_the_horizon_is_the_first_that_suffices():
    d, target = 30, 0.25
    T = laprop_horizon(PROOF, target, d)
    for horizon, reached in ((T, T), (T - 1, None)):
        x = np.full(d, laprop_start(PROOF, horizon))
        assert PROOF.steps_to(target, LAPROP, x, PROOF.laprop_rate, horizon) == reached


def test_from_the_proofs_start_laprop_needs_d_steps_and_mvngrad_its_logarithm():
    dimensions = [1, 10, 30, 100, 300]
    result = at_the_proofs_start(PROOF, dimensions)
    assert result.exponents["LaProp, signs"] == pytest.approx(1, abs=0.02)
    assert result.exponents["MVN-Grad, s fixed"] < 0.25
    # F(x_0) = L/2 a^2 d with a^2 ~ T ~ d: what (i) promises on the instance of (ii) is worse than what (ii) forbids
    assert result.exponents["MVN-Grad, the theorem's count"] == pytest.approx(2, abs=0.25)
    measured, promised = result.steps["MVN-Grad, s fixed"], result.steps["MVN-Grad, the theorem's count"]
    assert all(steps <= count for steps, count in zip(measured, promised, strict=True))


def test_from_one_start_the_dimension_enters_through_the_signs():
    result = at_one_start(PROOF, [1, 10, 100, 300, 1000])
    assert result.exponents["LaProp, signs"] == pytest.approx(1, abs=0.12)
    assert result.exponents["LaProp, signs, tuned constant rate"] < 0.5
    for name in ("LaProp, beta2 = 0.99", "MVN-Grad, s fixed", "MVN-Grad, beta2 = 0.99"):
        assert result.exponents[name] < 0.2


def test_at_a_fixed_gap_a_constant_rate_frees_the_signs_of_the_dimension_too():
    result = at_one_start(PROOF, [10, 100, 300, 1000], fixed_gap=True)
    assert result.exponents["LaProp, signs"] == pytest.approx(1, abs=0.15)
    for name in ("LaProp, signs, tuned constant rate", "MVN-Grad, s fixed"):
        assert abs(result.exponents[name]) < 0.1


def test_s_rests_at_the_noise_only_while_the_lag_of_m_is_smaller():
    for share, rests in ((1.0, False), (1e-3, True)):
        result = resting(Quadratic(share=share), start=100.0)
        near = result.ratios < 5
        assert (result.observed[near].max() < 1.2) == rests
        assert (result.limit > 100) == rests


def test_everything_in_quick():
    result = separation(largest=10, steps=20, horizon=50, d=5)
    assert json.loads(json.dumps(to_json(result), allow_nan=False))["proofs_start"]["dimensions"] == [1, 3, 10]
    assert constant(0.5)(7) == 0.5
    assert math.isfinite(result.resting.limit)
