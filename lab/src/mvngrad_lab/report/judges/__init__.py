"""The rules of claims.toml as functions of a target's result; importing this makes them known to `verdicts`."""

from importlib import import_module

for _name in (
    "cifar100.gap_judge",
    "cifar100.judge",
    "convergence.judge",
    "language.judge",
    "language.throughput_judge",
    "memory.judge",
    "mnist.judge",
    "separation.judge",
    "spike.judge",
    "state_precision.judge",
    "sweeps.judge",
    "variance_gap.judge",
):
    import_module(f"mvngrad_lab.experiments.{_name}")
