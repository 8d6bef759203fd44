"""Powers of the rules on bad batches; `python -m mvngrad_lab.report.power` prints them."""

from __future__ import annotations

from functools import partial

from scipy import stats

from mvngrad_lab.experiments.spikes.judge import LAST_AND_FIRST
from mvngrad_lab.experiments.spikes.recipes import RATE_FACTORS, SEEDS, TASKS, UNCLIPPED_SEEDS
from mvngrad_lab.report.power import list_powers, signed_rank_power
from mvngrad_lab.report.statistics import OUR_LEVEL

FIRST_LEVEL = OUR_LEVEL / len(LAST_AND_FIRST)
"""Holm's first."""
MNIST_SEEDS = {"mnist": 8, "mnist-5k": 6}
ONE_WAY = 0.9
"""The share of pairs in which momentum first diverged, of those that differ."""


def count_pairs(task: str) -> int:
    return (len(TASKS[task].injections) - 1) * len(RATE_FACTORS) * len(SEEDS)


def sign_test_power(pairs: int) -> float:
    """Of the exact sign test for pairs that differ, ONE_WAY of them one way."""
    counts = range(pairs + 1)
    needed = next(c for c in counts if stats.binomtest(c, pairs, alternative="greater").pvalue < OUR_LEVEL)
    return float(stats.binom.sf(needed - 1, pairs, ONE_WAY))


def make_sentences() -> dict[str, str]:
    sentences = {}
    for task in ("text", "images"):
        n = count_pairs(task)
        power = list_powers(partial(signed_rank_power, n, level=FIRST_LEVEL), (0.5, 0.8, 1), " deviations")
        errors = [signed_rank_power(n, 0, FIRST_LEVEL, seeds=len(SEEDS), correlation=each) for each in (0.2, 0.5)]
        sentences[f"spikes-{task}-recovery"] = (
            f"Power {power}. Pairs of one seed share weights, data and events, so p is nominal: at the level "
            f"{FIRST_LEVEL:g} the error is {errors[0]:.2f} if they correlate by 0.2, {errors[1]:.2f} if by 0.5."
        )
        shift = 0.6 if task == "text" else 0.75
        norm, z = (signed_rank_power(cells * n, shift, FIRST_LEVEL) for cells in (4, 2))
        sentences[f"spikes-{task}-clipping"] = f"Power {norm:.2f} and {z:.2f} for a shift of {shift:g} deviations."
    whole, sample = (
        ", ".join(f"{signed_rank_power(seeds, by, FIRST_LEVEL):.2f}" for by in (1, 1.5))
        for seeds in MNIST_SEEDS.values()
    )
    mnist = (
        f"All of MNIST: {MNIST_SEEDS['mnist']} seeds, power {whole} for a shift of 1, 1.5 deviations; "
        f"the 5,000 digits: {MNIST_SEEDS['mnist-5k']} seeds, power {sample}."
    )
    unclipped = list_powers(
        partial(signed_rank_power, len(UNCLIPPED_SEEDS), level=FIRST_LEVEL), (1, 1.5), " deviations"
    )
    divergence = list_powers(sign_test_power, (5, 8, 12), " such pairs")
    return {
        **sentences,
        "spikes-mnist-usual-recovery": mnist,
        "spikes-mnist-short-recovery": mnist,
        "spikes-text-unclipped-loss": f"Power {unclipped}.",
        "spikes-text-divergence": f"Power {divergence} if 90% are of one kind.",
    }
