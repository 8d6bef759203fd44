"""What a run looked like step by step: its curve, its spikes, and the steps that were left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

WINDOW = 100
"""Steps before a step that say what was to be expected of it."""
DEVIATIONS = 6.0
APART = 10
"""Steps within which spikes are one."""


def spikes(values: Sequence[float | None]) -> list[int]:
    """Steps, from 0, at which a series leaps: by more than 6 robust deviations above the median of the last 100.

    The deviation is 1.4826 times the median distance from that median, which is the standard deviation of a normal
    series. What is not finite is a spike. Of spikes less than 10 steps from the one before, none counts; nor does any
    in the first 100 steps, where every training falls fast.

    >>> calm = [2 + 0.1 * math.sin(step) for step in range(300)]
    >>> spikes(calm), spikes([*calm[:150], 3.0, 2.9, *calm[152:]]), spikes([*calm[:200], None, *calm[201:]])
    ([], [150], [200])
    """
    found: list[int] = []
    last = -APART
    for step in range(WINDOW, len(values)):
        value = values[step]
        if value is not None:
            before = [old for old in values[step - WINDOW : step] if old is not None]
            middle = median(before) if before else -math.inf
            deviation = 1.4826 * median([abs(old - middle) for old in before]) if before else 0.0
            if value <= middle + DEVIATIONS * deviation:
                continue
        if step - last >= APART:
            found.append(step)
        last = step
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the rows of metrics.jsonl that have `losses` and `norms`: what a report needs of them."""
    losses = [value for row in rows for value in row["losses"]]
    norms = [value for row in rows for value in row["norms"]]
    return {
        "nonfinite_steps": sum(row["nonfinite"] for row in rows),
        "loss_spikes": spikes(losses),
        "norm_spikes": spikes(norms),
        "curve": [[row["step"], row["loss"]] for row in rows if row["loss"] is not None],
    }
