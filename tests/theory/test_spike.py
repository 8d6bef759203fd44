"""The single-spike model of thm:spike."""

import pytest

from mvngrad.rule import ADABELIEF, ADAM, LAPROP, MVNGRAD
from mvngrad.theory.spike import EARLY_CARRY_OVER, LONG_HORIZON

SIZES = [1.0, 30.0, 1e3, 1e5, 1e8]
each_panel = pytest.mark.parametrize("panel", [LONG_HORIZON, EARLY_CARRY_OVER], ids=["long", "early"])


@each_panel
@pytest.mark.parametrize("rule", [LAPROP, MVNGRAD], ids=lambda rule: rule.name)
def test_normalizing_first_bounds_the_response_whatever_the_spike(rule, panel):
    assert max(panel.peak(rule, size) for size in SIZES) <= panel.bound(rule)


@each_panel
@pytest.mark.parametrize("size", SIZES)
def test_adam_carries_at_least_the_proofs_remnant(panel, size):
    at_forgetting = list(panel.updates(ADAM, size))[panel.forgetting_time(size)]
    assert at_forgetting >= panel.carry_over(size) > 0


def test_adam_grows_with_the_spike_and_laprop_does_not():
    adam, laprop = ([EARLY_CARRY_OVER.peak(rule, size) for size in (1e4, 1e8)] for rule in (ADAM, LAPROP))
    assert adam[1] > 1e3 * adam[0]
    assert laprop[1] < 2 * laprop[0]


def test_the_plateau_and_the_resonance_that_the_figure_hides():
    assert LONG_HORIZON.peak(MVNGRAD, 1.0) == pytest.approx(LONG_HORIZON.u / LONG_HORIZON.eps, rel=1e-3)
    on, off = (EARLY_CARRY_OVER.peak(ADABELIEF, size) for size in (1e5, 1e4))
    assert on > 1e6 * off
    on, off = (EARLY_CARRY_OVER.peak(MVNGRAD, size) for size in (1e5, 1e4))
    assert on > 1e6 * off


@each_panel
def test_z_clip_bounds_even_those(panel):
    assert max(panel.peak(MVNGRAD, size, z_clip=5.0) for size in SIZES) <= 5.0 * (1 + 1e-12)
