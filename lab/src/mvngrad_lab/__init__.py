"""The lab: experiments, training, sweeps and the report for the optimizers of `mvngrad`."""

__version__ = "0.1.0.dev0"
