"""Powers of the rules on Table 2; `python -m mvngrad_lab.report.power` prints them."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from scipy import stats

from mvngrad_lab.report.claims import find_values
from mvngrad_lab.report.power import describe_deviations, describe_means, list_powers, welch_power
from mvngrad_lab.report.statistics import LEVEL

TEXTS = {"wikitext": (4, 2.0, 10.0, (10,)), "openwebtext": (3, 0.02, 0.1, (10, 30))}
"""Seeds, margin, and what is looked for: means off by this, deviations of these ratios."""
SEEDS = 3
"""On the stand-in."""


def order_powers(text: str, seeds: int, draws: int = 100_000) -> tuple[float, list[float]]:
    """With the paper's means and deviations: how often all of the three tests pass, and each."""
    rng, means = np.random.default_rng(0), find_values(f"{text}-validation")
    deviations = find_values(f"{text}-deviation-validation")
    *others, ours = (rng.normal(means[cell], deviations[cell], (seeds, draws)) for cell in means)
    passed = np.array([stats.ttest_ind(ours, o, equal_var=False, alternative="less").pvalue < LEVEL for o in others])
    return float(passed.all(axis=0).mean()), passed.mean(axis=1).tolist()


def spread_power(ratio: float) -> float:
    """Of the F test of LaProp's variance against the pooled one of the three others."""
    freedom = SEEDS - 1, 3 * (SEEDS - 1)
    return float(stats.f.sf(stats.f.isf(LEVEL, *freedom) / ratio**2, *freedom))


def make_sentences() -> dict[str, str]:
    sentences = {}
    for text, (seeds, margin, off, ratios) in TEXTS.items():
        every, each = order_powers(text, seeds)
        sentences[f"{text}-order"] = (
            f"Power with the paper's own means and deviations: all three tests pass in {every:.1%} "
            f"({', '.join(f'{share:.0%}' for share in each)} each), so this rule can hardly pass."
        )
        for kind in ("validation", "train"):
            deviations = list(find_values(claim := f"{text}-deviation-{kind}").values())
            means = describe_means(deviations, seeds, margin, off, "")
            sentences[f"{text}-{kind}"] = f"Power with the paper's deviations: {means}"
            sentences[claim] = describe_deviations(seeds, ratios)
    two = (
        list_powers(partial(welch_power, SEEDS, deviations=(deviation, 0.001)), differences, " nats")
        for deviation, differences in ((0.012, (0.01, 0.03, 0.1)), (0.006, (0.01, 0.03)))
    )
    one_test = "Power of one test if the deviations are 0.012 and 0.001: {}; if 0.006 and 0.001: {}."
    sentences["stand-in-adam"] = one_test.format(*two)
    laprop, *others = sorted(find_values("wikitext-deviation-validation").values(), reverse=True)
    paper = laprop / math.sqrt(sum(deviation**2 for deviation in others) / 3)
    spread = list_powers(spread_power, (round(paper, 1), 5, 10), " times the deviation")
    sentences["stand-in-spread"] = f"Power {spread} (the first is the paper's)."
    return sentences
