"""Runs as figures, one small module for each target."""

from __future__ import annotations

import matplotlib

from mvngrad_lab.experiments.cifar100 import figure as table1, gap_figure as cifar_gap
from mvngrad_lab.experiments.convergence import figure as convergence
from mvngrad_lab.experiments.language import figure as table2, throughput_figure as throughput
from mvngrad_lab.experiments.memory import figure as memory
from mvngrad_lab.experiments.mnist import figure as mnist_curves, gap_figure as mnist_gap
from mvngrad_lab.experiments.separation import figure as separation
from mvngrad_lab.experiments.spike import figure as spike
from mvngrad_lab.experiments.state_precision import figure as state_precision
from mvngrad_lab.experiments.sweeps import figure as sweep
from mvngrad_lab.experiments.variance_gap import figure as variance_gap
from mvngrad_lab.report.benchmarks import ENGINE, GPT2
from mvngrad_lab.report.exports import PREFIX
from mvngrad_lab.report.figures.style import RC
from mvngrad_lab.report.figures.svg import Figure
from mvngrad_lab.store import Run

TARGETS = {
    "spike": spike.draw,
    "variance-gap": variance_gap.draw,
    "mnist-curves": mnist_curves.draw,
    "mnist-gap": mnist_gap.draw,
    "separation": separation.draw,
    "convergence": convergence.draw,
    "memory": memory.draw,
    "table1": table1.draw,
    "table2": table2.draw,
    "cifar-gap": cifar_gap.draw,
    "state-precision": state_precision.draw,
    GPT2: throughput.draw,
    ENGINE: throughput.engine,
}


def draw(run: Run) -> list[Figure]:
    """All figures of a run; none for a target that has none."""
    target = sweep.draw if run.name.startswith(PREFIX) else TARGETS.get(run.name)
    if target is None:
        return []
    with matplotlib.rc_context(RC | {"svg.hashsalt": run.key}):
        return target(run.result)
