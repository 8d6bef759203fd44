"""Powers of the rules on sweeps; `python -m mvngrad_lab.report.power` prints them."""

from __future__ import annotations

from functools import partial

from mvngrad_lab.experiments.sweeps.judge import EQUALITY_LEVEL, POINT
from mvngrad_lab.experiments.sweeps.sweeps import SWEEPS
from mvngrad_lab.report.power import list_powers, narrower_power, signed_rank_power
from mvngrad_lab.report.statistics import LEVEL

MEDIANS = {
    "cifar100-bs1024": ("sweep-cifar-1024-test", "sweep-cifar-1024-train"),
    "cifar100-bs1024-scaled": ("sweep-scaled-best", "sweep-scaled-variance", "sweep-scaled-train"),
    "mnist": ("sweep-mnist-best", "sweep-mnist-variance"),
    "openwebtext": ("openwebtext-sweep",),
}
RANGES = {
    "cifar100-bs1024-scaled": "sweep-scaled-quartiles",
    "mnist": "sweep-mnist-quartiles",
    "openwebtext": "openwebtext-quartiles",
}


def count_settings(sweep: str) -> int:
    """The configurations of MVN-Grad in the stages that depend on no result."""
    stages = (stage for stage in SWEEPS[sweep]().stages if not callable(stage))
    return len({each.key for stage in stages for each in stage if "mvngrad" in str(each.settings["optimizer"])})


def make_sentences() -> dict[str, str]:
    sentences = dict[str, str]()
    for sweep, claims in MEDIANS.items():
        n = count_settings(sweep)
        power = list_powers(partial(signed_rank_power, n, level=LEVEL), (0.5, 0.8, 1), " deviations")
        sentences |= dict.fromkeys(claims, f"Power of one test over {n} pairs: {power} of a paired difference.")
    for sweep, claim in RANGES.items():
        n = count_settings(sweep)
        power = list_powers(partial(narrower_power, n), (2, 4, 8), " times the range")
        sentences[claim] = f"Power of one test over {n} pairs: {power}."
    n = count_settings("cifar100-bs128")
    power = list_powers(
        lambda deviation: signed_rank_power(n, 0, EQUALITY_LEVEL, POINT / deviation), (0.5, 1, 2), " points"
    )
    sentences["sweep-cifar-128"] = (
        f"Power of the two one-sided tests over {n} pairs if nothing differs, by the deviation of a paired difference: "
        f"{power}; of the whole rule about half, because the 10th percentile is then as often below as above."
    )
    return sentences
