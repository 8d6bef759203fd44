"""MVN-Grad on CIFAR-100 with its state in bf16 and int8."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (
    Experiment("state-precision", "state in bf16 and int8, 6 runs", (780, 780), f"{__name__}.run", gpu=True),
)
