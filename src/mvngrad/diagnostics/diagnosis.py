"""Records in plain words: the regime a training is in, and the cell that the paper's theory would pick for it.

Standard library only. Every statement carries the numbers that led to it; "cannot tell" is an answer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from mvngrad.diagnostics.sinks import Record, read_records
from mvngrad.diagnostics.spikes import RECOVERED

if TYPE_CHECKING:
    from mvngrad.diagnostics.gap import VarianceGap

LAST = 20
"""Records that are judged, the last ones: a regime changes while a training goes on."""

ENOUGH = 3
"""Records below which nothing is said: one may stand on an unlucky batch."""

SETTLED = 3.0
"""Times 1/(1-beta2) steps after which s and v have forgotten their start to 5%. Before, s still holds the first
deviations from m = 0, which are signal and not noise."""

SIGNAL = 1.0
"""Median |mu|/sigma from which a group is signal-dominated: half of its coordinates have more signal than noise. There
mu^2 is the larger part of v = mu^2 + sigma^2, so that the two normalizers differ by more than sqrt(2)."""

NOISE = 2.0
"""Times what pure noise shows as |m|/sigma in the median, 0.67 sqrt((1-beta)/(1+beta)), up to which a group is
noise-dominated: at beta = 0.9 that is 0.31, where v and s differ by 5% and their roots by less."""

HALF_NORMAL = 0.6745
"""The median of |xi| for a normal xi."""

COLLAPSE = 0.1
"""Share of coordinates in sign collapse from which it is said to be there. Chance alone puts none there: with noise
alone, an update near lr is 4 deviations of m away."""

FLOOR = 0.1
"""Share of coordinates at epsilon's floor from which it is said to be active: their steps are lr |m| / epsilon."""

CARRIED = 1.5
"""Times the largest update of a spike's own steps, and times what counts as recovered, that a later one must exceed for
the spike to be carried over. Momentum on normalized gradients only decays after a spike; Adam's update rises again when
v forgets faster than m."""

GAP = 0.02
"""Share of AdaBelief's variance that the other order must save for the order to be said to matter."""

ERRORS = 2.0
"""Standard errors that a measured gap must be away from 0."""

CANNOT_TELL = "cannot tell"
TABLE = {
    ("second moment", "before"): "Adam",
    ("second moment", "after"): "LaProp",
    ("variance", "before"): "AdaBelief",
    ("variance", "after"): "MVN-Grad",
}


@dataclass(frozen=True)
class Statement:
    topic: str
    """signal, sign collapse, epsilon floor, spikes, normalizer, order or cell."""
    verdict: str
    because: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.topic}: {self.verdict}. {self.because}"


@dataclass(frozen=True)
class GroupDiagnosis:
    group: int
    trained_with: str
    statements: tuple[Statement, ...]

    def __getitem__(self, topic: str) -> Statement:
        found = {statement.topic: statement for statement in self.statements}
        if topic not in found:
            raise KeyError(f"{topic!r} is no topic; there are {', '.join(found)}")
        return found[topic]

    def __iter__(self) -> Iterator[Statement]:
        return iter(self.statements)

    @property
    def cell(self) -> str | None:
        """What the theory would pick; None where it cannot be told."""
        verdict = self["cell"].verdict
        return None if verdict == CANNOT_TELL else verdict


@dataclass(frozen=True)
class Diagnosis:
    steps: tuple[int, int] | None
    """The first and the last step judged."""
    groups: tuple[GroupDiagnosis, ...]

    @property
    def summary(self) -> str:
        if self.steps is None:
            return "No record, no diagnosis."
        lines = [f"Steps {self.steps[0]} to {self.steps[1]}."]
        for group in self.groups:
            lines += [f"Group {group.group}, trained with {group.trained_with}:"]
            lines += [f"  {statement}" for statement in group.statements]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary


def diagnose(records: Iterable[Record] | str | os.PathLike[str], gap: VarianceGap | None = None) -> Diagnosis:
    """What the last records of a `Monitor`, or its file, say; with `gap`, what was measured of the order too.

    Where two trainings wrote to one file, it is of the second; where one went on from a checkpoint, of both parts.

    >>> print(diagnose([]))
    No record, no diagnosis.
    """
    if isinstance(records, (str, os.PathLike)):
        records = read_records(records)
    everything = _of_one_training(records)
    judged = everything[-LAST:]
    if not judged:
        return Diagnosis(None, ())
    numbers = sorted({entry["group"] for record in judged for entry in record["groups"]})
    groups = tuple(_judged(number, everything, judged, gap) for number in numbers)
    return Diagnosis((judged[0]["step"], judged[-1]["step"]), groups)


def _of_one_training(records: Iterable[Record]) -> list[Record]:
    """A record takes the place of those before it that have its step, or a later one."""
    kept: list[Record] = []
    for record in records:
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    return kept


def _judged(
    number: int, everything: Sequence[Record], judged: Sequence[Record], gap: VarianceGap | None
) -> GroupDiagnosis:
    def of(records: Sequence[Record]) -> list[Record]:
        return [entry for record in records for entry in record["groups"] if entry["group"] == number]

    entries = of(judged)
    signal, collapse, floor = _signal(entries), _share(entries, "sign_collapse"), _share(entries, "epsilon_floor")
    spikes = _spikes(of(everything))  # they are rare: over the whole training
    normalizer = _normalizer(signal, collapse, floor)
    order = _order(entries[-1], signal, spikes, gap)
    statements = (signal, collapse, floor, spikes, normalizer, order, _cell(normalizer, order))
    return GroupDiagnosis(number, entries[-1]["cell"], statements)


def _signal(entries: Sequence[Record]) -> Statement:
    last = entries[-1]
    if last["m"] is None:
        return Statement("signal", CANNOT_TELL, f"{last['cell']} keeps no m to measure it by.")
    if too_few := _too_few("signal", entries):
        return too_few
    needed = SETTLED / (1 - last["beta2"])
    if last["t"] < needed:
        because = f"After {last['t']} steps the averages still hold their start; that takes {needed:.0f}."
        return Statement("signal", CANNOT_TELL, because, {"t": last["t"], "needed": needed})
    medians = [entry["snr"]["0.5"] for entry in entries if entry["ratio"] and entry["ratio"]["0.5"] is not None]
    if not medians:
        return Statement("signal", CANNOT_TELL, "No coordinate has had a gradient, or half of the state is not finite.")
    # None is more than |m|/sqrt(v) can tell: it goes to 1 as the noise goes to 0.
    snr = median(math.inf if each is None else each for each in medians)
    low = NOISE * HALF_NORMAL * last["mean_noise"]
    verdict = "signal-dominated" if snr >= SIGNAL else "noise-dominated" if snr <= low else "between signal and noise"
    because = (
        f"The median of |mu|/sigma over coordinates is {snr:.3g}; signal dominates from {SIGNAL:g} on, and up to "
        f"{low:.2g} it may all be noise."
    )
    return Statement("signal", verdict, because, {"snr": snr, "signal_from": SIGNAL, "noise_to": low})


_SHARES = {
    "sign_collapse": ("sign collapse", COLLAPSE),
    "epsilon_floor": ("epsilon floor", FLOOR),
}


def _share(entries: Sequence[Record], key: str) -> Statement:
    topic, bound = _SHARES[key]
    if too_few := _too_few(topic, entries):
        return too_few
    shares = [entry[key] for entry in entries if entry[key] is not None]
    if not shares:
        return Statement(topic, CANNOT_TELL, "No coordinate has had a gradient.")
    share, last = median(shares), entries[-1]
    there = share >= bound
    numbers = {"share": share, "bound": bound}
    if key == "epsilon_floor":
        because = (
            f"{share:.1%} of the coordinates have a root that is epsilon for the most part "
            f"(eps {last['eps']:.2g}, floor of eps_s {last['floor']:.2g}); {bound:.0%} are enough."
        )
        return Statement(topic, "active" if there else "not active", because, numbers)
    if last["sign_collapse_is"] == "measured":
        because = (
            f"{share:.1%} of the coordinates step by lr within 5%, whatever their gradient; {bound:.0%} are enough."
        )
        return Statement(topic, "there" if there else "not there", because, numbers)
    because = f"A second moment would make {share:.1%} of the coordinates step by lr within 5%; {bound:.0%} are enough."
    return Statement(topic, "avoided" if there else "not there", because, numbers)


def _spikes(entries: Sequence[Record]) -> Statement:
    found = {spike["step"]: spike for entry in entries for spike in entry["spikes"]}  # the last word on each
    if not found:
        if not any(entry["gradient_norm"] for entry in entries):
            return Statement("spikes", CANNOT_TELL, "Gradients were not followed.")
        return Statement("spikes", "none", "No gradient norm was far above its running median.", {"count": 0})
    followed = [spike for spike in found.values() if spike["update_during"] is not None]
    numbers: dict[str, Any] = {"count": len(found), "steps": sorted(found)}
    sizes = [spike["multiple"] for spike in found.values() if spike["multiple"] is not None]
    text = f"{len(found)} found" + (f", the largest {max(sizes):.3g} times the median" if sizes else "")
    if not followed:
        return Statement("spikes", CANNOT_TELL, f"{text}; updates were not followed.", numbers)
    late = [spike for spike in followed if _carried_over(spike)]
    waits = [spike["recovery_steps"] for spike in followed if spike["recovery_steps"] is not None]
    largest = max(max(spike["update_during"], spike["update_after"] or 0.0) for spike in followed)
    numbers |= {"carried_over": len(late), "update": largest, "recovery_steps": max(waits, default=None)}
    because = (
        f"{text}; updates rose to at most {largest:.3g} times their median, for at most {numbers['recovery_steps']} "
        f"steps above {_recovered(followed[-1]):g} times; {len(late)} rose again after the gradient was back."
    )
    return Statement("spikes", "carried over" if late else "absorbed", because, numbers)


def _carried_over(spike: Record) -> bool:
    during: float = spike["update_during"]
    after: float = spike["update_after"] or 0.0
    return after > CARRIED * max(during, _recovered(spike))


def _recovered(spike: Record) -> float:
    """How many medians of before an update may be and count as back."""
    bound: float = spike.get("recovered", RECOVERED)  # which early records do not have
    return bound


def _normalizer(signal: Statement, collapse: Statement, floor: Statement) -> Statement:
    if collapse.verdict in ("there", "avoided") or signal.verdict == "signal-dominated":
        because = "thm:separation: with more signal than noise, a second moment leaves little but the sign."
        if floor.verdict == "active":
            because += (
                " But many roots are epsilon: the bound for a variance grows with 1/epsilon, so choose it with care."
            )
        return Statement("normalizer", "variance", because)
    if signal.verdict == "noise-dominated":
        because = "With noise alone, v and s are the same but for a factor: the theory does not separate them."
        return Statement("normalizer", "either", because)
    return Statement("normalizer", CANNOT_TELL, "Neither regime of the theory is clearly there.")


def _order(last: Record, signal: Statement, spikes: Statement, gap: VarianceGap | None) -> Statement:
    beta1, beta2 = last["beta1"], last["beta2"]
    if spikes.verdict == "carried over":
        because = "thm:spike: normalized first, a spike enters momentum at a bounded size."
        return Statement("order", "after", because)
    if spikes.numbers.get("count") and beta1**2 >= beta2:
        because = f"rem:adam_bound: beta1^2 = {beta1**2:.3g} is not below beta2 = {beta2:.3g}, and there are spikes."
        return Statement("order", "after", because, {"beta1^2": beta1**2, "beta2": beta2})
    if gap is not None and gap.cells[0] == TABLE["variance", "before"]:  # the theorem is about this row
        numbers = {"gap": gap.gap, "relative": gap.relative, "error": gap.error}
        if abs(gap.relative) < GAP:
            return Statement("order", "either", f"Measured: {gap}. Under {GAP:.0%} is little.", numbers)
        if abs(gap.gap) < ERRORS * gap.error:
            return Statement("order", CANNOT_TELL, f"Measured: {gap}. Take more batches.", numbers)
        return Statement("order", "after" if gap.gap > 0 else "before", f"Measured: {gap}.", numbers)
    if signal.verdict == "signal-dominated":
        because = "thm:var_adabelief_mvngrad: the gap grows with m^2, and m is large; measure it with variance_gap."
        return Statement("order", "after", because)
    if signal.verdict == "noise-dominated":
        seen = "spikes were not followed" if spikes.verdict == CANNOT_TELL else "no spike was carried over"
        because = f"The gap of thm:var_adabelief_mvngrad goes with m^2, and m is small; {seen}."
        return Statement("order", "either", because)
    return Statement("order", CANNOT_TELL, "Measure it with variance_gap.")


def _cell(normalizer: Statement, order: Statement) -> Statement:
    picked = (normalizer.verdict, order.verdict)
    if picked in TABLE:
        return Statement("cell", TABLE[picked], "Both questions have an answer.")
    rows, columns = (sorted({key[axis] for key in TABLE}, reverse=True) for axis in (0, 1))
    rows = [normalizer.verdict] if normalizer.verdict in rows else rows
    columns = [order.verdict] if order.verdict in columns else columns
    left = " or ".join(TABLE[row, column] for row in rows for column in columns)
    if len(rows) * len(columns) == 4:
        return Statement("cell", CANNOT_TELL, "Neither question has a single answer; all four are open.")
    return Statement("cell", left, "One question has no single answer.")


def _too_few(topic: str, entries: Sequence[Record]) -> Statement | None:
    if len(entries) >= ENOUGH:
        return None
    return Statement(topic, CANNOT_TELL, f"There are {len(entries)} records; at least {ENOUGH} are needed.")
