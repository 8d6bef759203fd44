"""Progress of `mvngrad reproduce` and `train`: bars and an estimate on a terminal, lines everywhere."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from mvngrad_lab.experiments import Experiment, Outcome, Tick
from mvngrad_lab.pool import count_cores
from mvngrad_lab.training import events

PROBE_SECONDS = 0.25
"""CPU time of the work in `measure_slowness` on the reference machine, one core of an AMD EPYC."""
WORKER_SECONDS = 3.7
"""CPU time there until a process of an experiment with several has imported torch and loaded its data."""
QUIET = 60.0
"""Seconds without a line after which a training prints its progress, if there is no bar."""
WORDS = {"ran": "[green]done[/]  ", "stored": "[dim]stored[/]", "failed": "[red]failed[/]"}


def clock(seconds: float) -> str:
    """
    >>> clock(3.21), clock(75)
    ('3.2 s', '1 min 15 s')
    """
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def format_progress(event: events.EpochEnd, metrics: dict[str, float]) -> str:
    """The progress of a training, with the first of the latest `metrics`, which is a task's main one.

    >>> end = events.EpochEnd("mnist-0", 2, 10, 64, 320, 2.5, 4e4, 30, 120)
    >>> format_progress(end, {"test_accuracy": 50.0, "test_loss": 1.0})
    'epoch 2/10  loss 2.5000  test_accuracy 50.00%  40,000 samples/s, 2:00 left'
    """
    shown = "".join(f"  {text}" for text in events.format_metrics(event.key, metrics)[:1])
    left = f"{events.format_minutes(event.seconds_left)} left"
    return f"{events.format_epoch(event)}{shown}  {event.samples_per_second:,.0f} samples/s, {left}"


def measure_slowness() -> float:
    """How many times as long as on the reference machine a piece of work takes here and now, other load included."""
    import numpy as np

    values, start = np.linspace(0.1, 1.0, 10_000), time.perf_counter()
    for _ in range(12_000):
        values = np.sqrt(values * values + 0.01) / 1.01
    return (time.perf_counter() - start) / PROBE_SECONDS


def estimate_seconds(experiment: Experiment, seconds: float, slowness: float, cores: int) -> float:
    """How long an experiment takes here, from its `seconds` on the reference machine; on a GPU as on the H200."""
    if experiment.gpu:
        return seconds
    processes = min(cores, experiment.jobs)
    return slowness * (seconds / processes + (WORKER_SECONDS if processes > 1 else 0.0))


class TrainingBar(Progress):
    """The `on_event` of `train`: one bar with its numbers on a terminal, a line for each evaluation elsewhere."""

    def __init__(self, console: Console) -> None:
        columns = (BarColumn(20), TaskProgressColumn(), TextColumn("{task.fields[now]}", markup=False))
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.metrics: dict[str, float] = {}
        self.bar = self.add_task("", total=None, now="preparing")
        self.last = time.monotonic()

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Message) or self.disable:
            if events.is_worth_logging(event) or time.monotonic() - self.last >= QUIET:
                self.last = time.monotonic()
                print(events.format_event(event), flush=True)
        elif isinstance(event, events.StepProgress):
            words = events.format_event(event).removeprefix(f"{event.key}  ")
            self.update(self.bar, total=event.total_steps, completed=event.step, now=words)
        else:
            self.metrics |= {name: value for name, value in event.metrics.items() if value is not None}
            words = format_progress(event, self.metrics)
            self.update(self.bar, total=event.total_steps, completed=event.step, now=words)


class Bars(Progress):
    """The display of `reproduce`: one bar for the experiment that runs, one for everything."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description:<14}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}", markup=False),
        )
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.expected: dict[str, float] = {}
        self.passed = 0.0
        """Expected seconds of the experiments that have ended."""
        self.training, self.metrics = "", dict[str, float]()
        """The key of the current training and its latest metrics."""

    def plan(self, experiments: Sequence[tuple[Experiment, float]]) -> None:
        slowness, cores = measure_slowness(), count_cores()
        self.expected = {each.name: estimate_seconds(each, seconds, slowness, cores) for each, seconds in experiments}
        if total := sum(self.expected.values()):
            self.console.print(f"{len(experiments)} to run, about {clock(total)}")
            self.everything = self.add_task("everything", total=total, left="")

    def begin(self, experiment: Experiment, interrupted: bool) -> Tick:
        name = experiment.name
        if interrupted:
            self.console.print(f"{name}: an earlier run did not finish, or other code ran it; running it again")
        self.current = self.add_task(name, total=1.0, left=experiment.summary)

        def tick(share: float) -> None:
            self.update(self.current, completed=share)
            self._everything(self.passed + share * self.expected[name])

        return tick

    def event(self, event: events.Event) -> None:
        if isinstance(event, events.StepProgress | events.Message) or self.disable:
            events.print_event(event)
            return
        if event.key != self.training:
            self.training, self.metrics = event.key, {}
        self.metrics |= {name: value for name, value in event.metrics.items() if value is not None}
        self.update(self.current, left=format_progress(event, self.metrics))

    def _everything(self, done: float) -> None:
        total = sum(self.expected.values())
        task = self._tasks[self.everything]
        pace = (task.elapsed or 0.0) / done if done > 0.05 * total else 1.0
        self.update(self.everything, completed=done, left=f"about {clock((total - done) * pace)} left")

    def end(self, outcome: Outcome) -> None:
        name, summary = outcome.experiment.name, outcome.experiment.summary
        if name in self.expected:
            self.remove_task(self.current)
            self.passed += self.expected[name]
            self._everything(self.passed)
        line = escape(outcome.error) if outcome.error else f"{clock(outcome.seconds):>8}  [dim]{summary}[/]"
        self.console.print(f"{WORDS[outcome.status]} {name:<14} {line}", highlight=False, soft_wrap=True)
