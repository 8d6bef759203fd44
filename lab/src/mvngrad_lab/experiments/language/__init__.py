"""Table 2 on a stand-in text, and how long a training step of GPT-2 takes."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (
    Experiment("table2", "GPT-2 on a stand-in text, 44 runs", (3700, 3700), f"{__name__}.records", gpu=True),
)
