"""What counts as a spike of a loss or of a gradient norm, and how an update reacts to one. Standard library only."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any


@dataclass(frozen=True)
class SpikeRule:
    """The definition of a spike: a value that is not finite, or above a limit set by the values before it.

    The limit is ``multiple * center + deviations * 1.4826 * MAD``. `center` is the median or the maximum of the last
    `window` finite values. MAD is their median distance from the center; times 1.4826 it estimates the standard
    deviation of normal values.
    """

    window: int = 100
    """The number of values that set the limit."""
    center: Callable[[Sequence[float]], float] = median
    multiple: float = 1.0
    deviations: float = 0.0
    warm_up: int = 100
    """The number of values at the start that are never spikes: the loss of every training falls fast there."""
    separation: int = 10
    """Spikes fewer than this many values after the previous one are part of it."""

    def limit(self, before: Sequence[float]) -> float:
        """The largest value that is not a spike after the finite values `before`; -inf if there are none."""
        if not before:
            return -math.inf
        center = self.center(before)
        if not self.deviations:
            return self.multiple * center
        distance = median([abs(value - center) for value in before])
        return self.multiple * center + self.deviations * (1.4826 * distance)


TRAINING_SPIKE = SpikeRule(deviations=6.0)
"""For the loss or gradient norm of every step of a long training: 6 robust deviations above the median."""

MNIST_SPIKE = SpikeRule(center=max, multiple=1.5)
"""For the few noisy steps of the paper's MNIST figure: 1.5 times the largest loss of the last 100 steps."""

GRADIENT_SPIKE = SpikeRule(window=101, multiple=5.0, warm_up=20)
"""For the Monitor's gradient norms: 5 times the median. Norms of ordinary mini-batches differ by a factor of 2 or 3."""


def find_spikes(values: Sequence[float | None], rule: SpikeRule = TRAINING_SPIKE) -> list[int]:
    """Find the indices at which spikes of a series start. None counts as not finite.

    >>> calm = [2 + 0.1 * math.sin(step) for step in range(300)]
    >>> find_spikes(calm), find_spikes([*calm[:150], 3.0, 2.9, *calm[152:]])
    ([], [150])
    >>> find_spikes([*calm[:200], None, *calm[201:]])
    [200]
    >>> find_spikes([1.0] * 150 + [1.6, 1.7] + [1.0] * 100 + [1.4], MNIST_SPIKE)
    [150]
    """
    numbers = [math.nan if value is None else value for value in values]
    starts: list[int] = []
    last = -rule.separation
    for index in range(rule.warm_up, len(numbers)):
        before = filter(math.isfinite, numbers[max(0, index - rule.window) : index])
        if math.isfinite(numbers[index]) and numbers[index] <= rule.limit(list(before)):
            continue
        if index - last >= rule.separation:
            starts.append(index)
        last = index
    return starts


RECOVERED = 1.5
"""An update has recovered when its size is at most this multiple of the median before the spike."""

FOLLOW, GIVE_UP = 200, 1000
"""Steps for which the update is followed after a spike: at least, and at most if it does not recover. Carry-over
appears late: Adam's update returns to normal only when v has forgotten the spike (Theorem 3.3)."""


@dataclass
class Spike:
    """A spike of the gradient norm. Sizes of updates are multiples of their median before it."""

    step: int
    """Its first step."""
    median: float
    """The running median of gradient norms before it; 0 if no norm was finite yet."""
    multiple: float | None
    """The largest norm over that median; None if it was not finite."""
    steps: int
    """The number of consecutive steps with a norm above the limit."""
    update_during: float | None = None
    """The largest update while the norm was above the limit; None if updates are not followed."""
    update_after: float | None = None
    """The largest update since then."""
    recovery_steps: int | None = None
    """Steps from the start of the spike to the last update above the `recovered` bound, both included."""
    ended: str | None = None
    """Why it is no longer followed: "recovered", "another spike", "given up" or "not followed"; None while it is."""


class SpikeTracker:
    """Find spikes from the gradient norm and the update size of each step, and follow the updates after them.

    >>> tracker = SpikeTracker()
    >>> for step in range(1, 61):
    ...     tracker.add(step, 100.0 if step == 40 else 1.0, 3.0 if 40 <= step < 43 else 1.0)
    >>> [(spike["step"], spike["multiple"], spike["recovery_steps"]) for spike in tracker.pop_spikes()]
    [(40, 100.0, 3)]
    """

    def __init__(self, spike: float = GRADIENT_SPIKE.multiple, recovered: float = RECOVERED) -> None:
        self.rule, self.recovered = replace(GRADIENT_SPIKE, multiple=spike), recovered
        self.norms: deque[float] = deque(maxlen=self.rule.window)
        self._ordered_norms: list[float] = []
        """The same, sorted, so that each step finds their median fast."""
        self.updates: deque[float] = deque(maxlen=self.rule.window)
        self._above = False
        self._spikes: list[Spike] = []
        """Those that ended since `pop_spikes`, and the one that is followed."""
        self._update_before: float | None = None
        """The median update before the last spike."""

    @property
    def _followed(self) -> Spike | None:
        """The spike that has not ended, if there is one."""
        return self._spikes[-1] if self._spikes and self._spikes[-1].ended is None else None

    def add(self, step: int, norm: float, update: float | None = None) -> None:
        """Add the gradient norm of a step and, if it is followed, the size of its update."""
        limit = self.rule.limit(self._ordered_norms) if len(self.norms) >= self.rule.warm_up else None
        was_above = self._above
        # A limit of 0 makes no spike: most gradients of the group are 0.
        self._above = not math.isfinite(norm) or (limit is not None and norm > limit > 0)
        if self._above:
            self._start_or_extend_spike(step, norm, was_above)
        if (spike := self._followed) is not None:
            self._follow(spike, step - spike.step, update)
        if math.isfinite(norm):
            if len(self.norms) == self.norms.maxlen:
                del self._ordered_norms[bisect_left(self._ordered_norms, self.norms[0])]
            self.norms.append(norm)
            insort(self._ordered_norms, norm)
        if update is not None and math.isfinite(update):
            self.updates.append(update)

    def _start_or_extend_spike(self, step: int, norm: float, was_above: bool) -> None:
        spike = self._followed
        if spike and was_above:
            spike.steps += 1
            if spike.multiple is not None:
                spike.multiple = max(spike.multiple, norm / spike.median) if math.isfinite(norm) else None
            return
        if spike:
            spike.ended = "another spike"
        usual = median(self._ordered_norms) if self._ordered_norms else 0.0  # the first gradients may not be finite
        multiple = norm / usual if math.isfinite(norm) and usual else None
        self._update_before = median(self.updates) if len(self.updates) >= self.rule.warm_up else None
        self._spikes.append(Spike(step, usual, multiple, 1))

    def add_all(self, steps: Sequence[int], norms: Sequence[float], updates: Sequence[float | None]) -> None:
        """Call `add` for each of some steps; faster if none of them can be a spike and no spike is followed."""
        if not self._are_quiet(norms):
            for values in zip(steps, norms, updates, strict=True):
                self.add(*values)
            return
        self._above = False
        self.norms.extend(norms)
        self._ordered_norms = sorted(self.norms)
        self.updates.extend(update for update in updates if update is not None and math.isfinite(update))

    def _are_quiet(self, norms: Sequence[float]) -> bool:
        """Whether it is certain that none of these norms is a spike, and no spike is followed."""
        if len(self.norms) < self.rule.warm_up or not all(map(math.isfinite, norms)):
            return False
        if not norms or self._followed is not None:
            return False
        # Each window is a subset of these values with at least as many as now, so its median is at least this one.
        least = sorted([*self._ordered_norms, *norms])[(len(self.norms) - 1) // 2]
        return max(norms) <= self.rule.multiple * least

    def _follow(self, spike: Spike, since: int, update: float | None) -> None:
        """Add an update, `since` steps after the spike's first, and end the spike if it is over."""
        if update is None or not self._update_before:
            spike.ended = None if self._above else "not followed"
            return
        size = update / self._update_before
        recovered = size <= self.recovered
        if math.isfinite(size):
            if self._above:
                spike.update_during = max(spike.update_during or 0.0, size)
            else:
                spike.update_after = max(spike.update_after or 0.0, size)
        spike.recovery_steps = (spike.recovery_steps or 0) if recovered else since + 1
        if since >= FOLLOW and recovered:
            spike.ended = "recovered"
        elif since >= GIVE_UP:
            spike.ended = "given up"

    def pop_spikes(self) -> list[dict[str, Any]]:
        """Return the spike that is followed and those that ended since the last call, and forget the latter."""
        spikes = [{**asdict(spike), "recovered": self.recovered} for spike in self._spikes]
        self._spikes = [spike for spike in self._spikes if spike.ended is None]
        return spikes
