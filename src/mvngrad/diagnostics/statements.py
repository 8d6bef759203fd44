"""What a diagnosis says: statements on each topic, a finding and an action for each group, as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ENOUGH = 3
"""The smallest number of records that are judged: a single one may come from an unusual batch."""

EARLIEST = 5
"""The first step that is judged. The averages of fewer gradients are too close to each other: at step 2, a fifth of the
coordinates of pure noise move by lr within 5%; from 5 on, less than a tenth do, even if all gradients are 1 and -1."""

CANNOT_TELL = "cannot tell"

CHOICE = "choice of optimizer"
"""The topic that names the optimizer which the theory would pick; the topic `optimizer` names the one that was used."""


@dataclass(frozen=True)
class Statement:
    """The answer to one question about a group, with the reason and the numbers behind it."""

    topic: str
    """signal, sign collapse, epsilon floor, spikes, normalizer, order or choice of optimizer."""
    verdict: str
    """One of a few fixed answers for each topic, or `CANNOT_TELL`."""
    because: str
    """The reason, as sentences."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """What was measured, and the thresholds it was compared with."""
    provisional: bool = False
    """The averages still contain the first steps, which `because` says."""

    def __str__(self) -> str:
        return f"{self.topic}: {self.verdict}{' (provisional)' if self.provisional else ''}. {self.because}"


@dataclass(frozen=True)
class GroupDiagnosis:
    """What is known about one parameter group. `diagnosis["signal"]` is the statement on a topic."""

    group: int
    trained_with: str
    """The update rule, such as Adam."""
    optimizer: str
    """The class, such as AdamW."""
    finding: str
    """The most important thing that is known."""
    action: str
    """What to do about it."""
    statements: tuple[Statement, ...]
    """Those with an answer first, then those that are `CANNOT_TELL`."""
    measured: tuple[str, ...] = ()
    """How large the floor of epsilon is, and what floors did in our runs, if epsilon decides the steps."""
    records: int = ENOUGH
    """The number of records that are judged."""

    def __getitem__(self, topic: str) -> Statement:
        """The statement on a topic; a KeyError that lists the topics if there is none."""
        by_topic = {statement.topic: statement for statement in self.statements}
        if topic not in by_topic:
            raise KeyError(f"{topic!r} is not a topic; the topics are {', '.join(by_topic)}")
        return by_topic[topic]

    @property
    def cell(self) -> str | None:
        """The optimizer that the theory would pick, or several; None if the records favour none."""
        verdict = self[CHOICE].verdict
        return None if verdict == CANNOT_TELL else verdict

    @property
    def printed(self) -> tuple[Statement, ...]:
        """The statements to print: with too few records, which `finding` says, only those that have an answer."""
        if self.records >= ENOUGH:
            return self.statements
        return tuple(statement for statement in self.statements if statement.verdict != CANNOT_TELL)


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` returns; `str` is the text to read."""

    steps: tuple[int, int] | None
    """The first and the last step judged; None without records."""
    groups: tuple[GroupDiagnosis, ...]
    notes: tuple[str, ...] = ()
    """What concerns the whole training, such as a loss that was not finite."""

    def __str__(self) -> str:
        if self.steps is None:
            return "No record, no diagnosis."
        lines = [" ".join([f"Steps {self.steps[0]} to {self.steps[1]}.", *self.notes])]
        for group in self.groups:
            lines += [f"Group {group.group}, trained with {group.optimizer}: {group.finding} {group.action}"]
            lines += [f"  {line}" for line in (*group.measured, *group.printed)]
        return "\n".join(lines)


def too_few_records(topic: str, what: str, count: int, dropped: int) -> Statement:
    """The statement that `count` records are too few for a topic; `dropped` others are from before `EARLIEST`."""
    from_step = f" from step {EARLIEST} on" if dropped else ""
    because = f"Too few records{from_step} to judge {what}: {count} of at least {ENOUGH}."
    return Statement(topic, CANNOT_TELL, because, {"records": count})


def format_range(low: float, high: float, digits: int) -> str:
    """`3`, or `3 to 10` if the two differ in these digits."""
    return " to ".join(dict.fromkeys((f"{low:.{digits}g}", f"{high:.{digits}g}")))
