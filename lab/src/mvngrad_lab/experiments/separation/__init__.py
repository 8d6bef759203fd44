"""How many steps gradient descent needs as the dimension grows."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (Experiment("separation", "steps against the dimension", (4.2, 0.6), f"{__name__}.run"),)
