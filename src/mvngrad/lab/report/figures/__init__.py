"""Runs as figures, one small module for each target."""

from __future__ import annotations

import matplotlib

from mvngrad.lab.report.benchmarks import ENGINE, GPT2
from mvngrad.lab.report.exports import PREFIX
from mvngrad.lab.report.figures import (
    cifar_gap,
    convergence,
    memory,
    mnist_curves,
    mnist_gap,
    separation,
    spike,
    state_precision,
    sweep,
    table1,
    table2,
    throughput,
    variance_gap,
)
from mvngrad.lab.report.figures.style import RC
from mvngrad.lab.report.figures.svg import Figure
from mvngrad.lab.store import Run

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
