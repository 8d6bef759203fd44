"""Table 1, and the variance gap in a CIFAR-100 training."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (
    Experiment("table1", "ResNet-18 on CIFAR-100, 24 runs", (3800, 3800), f"{__name__}.records", gpu=True),
    Experiment("cifar-gap", "the variance gap on CIFAR-100", (500, 500), f"{__name__}.gap", gpu=True),
)
