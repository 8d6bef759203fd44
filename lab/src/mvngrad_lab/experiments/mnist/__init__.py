"""The paper's figures on MNIST: training loss, and the variance gap in a real training."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (
    Experiment("mnist-curves", "training loss, smooth or not", (120, 30), f"{__name__}.curves"),
    Experiment("mnist-gap", "the variance gap in a real training", (120, 20), f"{__name__}.gap"),
)
