"""How many steps gradient descent needs as the dimension grows."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (Experiment("separation", "steps against the dimension", (5.8, 0.75), f"{__name__}.run"),)
