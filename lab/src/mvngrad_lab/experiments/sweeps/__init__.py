"""The paper's hyperparameter sweeps, and smaller ones of our own. `mvngrad sweep` runs them.

Any experiment's folder may declare sweeps: a module `sweeps` with a dictionary SWEEPS.
"""

from __future__ import annotations

from collections.abc import Callable

from mvngrad_lab.discovery import import_all
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.sweep.grids import Sweep, load_sweep


def find_sweeps() -> dict[str, Callable[[], Sweep]]:
    """The sweeps of all experiments, by name."""
    return {name: make for module in import_all("sweeps") for name, make in module.SWEEPS.items()}


def find_sweep(name: str) -> Sweep:
    """The sweep of an experiment, or of `package.module:function`. Raises InvalidInput if there is none."""
    sweeps = find_sweeps()
    if name in sweeps:
        return sweeps[name]()
    if ":" not in name:
        raise InvalidInput(f"there is no sweep {name!r}; choose from {', '.join(sweeps)}, or package.module:function")
    return load_sweep(name)
