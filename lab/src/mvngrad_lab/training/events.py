"""What a training reports while it runs: events as plain data, their text, and loggers that receive them.

A logger is a callable for `on_event` with a `close`; its package is imported when one is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from mvngrad_lab.errors import NotPossible
from mvngrad_lab.recipe import TrainingRecipe


@dataclass(frozen=True)
class Message:
    """Something worth a line: a run is resumed, a checkpoint is damaged."""

    key: str
    text: str


@dataclass(frozen=True)
class EpochEnd:
    key: str
    epoch: int
    epochs: int
    step: int
    total_steps: int
    loss: float | None
    """Mean of the epoch's finite batch losses; None if there are none."""
    samples_per_second: float
    seconds: float
    seconds_left: float
    metrics: dict[str, float | None] = field(default_factory=dict)
    """Of the evaluation, if the epoch ended with one; None is not finite."""


@dataclass(frozen=True)
class StepProgress:
    """Sent about once a second within an epoch."""

    key: str
    step: int
    total_steps: int
    seconds_left: float


Event = Message | EpochEnd | StepProgress


def format_event(event: Event) -> str:
    """An event as one line of text.

    >>> format_event(EpochEnd("mnist-0", 2, 10, 64, 320, 2.5, 4e4, 30, 120, {"test_accuracy": 50.0}))
    'mnist-0  epoch 2/10  loss 2.5000  test_accuracy 50.00%  40,000 samples/s, 0:30 elapsed, 2:00 left'
    >>> format_event(StepProgress("mnist-0", 40, 320, 100))
    'mnist-0  step 40/320  1:40 left'
    """
    if isinstance(event, Message):
        return f"{event.key}  {event.text}"
    if isinstance(event, StepProgress):
        return f"{event.key}  step {event.step}/{event.total_steps}  {format_minutes(event.seconds_left)} left"
    metrics = "".join(f"  {text}" for text in format_metrics(event.key, event.metrics))
    clocks = f"{format_minutes(event.seconds)} elapsed, {format_minutes(event.seconds_left)} left"
    return f"{event.key}  {format_epoch(event)}{metrics}  {event.samples_per_second:,.0f} samples/s, {clocks}"


def format_metrics(key: str, metrics: Mapping[str, float | None]) -> list[str]:
    """Names and values of the finite metrics of a run. Accuracies of our tasks are percentages; others may be shares.

    >>> format_metrics("mnist-0", {"test_accuracy": 97.5, "test_loss": 0.25, "train_loss": None})
    ['test_accuracy 97.50%', 'test_loss 0.2500']
    >>> format_metrics("own-0", {"test_accuracy": 0.975})
    ['test_accuracy 0.9750']
    """
    return [
        f"{name} {value:.2f}%" if "accuracy" in name and not key.startswith("own-") else f"{name} {value:.4f}"
        for name, value in metrics.items()
        if value is not None
    ]


def format_epoch(event: EpochEnd) -> str:
    """
    >>> format_epoch(EpochEnd("mnist-0", 2, 10, 64, 320, None, 4e4, 30, 120))
    'epoch 2/10  no finite loss'
    """
    loss = "no finite loss" if event.loss is None else f"loss {event.loss:.4f}"
    return f"epoch {event.epoch}/{event.epochs}  {loss}"


def format_minutes(seconds: float) -> str:
    """
    >>> format_minutes(75.4)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def is_worth_logging(event: Event) -> bool:
    """Whether a log should have it: evaluations and messages."""
    return isinstance(event, Message) or (isinstance(event, EpochEnd) and bool(event.metrics))


def print_event(event: Event) -> None:
    """Print what is worth logging."""
    if is_worth_logging(event):
        print(format_event(event), flush=True)


def scalars(event: EpochEnd) -> dict[str, float]:
    """The finite numbers of an epoch, by name."""
    numbers = {"loss": event.loss, "epoch": float(event.epoch), "samples_per_second": event.samples_per_second}
    return {name: value for name, value in (numbers | event.metrics).items() if value is not None}


class TensorBoard:
    """Writes the scalars of every epoch to `folder`/KEY."""

    def __init__(self, folder: Path, recipe: TrainingRecipe) -> None:
        from mvngrad import diagnostics

        try:
            self._sink = diagnostics.TensorBoard(folder / recipe.key)
        except ImportError as error:
            raise NotPossible(str(error)) from error
        self.close = self._sink.close

    def __call__(self, event: Event) -> None:
        if isinstance(event, EpochEnd):
            self._sink.add_scalars(scalars(event), event.step)


class WandB:
    """A run of a Weights & Biases project, with the recipe as its config; a resumed training continues the same run.

    Mode, entity and API key come from wandb's environment variables: WANDB_MODE=offline needs no account.
    """

    def __init__(self, project: str, recipe: TrainingRecipe) -> None:
        try:
            wandb: Any = import_module("wandb")
        except ImportError as error:
            raise NotPossible("Weights & Biases needs the package wandb: pip install wandb") from error
        self._run: Any = wandb.init(
            project=project, id=recipe.key, name=recipe.key, config=recipe.settings, resume="allow"
        )

    def __call__(self, event: Event) -> None:
        if isinstance(event, EpochEnd):
            self._run.log(scalars(event), step=event.step)

    def close(self) -> None:
        self._run.finish()
