"""What a run tells while it trains, as plain data, for a terminal, a log or a tracker."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Message:
    """Something worth a line: a run resumed, a checkpoint that could not be read."""

    key: str
    text: str


@dataclass(frozen=True)
class EpochEnd:
    """The end of an epoch."""

    key: str
    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float | None
    """Mean of the epoch's batches that had a finite one, if any had."""
    samples_per_second: float
    seconds: float
    seconds_left: float
    metrics: dict[str, float | None] = field(default_factory=dict)
    """Of the evaluation, where the epoch ended with one; None is not finite."""


@dataclass(frozen=True)
class StepProgress:
    """Within an epoch that takes long: a sign of life, about once a second."""

    key: str
    step: int
    steps: int
    seconds_left: float


Event = Message | EpochEnd | StepProgress


def format_event(event: Event) -> str:
    """An event as one line of text.

    >>> format_event(EpochEnd("mnist-0", 2, 10, 64, 320, 2.5, 4e4, 30, 120, {"test_accuracy": 0.5}))
    'mnist-0  epoch 2/10  loss 2.5000  test_accuracy 0.5000  40000/s  0:30 + 2:00'
    >>> format_event(StepProgress("mnist-0", 40, 320, 100))
    'mnist-0  step 40/320  1:40 left'
    """
    if isinstance(event, Message):
        return f"{event.key}  {event.text}"
    if isinstance(event, StepProgress):
        return f"{event.key}  step {event.step}/{event.steps}  {format_minutes(event.seconds_left)} left"
    metrics = "".join(f"  {name} {value:.4f}" for name, value in event.metrics.items() if value is not None)
    clocks = f"{format_minutes(event.seconds)} + {format_minutes(event.seconds_left)}"
    return f"{event.key}  {format_epoch(event)}{metrics}  {event.samples_per_second:.0f}/s  {clocks}"


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
    """What a log should have: evaluations and messages."""
    return isinstance(event, Message) or (isinstance(event, EpochEnd) and bool(event.metrics))


def print_event(event: Event) -> None:
    """Print what is worth a line."""
    if is_worth_logging(event):
        print(format_event(event), flush=True)
