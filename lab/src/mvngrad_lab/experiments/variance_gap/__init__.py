"""Which order of momentum and normalizing gives the smaller variance of an update."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (Experiment("variance-gap", "which order of momentum varies less", (1.8, 0.27), f"{__name__}.run"),)
