"""GPT-2 30M switched from AdamW to MVN-GradW at half of its training."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (
    Experiment("switch", "from AdamW to MVN-GradW at half of training", (720, 720), f"{__name__}.run", gpu=True),
)
