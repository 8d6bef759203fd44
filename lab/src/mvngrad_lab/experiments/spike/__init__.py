"""One gradient spike of size M, and many, through the four optimizers."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (
    Experiment("spike", "one gradient spike, and many, through the four cells", (0.3, 0.13), f"{__name__}.run"),
)
