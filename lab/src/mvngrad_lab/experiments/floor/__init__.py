"""Variance or epsilon: what a floor under the divisor does on CIFAR-100."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (
    Experiment(
        "floor",
        "a floor under the divisor of all four optimizers",
        (20_000, 20_000),
        f"{__name__}.run",
        gpu=True,
        cpu_form="floor-mnist",
    ),
    Experiment(
        "floor-dial",
        "accuracy by floor, from none to SGD",
        (1200, 1200),
        f"{__name__}.dial",
        gpu=True,
        cpu_form="floor-mnist",
    ),
    Experiment(
        "floor-mnist",
        "accuracy by floor on MNIST, from none to SGD",
        (200, 4.5),
        f"{__name__}.mnist",
        jobs=40,
        seconds_by_data={"mnist": 1050},
    ),
    Experiment(
        "floor-mnist-table",
        "variance or floor on MNIST, with 100 seeds",
        (600, 8),
        f"{__name__}.mnist_table",
        jobs=40,
        on_request=True,
    ),
)
