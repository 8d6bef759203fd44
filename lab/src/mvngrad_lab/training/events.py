"""What a run tells while it trains, as plain data, for a terminal, a log or a tracker."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Message:
    """Something worth a line: a run resumed, a checkpoint that could not be read."""

    key: str
    text: str


@dataclass(frozen=True)
class Progress:
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
class Step:
    """Within an epoch that takes long: a sign of life, about once a second."""

    key: str
    step: int
    steps: int
    seconds_left: float


Event = Message | Progress | Step


def line(event: Event) -> str:
    """An event as one line of text.

    >>> line(Progress("mnist-0", 2, 10, 64, 320, 2.5, 4e4, 30, 120, {"test_accuracy": 0.5}))
    'mnist-0  epoch 2/10  loss 2.5000  test_accuracy 0.5000  40000/s  0:30 + 2:00'
    >>> line(Step("mnist-0", 40, 320, 100))
    'mnist-0  step 40/320  1:40 left'
    """
    if isinstance(event, Message):
        return f"{event.key}  {event.text}"
    if isinstance(event, Step):
        return f"{event.key}  step {event.step}/{event.steps}  {minutes(event.seconds_left)} left"
    metrics = "".join(f"  {name} {value:.4f}" for name, value in event.metrics.items() if value is not None)
    clocks = f"{minutes(event.seconds)} + {minutes(event.seconds_left)}"
    return f"{event.key}  {reached(event)}{metrics}  {event.samples_per_second:.0f}/s  {clocks}"


def reached(event: Progress) -> str:
    """
    >>> reached(Progress("mnist-0", 2, 10, 64, 320, None, 4e4, 30, 120))
    'epoch 2/10  no finite loss'
    """
    loss = "no finite loss" if event.loss is None else f"loss {event.loss:.4f}"
    return f"epoch {event.epoch}/{event.epochs}  {loss}"


def minutes(seconds: float) -> str:
    """
    >>> minutes(75.4)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def worth_a_line(event: Event) -> bool:
    """What a log should have: evaluations and messages."""
    return isinstance(event, Message) or (isinstance(event, Progress) and bool(event.metrics))


def printed(event: Event) -> None:
    """Print what is worth a line."""
    if worth_a_line(event):
        print(line(event), flush=True)
