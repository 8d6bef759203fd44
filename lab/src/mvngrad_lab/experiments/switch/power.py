"""Powers of the rules on the switch; `python -m mvngrad_lab.report.power` prints them."""

from __future__ import annotations

import math
from functools import partial

from mvngrad_lab.experiments.switch.judge import END
from mvngrad_lab.experiments.switch.records import SEEDS
from mvngrad_lab.report.power import list_powers, t_test_power
from mvngrad_lab.report.statistics import OUR_LEVEL


def power(above: float, deviation: float) -> float:
    return t_test_power(above, deviation / math.sqrt(len(SEEDS)), len(SEEDS) - 1, OUR_LEVEL)


def make_sentences() -> dict[str, str]:
    bump = list_powers(partial(power, 0.2), (0.02, 0.05, 0.1), "")
    end = list_powers(partial(power, END), (0.001, 0.003, 0.005), "")
    return {
        "switch-bump": f"Power of the test if fresh / 2 - converted is 0.2, by its deviation: {bump} "
        "(measured: 0.21, 0.012).",
        "switch-end": f"Power if there is no difference, by its deviation: {end} (measured: 0.0002).",
    }
