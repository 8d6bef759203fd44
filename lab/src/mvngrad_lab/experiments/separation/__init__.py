"""How many steps gradient descent needs as the dimension grows."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (Experiment("separation", "steps against the dimension", (15, 2), f"{__name__}.run"),)
