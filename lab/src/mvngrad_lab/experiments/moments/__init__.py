"""What v and s estimate where gradients are stationary, and what that makes of z."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (Experiment("moments", "what v, s and z are in a stationary regime", (3.5, 1.75), f"{__name__}.run"),)
