"""Bad batches injected into real trainings: how each optimizer recovers."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (Experiment("spikes", "bad batches in real trainings", (7_000, 7_000), f"{__name__}.run", gpu=True),)
