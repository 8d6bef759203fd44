"""Powers of the rules on Table 1; `python -m mvngrad_lab.report.power` prints them."""

from __future__ import annotations

import math

from mvngrad_lab.experiments.cifar100.judge import MARGIN, ORDER_SEEDS
from mvngrad_lab.report.power import describe_deviations, describe_means, t_test_power
from mvngrad_lab.report.statistics import LEVEL

SEEDS = 3
TEST, TRAIN = {"128": 0.249, "1024": 0.360}, {"128": 0.0066, "1024": 0.0038}
"""Deviations over the seeds of Table 1 in results/runs.jsonl, pooled over the four cells."""
DIFFERENCES = {"128": 1.5, "1024": 1.0}


def make_sentences() -> dict[str, str]:
    sentences = {"cifar-deviation-test-128": describe_deviations(SEEDS, (10, 30))}
    for batch, deviation in TEST.items():
        for kind, of, off in (("test", deviation, 2.0), ("train", TRAIN[batch], 1.5)):
            means = describe_means([of] * 4, SEEDS, MARGIN, off, " points")
            sentences[f"cifar-{kind}-{batch}"] = f"Power with the deviation of Table 1 ({of:.2g}): {means}"
        by = DIFFERENCES[batch]
        six, three = (t_test_power(by, deviation * math.sqrt(2 / n), n - 1, LEVEL) for n in (ORDER_SEEDS, SEEDS))
        sentences[f"cifar-order-{batch}"] = (
            f"Power of one test with the deviation of Table 1 ({deviation:.2f}) if the difference is {by:g} "
            f"point{'s' if by != 1 else ''}: {six:.2f} at {ORDER_SEEDS} seeds, {three:.2f} at {SEEDS}."
        )
    return sentences
