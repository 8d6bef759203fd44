"""The nonconvex convergence rate of MVN-Grad, and its floor."""

from mvngrad_lab.experiments import Experiment

EXPERIMENTS = (Experiment("convergence", "the nonconvex rate and its floor", (5, 3), f"{__name__}.run"),)
