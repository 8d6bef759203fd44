"""One gradient spike of size M, and many, through the four optimizers."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (
    Experiment("spike", "one gradient spike, and many, with all four optimizers", (0.3, 0.13), f"{__name__}.run"),
)
