"""The lab: experiments, training, sweeps and the report for the optimizers of `mvngrad`."""

import pkgutil

__version__ = "0.1.0"

__path__ = pkgutil.extend_path(__path__, __name__)
"""So that a folder mvngrad_lab/experiments/<topic>/ elsewhere on sys.path is found too."""
