"""How much state each optimizer stores."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (Experiment("memory", "how much state an optimizer stores", (1.4, 1.4), f"{__name__}.run"),)
