"""Powers of the rules on loss curves; `python -m mvngrad_lab.report.power` prints them."""

from __future__ import annotations

from functools import partial

from mvngrad_lab.experiments.mnist.judge import PAIRS
from mvngrad_lab.report.power import list_powers, permutation_power, welch_power
from mvngrad_lab.report.statistics import LEVEL

SEEDS = 5


def make_sentences() -> dict[str, str]:
    counts = list_powers(partial(permutation_power, SEEDS, 0.2), (1, 2, 3, 6), " spikes")
    losses = list_powers(partial(welch_power, SEEDS, level=LEVEL / len(PAIRS)), (2, 3, 4), " deviations")
    return {
        "mnist-smooth": f"Power of one test against 0.2 spikes a run (Poisson): {counts}.",
        "mnist-fast": f"Power of one test at Holm's first level: {losses}.",
    }
