"""The variance gap of thm:var_adabelief_mvngrad and prop:approx_mean."""

import json
from dataclasses import replace

import numpy as np
import pytest

from mvngrad.rule import ADABELIEF, MVNGRAD
from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments.variance_gap.simulation import (
    NOISES,
    NORMAL,
    SIGNS,
    Past,
    closed_form,
    estimate,
    gap,
    lower_bound,
    stationary,
    tracking,
    turning_error,
    variance,
    variance_gap,
)

PASTS = [
    Past(),
    Past(m=-3.0),
    Past(beta1=0.5, beta2=0.5),
    Past(s=1.0, beta2=0.999),
    Past(sigma=0.1, eps=1.0),
    Past(t=3),
    Past(m=0.0),
]
each_past = pytest.mark.parametrize("past", PASTS, ids=str)


@each_past
@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
def test_with_symmetric_innovations_the_gap_is_the_closed_form(past, noise):
    expected = closed_form(past, noise)
    rounding = 1e-14 * variance(past.update(ADABELIEF, past.gradients(noise.points, 0.0)), noise.weights)
    assert gap(past, noise) == pytest.approx(expected, rel=1e-9, abs=rounding)
    assert expected > 0 or past.m == 0 or noise is SIGNS  # |zeta| is constant for signs, and so is Y


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
def test_monte_carlo_covers_the_closed_form_and_not_with_the_cells_swapped(noise):
    past, expected = Past(), closed_form(Past(), noise)
    found = estimate(past, noise, samples=100_000)
    assert found.low - 1e-15 <= expected <= found.high + 1e-15
    if expected > 0:
        assert found.low > 0
        swapped = estimate(past, noise, samples=100_000, cells=(MVNGRAD, ADABELIEF))
        assert swapped.high < 0


def test_the_interval_covers_as_often_as_it_says():
    expected = closed_form(Past())
    found = [estimate(Past(), samples=10_000, batches=50, level=0.9, seed=seed) for seed in range(200)]
    assert 0.83 <= np.mean([e.low <= expected <= e.high for e in found]) <= 0.97


@each_past
def test_the_propositions_bound_lies_below_the_gap(past):
    for error in np.linspace(-4, 4, 33):
        for sharp in (False, True):
            below = lower_bound(past, abs(error), error=error, sharp=sharp)
            assert below <= gap(past, error=error) + 1e-15
        assert below >= lower_bound(past, abs(error), error=error)


def test_the_proposition_promises_something_only_where_the_past_has_almost_no_variance():
    """Its sigma/eps^2 needs Var(Y) of the size of 1/eps^2, which needs s_{t-1} near 0. The sharper form needs less."""
    assert tracking(Past(m=10.0, s=1e-3, eps=0.2), points=3, samples=1000).largest_delta > 2
    usual = tracking(Past(m=3.0), points=3, samples=1000)
    assert usual.largest_delta is None
    assert usual.largest_delta_sharp > 0


def test_the_gap_turns_negative_where_the_mean_is_underrated():
    past = Past()
    turn = turning_error(past, sign=1)
    assert turn == pytest.approx(0.4388, abs=1e-3)
    assert gap(past, error=turn * (1 - 1e-6)) > 0 > gap(past, error=turn * (1 + 1e-6))
    assert turning_error(past, sign=-1) is None
    mirrored = replace(past, m=-past.m)
    assert turning_error(mirrored, sign=-1) == pytest.approx(-turn)
    around = tracking(past, points=3, samples=100_000).around
    assert around["along m, before"].low > 0 > around["along m, after"].high


def test_a_slow_normalizer_makes_the_sign_fragile_but_not_the_mean():
    """Var(Y) shrinks as (1-beta2)^2 and the covariance that an error e adds as (1-beta2) e."""
    turns = [turning_error(Past(s=0.85, beta2=beta2), NORMAL) for beta2 in (0.95, 0.99, 0.999)]
    assert turns == sorted(turns, reverse=True)
    assert turns[-1] < 0.003
    result = stationary(0.999, runs=1500)
    assert 0.4 < result.negative < 0.6
    assert result.low > 0


def test_everything_in_quick():
    result = variance_gap(points=5, samples=20_000)
    assert len(json.loads(json.dumps(to_json(result), allow_nan=False))["symmetric"]) == len(NOISES)
