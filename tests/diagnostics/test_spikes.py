"""The rule for a spike of a loss, and what is reported of a spike of the gradient norm."""

import math
import statistics
from random import Random

import pytest

from mvngrad.diagnostics.spikes import MNIST_SPIKE, TRAINING_SPIKE, SpikeTracker, find_spikes

CALM = [1.0 + 0.1 * (step % 2) for step in range(400)]


def with_values(values):
    return [values.get(step, value) for step, value in enumerate(CALM)]


@pytest.mark.parametrize("rule", [MNIST_SPIKE, TRAINING_SPIKE], ids=["mnist", "training"])
def test_calm_series_have_no_spikes(rule):
    assert find_spikes(CALM, rule) == []
    assert find_spikes(CALM[:99], rule) == []


def test_spikes_above_the_largest_recent_value_are_found():
    # 50 is in the warm-up, 202 belongs to 200, 215 is above 1.5 times 200's value.
    loud = with_values({50: 2.0, 200: 2.0, 202: 2.0, 215: 5.0, 380: 2.0})
    assert find_spikes(loud, MNIST_SPIKE) == [200, 215, 380]
    assert find_spikes(CALM[:250] + [1.6] * 150, MNIST_SPIKE) == []


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({50: 9.0}, []),  # in the warm-up
        ({200: 1.49}, []),
        ({200: 1.5}, [200]),
        ({200: 1.5, 209: 9.0}, [200]),
        ({200: 1.5, 210: 9.0}, [200, 210]),
    ],
    ids=str,
)
def test_spikes_above_six_robust_deviations_are_found(values, found):
    # The median is 1.05 and the median distance from it 0.05: the limit is 1.05 + 6 * 1.4826 * 0.05 = 1.495.
    assert find_spikes(with_values(values)) == found


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
@pytest.mark.parametrize("rule", [MNIST_SPIKE, TRAINING_SPIKE], ids=["mnist", "training"])
def test_a_loss_that_stays_not_finite_is_one_spike(rule, value):
    assert find_spikes([1.0] * 150 + [value] * 150, rule) == [150]


def test_a_spike_is_compared_with_the_median_of_the_last_101_norms():
    tracker = SpikeTracker()
    norms = [1 + 7919 * step % 1000 / 100 for step in range(300)]
    for step, norm in enumerate([*norms, 1e6]):
        tracker.add(step, norm)
    assert tracker.pop_spikes()[-1]["median"] == statistics.median(norms[-101:])


def test_the_size_of_a_long_spike_is_its_largest_norm_over_the_median_before_it():
    """The running median rises during the spike."""
    tracker = SpikeTracker()
    for step in range(200):
        tracker.add(step, 1.0 if step < 100 else 1.1 ** (step - 80))
    (spike,) = tracker.pop_spikes()
    assert (spike["step"], spike["median"], spike["multiple"]) == (100, 1.0, pytest.approx(1.1**119))


@pytest.mark.parametrize("wild", [0.0, 0.004, 0.05])
@pytest.mark.parametrize("chunk", [1, 7, 100, 250])
def test_steps_added_together_are_those_added_one_by_one(wild, chunk):
    random = Random(0)
    one, all_at_once = SpikeTracker(recovered=1.1), SpikeTracker(recovered=1.1)
    quiet = 0
    for start in range(0, 3000, chunk):
        steps = range(start, start + chunk)
        factors = [random.choice([0.0, 4.9, 5.0, 50.0, math.inf]) if random.random() < wild else 1.0 for _ in steps]
        norms = [factor * random.choice([1.0, 1.5, 2.0]) for factor in factors]
        updates = [None if factor == 4.9 else random.choice([1.0, 1.2, math.nan]) for factor in factors]
        quiet += all_at_once._are_quiet(norms)
        all_at_once.add_all(steps, norms, updates)
        for values in zip(steps, norms, updates, strict=True):
            one.add(*values)
        assert all_at_once.pop_spikes() == one.pop_spikes()
        assert (all_at_once.norms, all_at_once._ordered_norms) == (one.norms, one._ordered_norms)
        assert (all_at_once.updates, all_at_once._above) == (one.updates, one._above)
    assert quiet or wild == 0.05


def test_steps_added_together_find_the_smallest_spikes():
    """Norms at the limit in windows of every length. Updates are not followed, so a spike ends at once."""
    quiet = 0
    for seed in range(300):
        random = Random(seed)
        one, together = SpikeTracker(1.0), SpikeTracker(1.0)
        for _ in range(8):
            norms = [random.choice([1.0, 2.0])] * random.choice([1, 20, 21, 60])
            norms += [random.choice([1.0, 2.0])] * random.choice([0, 1, 60])
            norms = [random.choice([0.0, math.nan]) if random.random() < 0.01 else norm for norm in norms]
            quiet += together._are_quiet(norms)
            together.add_all(range(len(norms)), norms, [None] * len(norms))
            for step, norm in enumerate(norms):
                one.add(step, norm)
            assert repr(together.pop_spikes()) == repr(one.pop_spikes())
            assert together._ordered_norms == one._ordered_norms
    assert quiet > 300


def test_norms_that_are_not_finite_do_not_hide_a_later_spike():
    tracker = SpikeTracker()
    for step in range(1, 200):
        tracker.add(step, math.inf if 60 < step <= 150 else 100.0 if step == 180 else 1.0, 1.0)
    assert {spike["step"]: spike["multiple"] for spike in tracker.pop_spikes()} == {61: None, 180: 100.0}
