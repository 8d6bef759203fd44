"""Powers of the rules on loss curves; `python -m mvngrad_lab.report.power` prints them."""

from __future__ import annotations

import math
from functools import partial

from mvngrad_lab.experiments.mnist.judge import PAIRS
from mvngrad_lab.report.power import list_powers, permutation_power, t_test_power, welch_power
from mvngrad_lab.report.statistics import LEVEL

SEEDS, GAP_SEEDS = 5, 3


def make_sentences() -> dict[str, str]:
    counts = list_powers(partial(permutation_power, SEEDS, 0.2), (1, 2, 3, 6), " spikes")
    losses = list_powers(partial(welch_power, SEEDS, level=LEVEL / len(PAIRS)), (2, 3, 4), " deviations")
    error = 1 / math.sqrt(GAP_SEEDS)
    gaps = list_powers(partial(t_test_power, error=error, df=GAP_SEEDS - 1, alpha=LEVEL), (2, 4, 8), " deviations")
    halved = list_powers(
        partial(t_test_power, error=error, df=GAP_SEEDS - 1, alpha=LEVEL / 2), (2, 4, 8), " deviations"
    )
    return {
        "mnist-gap-positive": f"Power of one test over {GAP_SEEDS} seeds: {gaps}.",
        "mnist-gap-plateau": f"Power of one test over {GAP_SEEDS} seeds at Holm's first level: {halved}.",
        "mnist-smooth": f"Power of one test against 0.2 spikes a run (Poisson): {counts}.",
        "mnist-fast": f"Power of one test at Holm's first level: {losses}.",
    }
