"""One gradient spike of size M, and many, through the four optimizers."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (
    Experiment("spike", "one gradient spike, and many, through the four cells", (0.2, 0.1), f"{__name__}.run"),
)
