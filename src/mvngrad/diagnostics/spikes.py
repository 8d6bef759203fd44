"""Spikes of a gradient's norm: when, how large, and how long the update shows them.

Standard library only.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

SPIKE = 5.0
"""A gradient is a spike where its norm is above this multiple of the running median. Norms of honest mini-batches
differ by a factor of two or three."""

RECOVERED = 1.5
"""The update is back where its size is at most this multiple of the median before the spike."""

WINDOW = 101
"""Steps that the running medians are taken over."""

WARM_UP = 20
"""Steps before which no median is trusted, and no spike is called one."""

FOLLOW, GIVE_UP = 200, 1000
"""Steps for which the update is followed after a spike, at least, and at most if it does not come back. Carry-over
shows late: Adam's update returns only when v has forgotten the spike (thm:spike)."""


@dataclass
class Spike:
    step: int
    """Its first step."""
    median: float
    """The running median of gradient norms before it."""
    multiple: float | None
    """The largest norm over that median; None if it was not finite."""
    steps: int
    """For how many steps in a row the norm was above the bound."""
    update_during: float | None = None
    """The largest update while the norm was above, over the median before; None where updates are not followed."""
    update_after: float | None = None
    """The largest update since then, likewise."""
    recovery_steps: int | None = None
    """Steps from the first of the spike to the last at which the update was above its bound, that one included."""
    ended: str | None = None
    """Why it is no longer followed: "recovered", "another spike", "given up"; or "not followed"; None while it is."""

    def lengthen(self, multiple: float | None) -> None:
        self.steps += 1
        self.multiple = None if multiple is None or self.multiple is None else max(multiple, self.multiple)


class Spikes:
    """Fed with a gradient norm, and the size of an update, for every step.

    >>> spikes = Spikes()
    >>> for step in range(1, 61):
    ...     spikes.feed(step, 100.0 if step == 40 else 1.0, 3.0 if 40 <= step < 43 else 1.0)
    >>> [(spike["step"], spike["multiple"], spike["recovery_steps"]) for spike in spikes.report()]
    [(40, 100.0, 3)]
    """

    def __init__(self, spike: float = SPIKE, recovered: float = RECOVERED) -> None:
        self.spike, self.recovered = spike, recovered
        self.norms: deque[float] = deque(maxlen=WINDOW)
        self.updates: deque[float] = deque(maxlen=WINDOW)
        self._above = False
        self._news: list[tuple[Spike, float | None]] = []
        """Those that are open, or were closed since the last report, with the median update before them."""

    def feed(self, step: int, norm: float, update: float | None = None) -> None:
        usual = median(self.norms) if len(self.norms) >= WARM_UP else math.inf
        above = not math.isfinite(norm) or norm > self.spike * usual > 0
        if above and math.isfinite(usual):
            multiple = norm / usual if math.isfinite(norm) and usual else None
            if self._above and self._news and self._news[-1][0].ended is None:
                self._news[-1][0].lengthen(multiple)
            else:
                for spike, _ in self._news:
                    spike.ended = spike.ended or "another spike"
                before = median(self.updates) if len(self.updates) >= WARM_UP else None
                self._news.append((Spike(step, usual, multiple, 1), before))
        self._above = above
        for spike, before in self._news:
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
        if self._above:
            spike.update_during = max(spike.update_during or 0.0, size) if math.isfinite(size) else spike.update_during
        else:
            spike.update_after = max(spike.update_after or 0.0, size) if math.isfinite(size) else spike.update_after
        back = size <= self.recovered
        spike.recovery_steps = (spike.recovery_steps or 0) if back else since + 1
        if since >= FOLLOW and back:
            spike.ended = "recovered"
        elif since >= GIVE_UP:
            spike.ended = "given up"

    def report(self) -> list[dict[str, Any]]:
        """The spikes that ended since the last report, and those that have not."""
        told = [{**asdict(spike), "recovered": self.recovered} for spike, _ in self._news]
        self._news = [entry for entry in self._news if entry[0].ended is None]
        return told
