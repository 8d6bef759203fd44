"""The nonconvex convergence rate of MVN-Grad, and its floor."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (Experiment("convergence", "the nonconvex rate and its floor", (1.8, 0.55), f"{__name__}.run"),)
