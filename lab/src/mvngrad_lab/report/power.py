"""The power of Welch's one-sided test, by which optimizers are mostly compared over seeds: simulated.

    python -m mvngrad_lab.report.power

Needs scipy.
"""

from __future__ import annotations

import numpy as np
from scipy import stats

from mvngrad_lab.report.statistics import LEVEL

SEEDS = (3, 5, 6)
DIFFERENCES = (1, 2, 3, 4, 6)
"""Of the two means, in deviations over seeds."""


def welch_power(seeds: int, difference: float, draws: int = 100_000) -> float:
    """The share of experiments in which the test finds a true difference, with normal values of equal deviation."""
    rng = np.random.default_rng(0)
    low, high = (rng.normal(mean, 1, (seeds, draws)) for mean in (0, difference))
    return float((stats.ttest_ind(high, low, equal_var=False, alternative="greater").pvalue < LEVEL).mean())


def main() -> None:
    for seeds in SEEDS:
        powers = (f"{difference} deviations {welch_power(seeds, difference):.2f}" for difference in DIFFERENCES)
        print(f"{seeds} seeds each, level {LEVEL}: {', '.join(powers)}")


if __name__ == "__main__":
    main()
