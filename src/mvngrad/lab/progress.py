"""Progress of `mvngrad reproduce`: bars and an estimate on a terminal, a line for each target everywhere."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from mvngrad.lab.reproduce import Outcome
from mvngrad.lab.targets import TARGETS, Target, Tick

WORDS = {"ran": "[green]done[/]  ", "kept": "[dim]kept[/]  ", "failed": "[red]failed[/]"}


def clock(seconds: float) -> str:
    """
    >>> clock(3.21), clock(75)
    ('3.2 s', '1 min 15 s')
    """
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


class Bars(Progress):
    """The display of `reproduce`: one bar for the target that runs, one for everything."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description:<14}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}"),
        )
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.expected: dict[str, float] = {}
        self.passed = 0.0
        """Expected seconds of the targets that are over."""

    def plan(self, seconds: dict[str, float]) -> None:
        self.expected = seconds
        if seconds:
            self.console.print(f"{len(seconds)} to run, about {clock(sum(seconds.values()))} on two cores")
            self.everything = self.add_task("everything", total=sum(seconds.values()), left="")

    def begin(self, target: Target, interrupted: bool) -> Tick:
        if interrupted:
            self.console.print(f"{target.name}: an earlier run did not finish, or is of other code; running it again")
        self.current = self.add_task(target.name, total=1.0, left=target.what)

        def tick(share: float) -> None:
            self.update(self.current, completed=share)
            self._everything(self.passed + share * self.expected[target.name])

        return tick

    def _everything(self, done: float) -> None:
        total = sum(self.expected.values())
        task = self._tasks[self.everything]
        pace = (task.elapsed or 0.0) / done if done > 0.05 * total else 1.0
        self.update(self.everything, completed=done, left=f"about {clock((total - done) * pace)} left")

    def end(self, outcome: Outcome) -> None:
        if outcome.target in self.expected:
            self.remove_task(self.current)
            self.passed += self.expected[outcome.target]
            self._everything(self.passed)
        name, what = outcome.target, TARGETS[outcome.target].what
        told = escape(outcome.error) if outcome.error else f"{clock(outcome.seconds):>8}  [dim]{what}[/]"
        self.console.print(f"{WORDS[outcome.status]} {name:<14} {told}", highlight=False, soft_wrap=True)
