"""Powers of the rules on state in fewer bits; `python -m mvngrad_lab.report.power` prints them."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from mvngrad_lab.experiments.state_precision.arms import ADAMW_SEEDS, IMAGE_ARMS, IMAGE_SEEDS
from mvngrad_lab.experiments.state_precision.judge import LOSS_MARGIN, MARGIN
from mvngrad_lab.report.power import t_test_power
from mvngrad_lab.report.statistics import OUR_LEVEL

SEEDS, DEVIATION = 3, 0.29
"""Of the runs of 200 epochs; pooled over the three formats in results/runs.jsonl."""


def bound_power(deviation: float, draws: int = 100_000) -> float:
    """How often `worse_by_at_most` is at most MARGIN if a format loses nothing."""
    rng = np.random.default_rng(0)
    values, reference = rng.normal(0, deviation, (2, draws, SEEDS))
    errors = np.array([sample.var(axis=1, ddof=1) / SEEDS for sample in (values, reference)])
    freedom = (SEEDS - 1) * errors.sum(axis=0) ** 2 / (errors**2).sum(axis=0)
    reach = stats.t.isf(OUR_LEVEL, freedom) * np.sqrt(errors.sum(axis=0))
    return float((reference.mean(axis=1) - values.mean(axis=1) + reach <= MARGIN).mean())


def describe(margin: float, seeds: int, arms: int, deviations: tuple[float, ...]) -> str:
    df = (arms - 1) * (seeds - 1)
    powers = (t_test_power(margin, deviation * math.sqrt(2 / seeds), df, OUR_LEVEL) for deviation in deviations)
    return f"Power if there is no loss: {', '.join(f'{power:.2f}' for power in powers)} if"


def make_sentences() -> dict[str, str]:
    return {
        "cifar-state-precision": f"Power for one format that loses nothing {bound_power(DEVIATION):.2f}, with the "
        f"deviation of these runs ({DEVIATION}).",
        "images-bf16": describe(MARGIN, len(IMAGE_SEEDS), len(IMAGE_ARMS), (0.20, 0.25, 0.30)),
        "adamw-float32": describe(LOSS_MARGIN, len(ADAMW_SEEDS), 3, (0.003, 0.006, 0.008)),
    }
