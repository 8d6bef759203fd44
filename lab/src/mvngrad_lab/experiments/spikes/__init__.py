"""Bad batches injected into real trainings: how each optimizer recovers."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (
    Experiment(
        "spikes",
        "bad batches in real trainings",
        (3_500, 3_500),
        f"{__name__}.run",
        gpu=True,
        cpu_form="spikes-mnist",
    ),
    Experiment(
        "spikes-mnist",
        "bad batches on MNIST",
        (420, 36),
        f"{__name__}.mnist",
        jobs=760,
        seconds_by_data={"mnist": 2400},
    ),
)
