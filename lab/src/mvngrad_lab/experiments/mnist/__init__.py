"""The paper's figures on MNIST: training loss, and the variance gap in a real training."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (
    Experiment("mnist-curves", "training loss, smooth or not", (163, 16), f"{__name__}.curves", jobs=40),
    Experiment("mnist-gap", "the variance gap in a real training", (75, 13), f"{__name__}.gap", jobs=6),
)
