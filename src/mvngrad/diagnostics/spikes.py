"""What counts as a spike of a loss or of a gradient norm, and how an update reacts to one. Standard library only."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any


@dataclass(frozen=True)
class SpikeRule:
    """A value is a spike if it is not finite, or above the limit that the values before it set.

    The limit is ``multiple * center + deviations * 1.4826 * MAD``. `center` is the median or the maximum of the last
    `window` finite values. MAD is their median distance from the center; times 1.4826 it estimates the standard
    deviation of normal values.
    """

    window: int = 100
    """Values that set the limit."""
    center: Callable[[Sequence[float]], float] = median
    multiple: float = 1.0
    deviations: float = 0.0
    warm_up: int = 100
    """Values at the start of a series that are never spikes: every training falls fast there."""
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
    """The indices at which spikes of a series start; None stands for a value that was not finite.

    >>> calm = [2 + 0.1 * math.sin(step) for step in range(300)]
    >>> find_spikes(calm), find_spikes([*calm[:150], 3.0, 2.9, *calm[152:]])
    ([], [150])
    >>> find_spikes([*calm[:200], None, *calm[201:]])
    [200]
    >>> find_spikes([1.0] * 150 + [1.6, 1.7] + [1.0] * 100 + [1.4], MNIST_SPIKE)
    [150]
    """
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    starts: list[int] = []
    last = -rule.separation
    for index in range(rule.warm_up, len(finite)):
        value = finite[index]
        if value is not None:
            before = [old for old in finite[max(0, index - rule.window) : index] if old is not None]
            if value <= rule.limit(before):
                continue
        if index - last >= rule.separation:
            starts.append(index)
        last = index
    return starts


RECOVERED = 1.5
"""An update has recovered when its size is at most this multiple of the median before the spike."""

FOLLOW, GIVE_UP = 200, 1000
"""Steps for which the update is followed after a spike: at least, and at most if it does not recover. Carry-over
appears late: Adam's update returns to normal only when v has forgotten the spike (thm:spike)."""


@dataclass
class Spike:
    """A spike of the gradient norm. Sizes of updates are multiples of their median before it."""

    step: int
    """Its first step."""
    median: float
    """The running median of gradient norms before it."""
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

    def extend(self, multiple: float | None) -> None:
        self.steps += 1
        self.multiple = None if multiple is None or self.multiple is None else max(multiple, self.multiple)


class SpikeTracker:
    """Finds spikes from the gradient norm and the update size of each step, and follows the updates after them.

    >>> tracker = SpikeTracker()
    >>> for step in range(1, 61):
    ...     tracker.add(step, 100.0 if step == 40 else 1.0, 3.0 if 40 <= step < 43 else 1.0)
    >>> [(spike["step"], spike["multiple"], spike["recovery_steps"]) for spike in tracker.pop_spikes()]
    [(40, 100.0, 3)]
    """

    def __init__(self, spike: float = GRADIENT_SPIKE.multiple, recovered: float = RECOVERED) -> None:
        self.rule, self.recovered = replace(GRADIENT_SPIKE, multiple=spike), recovered
        self.norms: deque[float] = deque(maxlen=self.rule.window)
        self.updates: deque[float] = deque(maxlen=self.rule.window)
        self._above = False
        self._spikes: list[tuple[Spike, float | None]] = []
        """Spikes that are open or ended since `pop_spikes`, each with the median update before it."""

    def add(self, step: int, norm: float, update: float | None = None) -> None:
        """Add the gradient norm of a step and, if it is followed, the size of its update."""
        limit = self.rule.limit(self.norms) if len(self.norms) >= self.rule.warm_up else None
        # A limit of 0 makes no spike: most gradients of the group are 0.
        above = limit is not None and (not math.isfinite(norm) or norm > limit > 0)
        if above:
            usual = median(self.norms)
            multiple = norm / usual if math.isfinite(norm) and usual else None
            if self._above and self._spikes and self._spikes[-1][0].ended is None:
                self._spikes[-1][0].extend(multiple)
            else:
                for spike, _ in self._spikes:
                    spike.ended = spike.ended or "another spike"
                before = median(self.updates) if len(self.updates) >= self.rule.warm_up else None
                self._spikes.append((Spike(step, usual, multiple, 1), before))
        self._above = above
        for spike, before in self._spikes:
            if spike.ended is None:
                self._follow(spike, before, step - spike.step, update)
        if math.isfinite(norm):
            self.norms.append(norm)
        if update is not None and math.isfinite(update):
            self.updates.append(update)

    def _follow(self, spike: Spike, before: float | None, since: int, update: float | None) -> None:
        if update is None or not before:
            spike.ended = None if self._above else "not followed"
            return
        size = update / before
        if math.isfinite(size):
            if self._above:
                spike.update_during = max(spike.update_during or 0.0, size)
            else:
                spike.update_after = max(spike.update_after or 0.0, size)
        recovered = size <= self.recovered
        spike.recovery_steps = (spike.recovery_steps or 0) if recovered else since + 1
        if since >= FOLLOW and recovered:
            spike.ended = "recovered"
        elif since >= GIVE_UP:
            spike.ended = "given up"

    def pop_spikes(self) -> list[dict[str, Any]]:
        """The open spikes and those that ended since the last call, which are forgotten now."""
        spikes = [{**asdict(spike), "recovered": self.recovered} for spike, _ in self._spikes]
        self._spikes = [entry for entry in self._spikes if entry[0].ended is None]
        return spikes
