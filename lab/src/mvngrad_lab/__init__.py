"""The laboratory: experiments, training, sweeps and the report around the optimizers of `mvngrad`."""

from mvngrad import __version__ as __version__
