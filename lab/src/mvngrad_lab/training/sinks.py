"""Where the events of a training can go besides the store: TensorBoard, Weights & Biases.

Each is a callable for `on_event` with a `close`, and its package is imported where one is made.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from mvngrad_lab.training.events import Event, Progress
from mvngrad_lab.training_recipe import Training


def scalars(event: Progress) -> dict[str, float]:
    """What the end of an epoch has to show; what is not finite has nothing."""
    found = {"loss": event.loss, "epoch": float(event.epoch), "samples_per_second": event.samples_per_second}
    return {name: value for name, value in (found | event.metrics).items() if value is not None}


class TensorBoard:
    """Scalars by step, in a folder of the run's own under `folder`."""

    def __init__(self, folder: Path, recipe: Training) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RuntimeError("TensorBoard needs a package that is not here: pip install tensorboard") from error
        self._make: Any = SummaryWriter
        self._writer: Any = None
        self.folder = folder / recipe.key

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Progress):
            return
        if self._writer is None:
            # Of a run that goes on from a checkpoint, steps after it were shown before and come again.
            self._writer = self._make(str(self.folder), purge_step=event.step)
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event.step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB:
    """A run of a Weights & Biases project, with the recipe as its config; a resumed one goes on as the same run.

    Mode, entity and key are wandb's own, from its environment variables: WANDB_MODE=offline needs no account.
    """

    def __init__(self, project: str, recipe: Training) -> None:
        try:
            wandb: Any = import_module("wandb")
        except ImportError as error:
            raise RuntimeError("Weights & Biases needs a package that is not here: pip install wandb") from error
        self._run: Any = wandb.init(
            project=project, id=recipe.key, name=recipe.key, config=recipe.settings, resume="allow"
        )

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress):
            self._run.log(scalars(event), step=event.step)

    def close(self) -> None:
        self._run.finish()
