"""Power of the rules in claims.toml, from the spread over seeds in Table 1.

    python -m mvngrad_lab.experiments.floor.power

Needs scipy, and results/runs.jsonl. All rules test one contrast of arms with a pooled deviation: by a t-test, or by two
one-sided ones.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, variance

from scipy import integrate, stats

from mvngrad_lab.experiments.floor.arms import MNIST_TABLE_SEEDS
from mvngrad_lab.experiments.floor.effects import LOOKS, make_weights
from mvngrad_lab.experiments.floor.judge import MNIST_EPS_MARGIN, MNIST_MARGIN
from mvngrad_lab.experiments.floor.rules import GAIN, GAIN_LEVEL, MARGIN
from mvngrad_lab.recipe import COUPLED, OptimizerName
from mvngrad_lab.report.power import t_test_power
from mvngrad_lab.report.statistics import OUR_LEVEL
from mvngrad_lab.tasks.cifar100.recipe import paper

MNIST_DEVIATION = 0.36
"""Of one run on 5,000 digits, seeds as blocks: 0.35 and 0.30 at seeds 1 to 5 and 6 to 10."""
MNIST_FLOOR_DEVIATION = 0.28
"""Of one run of the four arms with a floor, seeds 21 to 120."""


def pooled_deviation(runs: Path, batch_size: int, optimizers: tuple[OptimizerName, ...]) -> float:
    """Over the seeds 0, 1 and 2 of these optimizers' runs in Table 1."""
    lines = (json.loads(line) for line in runs.read_text(encoding="utf-8").splitlines())
    accuracies = {line["key"]: line["result"].get("test_accuracy") for line in lines}
    return math.sqrt(
        fmean(
            variance(accuracies[paper(optimizer, batch_size, seed).key] for seed in (0, 1, 2))
            for optimizer in optimizers
        )
    )


def standard_error(deviation: float, per_side: int) -> float:
    """Of a difference of two means of `per_side` runs each."""
    return deviation * math.sqrt(2 / per_side)


def equivalence_power(effect: float, error: float, df: int, alpha: float, margin: float = MARGIN) -> float:
    """The power of two one-sided t-tests against the margin, averaged over the estimated deviation."""
    quantile = stats.t.isf(alpha, df)

    def density(scale: float) -> float:  # scale: the estimated deviation over the true one
        reach = margin - quantile * scale * error
        if reach <= 0:
            return 0.0
        inside = stats.norm.cdf((reach - effect) / error) - stats.norm.cdf((-reach - effect) / error)
        return float(inside * stats.chi2.pdf(df * scale**2, df) * 2 * df * scale)

    return float(integrate.quad(density, 0, margin / (quantile * error), limit=200)[0])


def interaction_power(effect: float, factors: tuple[str, ...], deviation: float, seeds: int) -> float:
    """Of the two-sided test of an interaction at Holm's first level."""
    error = deviation * math.sqrt(sum(weight**2 for weight in make_weights(*factors).values()) / seeds)
    return t_test_power(effect, error, 7 * (seeds - 1), OUR_LEVEL / len(LOOKS) / 4 / 2)


def make_sentences() -> dict[str, str]:
    """What `python -m mvngrad_lab.report.power` prints; the other powers in claims.toml are those of `main`."""
    cases = []
    for seeds, deviation, source in ((3, 0.36, "Table 1"), (3, 0.19, "measured"), (6, 0.19, "measured")):
        two, three = (
            ", ".join(f"{interaction_power(effect, factors, deviation, seeds):.2f}" for effect in (0.5, 1.0))
            for factors in (("floor", "order"), ("floor", "variance", "order"))
        )
        cases.append(f"{two} and {three} at {seeds} seeds, deviation {deviation} ({source})")
    table, means = MNIST_DEVIATION / math.sqrt(len(MNIST_TABLE_SEEDS)), 7 * (len(MNIST_TABLE_SEEDS) - 1)
    gains = (t_test_power(x - MNIST_MARGIN, table * math.sqrt(2), means, OUR_LEVEL / 4) for x in (0.3, 0.4))
    equal = [equivalence_power(x, table / math.sqrt(2), means, OUR_LEVEL, MNIST_MARGIN) for x in (0, 0.1)]
    one = [equivalence_power(x, table, means * 3 // 7, OUR_LEVEL, MNIST_MARGIN) for x in (0, 0.1)]
    sgd = [equivalence_power(x, table * math.sqrt(1.25), means * 4 // 7, OUR_LEVEL, MNIST_MARGIN) for x in (0, 0.1)]
    eps = [equivalence_power(x, MNIST_FLOOR_DEVIATION / 10, 297, OUR_LEVEL, MNIST_EPS_MARGIN) for x in (0, 0.05)]
    once, twice = (t_test_power(by, 1 / math.sqrt(5), 4, OUR_LEVEL / 4) for by in (1, 2))
    return {
        "floor-interactions": f"Power for 0.5 and 1 point, of two factors and of three: {'; '.join(cases)}.",
        "floor-mnist": f"Power for one cell at Holm's first level {once:.2f} if the gain is as large as the "
        f"deviation of a paired difference, {twice:.2f} if twice.",
        "floor-mnist-gain": "Power for one cell at Holm's first level {:.2f} if its gain is 0.3, {:.2f} if 0.4.".format(
            *gains
        ),
        "floor-mnist-variance": "Power {:.2f} if there is no difference, {:.2f} if it is 0.1".format(*equal)
        + "; with a floor alone or without one alone {:.2f} and {:.2f}.".format(*one),
        "floor-mnist-epsilon": "Power {:.2f} if there is no difference, {:.2f} if it is 0.05.".format(*eps),
        "floor-mnist-sgd": "Power {:.2f} if there is no difference, {:.2f} if it is 0.1.".format(*sgd),
    }


def main() -> None:
    runs = Path("results/runs.jsonl")
    second, centered = COUPLED[:2], COUPLED[2:]
    every = pooled_deviation(runs, 1024, second + centered)
    floored, plain = pooled_deviation(runs, 1024, centered), pooled_deviation(runs, 1024, second)
    small = pooled_deviation(runs, 128, second + centered)
    print(f"deviation over seeds, batch 1024: all {every:.3f}, floor {floored:.3f}, none {plain:.3f}; 128: {small:.3f}")
    for n in (3, 6, 9):
        whole, half = 7 * (n - 1), 3 * (n - 1)  # degrees of freedom: eight or four arms, seeds as blocks
        error = standard_error(every, 4 * n)
        powers = {
            **{
                f"floor-main, true {x}": t_test_power(x - GAIN, error, whole, GAIN_LEVEL / len(LOOKS))
                for x in (1.3, 1.5, 1.7)
            },
            "floor-each-cell, true 1.7": t_test_power(1.7, standard_error(every, n), whole, OUR_LEVEL / len(LOOKS) / 4),
            "variance-equal, order-equal": equivalence_power(0, error, whole, OUR_LEVEL),
            "the same with a floor": equivalence_power(0, standard_error(floored, 2 * n), half, OUR_LEVEL),
            "the same without a floor": equivalence_power(0, standard_error(plain, 2 * n), half, OUR_LEVEL),
            "sgd-equal": equivalence_power(0, floored * math.sqrt(1.25 / n), 4 * (n - 1), OUR_LEVEL),
            "decay, gap 1.7 and no part of it": t_test_power(
                0.85, every * math.sqrt(0.75 / n), 5 * (n - 1), GAIN_LEVEL
            ),
            **{
                f"decay-strength, decay-floor, true {x}": t_test_power(
                    x, standard_error(every, 2 * n), half, GAIN_LEVEL
                )
                for x in (0.5, 1.0)
            },
            "batch-128, true 1.5": t_test_power(1.5 - GAIN, standard_error(small, 2 * n), half, GAIN_LEVEL),
            "batch-128, true 2": t_test_power(2 - GAIN, standard_error(small, 2 * n), half, GAIN_LEVEL),
        }
        print(f"{n} seeds:", "; ".join(f"{name}: {value:.2f}" for name, value in powers.items()))


if __name__ == "__main__":
    main()
