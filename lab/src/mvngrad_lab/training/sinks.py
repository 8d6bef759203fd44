"""Where the events of a training can go besides the store: TensorBoard, Weights & Biases.

Each is a callable for `on_event` with a `close`, and its package is imported where one is made.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from mvngrad import diagnostics
from mvngrad_lab.recipe import TrainingRecipe
from mvngrad_lab.training.events import EpochEnd, Event


def scalars(event: EpochEnd) -> dict[str, float]:
    """What the end of an epoch has to show; what is not finite has nothing."""
    found = {"loss": event.loss, "epoch": float(event.epoch), "samples_per_second": event.samples_per_second}
    return {name: value for name, value in (found | event.metrics).items() if value is not None}


class TensorBoard(diagnostics.TensorBoard):
    """Writes the scalars of every epoch to a folder of the run's own under `folder`."""

    def __init__(self, folder: Path, recipe: TrainingRecipe) -> None:
        try:
            super().__init__(folder / recipe.key)
        except ImportError as error:
            raise RuntimeError(str(error)) from error

    def __call__(self, event: Event) -> None:  # type: ignore[override]
        if isinstance(event, EpochEnd):
            self.add_scalars(scalars(event), event.step)


class WandB:
    """A run of a Weights & Biases project, with the recipe as its config; a resumed one goes on as the same run.

    Mode, entity and key are wandb's own, from its environment variables: WANDB_MODE=offline needs no account.
    """

    def __init__(self, project: str, recipe: TrainingRecipe) -> None:
        try:
            wandb: Any = import_module("wandb")
        except ImportError as error:
            raise RuntimeError("Weights & Biases needs a package that is not here: pip install wandb") from error
        self._run: Any = wandb.init(
            project=project, id=recipe.key, name=recipe.key, config=recipe.settings, resume="allow"
        )

    def __call__(self, event: Event) -> None:
        if isinstance(event, EpochEnd):
            self._run.log(scalars(event), step=event.step)

    def close(self) -> None:
        self._run.finish()
