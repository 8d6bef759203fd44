"""How much state each optimizer stores."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (Experiment("memory", "what an optimizer keeps", (1, 1), f"{__name__}.run"),)
