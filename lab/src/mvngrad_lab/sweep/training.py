"""How a worker runs a recipe of the training loop; the shape of the function that a `Sweep` may name in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mvngrad_lab.store import FinishedRun
from mvngrad_lab.training.train import Interrupted, train


def run(recipe: Any, *, root: Path, data: Path | None, device: str, compile: bool) -> FinishedRun:
    """Train a recipe or go on with it, in its folder of `root`.

    Raises:
        KeyboardInterrupt: the process is asked to stop, and a checkpoint is written.
        Locked: another process is at it.
    """
    try:
        return train(recipe, root=root, data=data, device=device, compile=compile)
    except Interrupted as stop:
        raise KeyboardInterrupt(str(stop)) from stop
