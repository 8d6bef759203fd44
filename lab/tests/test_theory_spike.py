"""The single-spike model of thm:spike."""

import json
import math

import numpy as np
import pytest

from mvngrad.rule import ADABELIEF, ADAM, CELLS, LAPROP, MVNGRAD
from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments.spike.simulation import EARLY_CARRY_OVER, LONG_HORIZON, Spike, curves, sizes
from mvngrad_lab.experiments.spike.trains import spike_trains

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


@each_panel
def test_all_sizes_at_once_are_each_by_itself(panel):
    grid = np.array(SIZES)
    for rule in CELLS:
        assert panel.peaks(rule, grid) == pytest.approx([panel.peak(rule, size) for size in SIZES], rel=1e-12)


@each_panel
@pytest.mark.parametrize("rule", [ADAM, ADABELIEF], ids=lambda rule: rule.name)
def test_closed_forms_are_what_the_rule_does(panel, rule):
    grid = np.array([1.0, 2.5, 30.0, 1e3, 0.9e5, 1e8])  # g - m is all rounding at the resonance itself
    closed = panel.adam if rule == ADAM else panel.adabelief
    for t, update in enumerate(panel.updates(rule, grid)):
        assert update == pytest.approx(closed(grid, t), rel=1e-9)


@each_panel
def test_adabelief_is_bounded_in_the_single_spike_model_too(panel):
    peaks = panel.peaks(ADABELIEF, sizes(panel, 6))
    assert peaks.max() <= panel.bound(ADABELIEF) * (1 + 1e-12)
    assert peaks.max() >= 0.99 * panel.plateau


@pytest.mark.parametrize("beta2", [0.82, 0.9, 0.999])
def test_adam_is_bounded_above_the_square_of_beta1_only(beta2):
    """rem:adam_bound."""
    bounded = Spike(beta1=0.9, beta2=beta2)
    assert bounded.peaks(ADAM, sizes(bounded, 2)).max() <= bounded.bound(ADAM) < math.inf
    assert bounded.adam_growth == 0
    assert LONG_HORIZON.bound(ADAM) == math.inf


@each_panel
def test_the_curves_of_a_panel(panel):
    result = curves(panel, per_decade=4)
    peaks, grid = result.peaks, result.sizes
    assert grid[0] == 1
    assert grid[-1] == 1e8
    assert panel.resonance in grid
    assert result.adam_growth == pytest.approx(result.adam_growth_expected, abs=0.02)
    assert (result.adam_at_forgetting >= result.carry_over).all()
    for name, bound in result.bounds.items():
        assert peaks[name].max() <= bound * (1 + 1e-12)
    assert result.clipped.max() <= result.z_clip * (1 + 1e-12) < peaks["MVN-Grad"].max()
    assert result.at_resonance["AdaBelief"] == pytest.approx(result.plateau, rel=1e-6)
    far = abs(np.log10(grid / panel.resonance)) > 1
    alone = panel is EARLY_CARRY_OVER  # in the other panel every M reaches the plateau
    assert (peaks["MVN-Grad"].max() > 1e5 * peaks["MVN-Grad"][far].max()) == alone
    assert json.loads(json.dumps(to_json(result), allow_nan=False))["peaks"]["Adam"] == peaks["Adam"].tolist()


def test_spike_trains_stay_under_the_corollarys_bounds():
    """cor:multi_spike, and what its condition keeps out."""
    result = spike_trains(per_decade=2)
    assert result.spikes.min() >= 2
    assert 0.95 * result.laprop_bound <= result.laprop.max() <= result.laprop_bound * (1 + 1e-12)
    assert result.laprop_bound < result.mvngrad.max() <= result.mvngrad_bound
    assert result.mvngrad_update.max() <= result.mvngrad_update_bound
    small = result.sizes <= 1e4
    assert result.shifted[small] == pytest.approx(result.shifted_expected[small], rel=0.01)
    assert result.shifted_clipped.max() <= result.z_clip * (1 + 1e-12)


def test_bounds_and_closed_forms_hold_at_random_settings():
    rng = np.random.default_rng(0)
    for _ in range(40):
        beta1, beta2 = rng.uniform(0.05, 0.99, 2)
        u, d, eps = 10.0 ** rng.uniform([-3, -3, -6], [3, 3, 0])
        panel = Spike(beta1, beta2, eps, d, -u, horizon=40)
        grid = sizes(panel, 2)
        off = abs(grid / panel.resonance - 1) > 0.01
        for rule in CELLS:
            assert panel.peaks(rule, grid).max() <= panel.bound(rule) * (1 + 1e-12)
        for t, update in enumerate(panel.updates(ADABELIEF, grid)):
            assert update[off] == pytest.approx(panel.adabelief(grid[off], t), rel=1e-7)
