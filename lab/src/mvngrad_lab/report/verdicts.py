"""From stored results to verdicts, by the rules in the claims.toml of each experiment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mvngrad_lab.discovery import import_all
from mvngrad_lab.report import Record, Summary, catch_unreadable
from mvngrad_lab.report.claims import OURS, Claim, load_claims

REPRODUCED, CAVEAT, NOT_REPRODUCED, UNDECIDED, COMPARED, NOT_RUN = STATUSES = (
    "reproduced",
    "reproduced with a caveat",
    "not reproduced",
    "undecided",
    "compared",
    "not run",
)
NAMES_FOR_OURS = {REPRODUCED: "confirmed", CAVEAT: "confirmed with a caveat", NOT_REPRODUCED: "not confirmed"}
"""Status names for our own hypotheses, which repeat no earlier claim."""
SHOWN_STATUSES = tuple(
    dict.fromkeys(name for status in STATUSES for name in (status, NAMES_FOR_OURS.get(status, status)))
)


def name_status(claim: Claim, status: str) -> str:
    """The status as a page shows it."""
    return NAMES_FOR_OURS.get(status, status) if claim.kind == OURS else status


SAMPLE = "-5k"
"""Ends the name of a data set or sweep that is a sample of another. It decides claims only without the other."""
UNDERPOWERED = (
    "There were too few runs to decide: with this n and this spread, a result exactly as claimed would not pass the "
    "test either."
)


@dataclass(frozen=True)
class Estimate:
    """One line of a strip: our value, and the paper's or a bound's."""

    label: str
    value: float
    interval: tuple[float, float] | None = None
    n: int | None = None
    reference: float | None = None


@dataclass(frozen=True)
class Strip:
    """Measured values on one scale, as dots and intervals."""

    what: str
    """The quantity; and what its intervals are, if it has some."""
    rows: tuple[Estimate, ...]
    digits: int | None = 2
    """Decimals; None for significant digits."""
    reference: str = "paper"
    """What the references are."""

    @classmethod
    def of_numbers(
        cls, what: str, rows: Iterable[Sequence[Any]], reference: str = "limit", digits: int | None = None
    ) -> Strip:
        """Of (label, value) or (label, value, reference), for values that have no interval."""
        estimates = (Estimate(label, float(value), None, None, *map(float, rest)) for label, value, *rest in rows)
        return cls(what, tuple(estimates), digits, reference)

    def position(self, value: float) -> float:
        """From 0 to 100 along the scale, which is logarithmic if the values are positive and span a factor of 30.

        Values that are printed as one number are in the middle.
        """
        numbers = [x for row in self.rows for x in (row.value, row.reference, *(row.interval or ())) if x is not None]
        finite = [x for x in numbers if math.isfinite(x)]
        low, high = min(finite), max(finite)
        scale = math.log if low > 0 and high > 30 * low else float
        width = scale(high) - scale(low)
        if width == 0 or (self.digits is not None and high - low < 10.0**-self.digits):
            return 50.0
        return 100 * (scale(value) - scale(low)) / width


@dataclass(frozen=True)
class Verdict:
    status: str
    """One of STATUSES."""
    measured: str
    """What a strip does not show, such as p-values."""
    note: str = ""
    """The caveat, a remark on another verdict, or why it was not run."""
    strip: Strip | None = None


Judged = tuple[Claim, Verdict]
Judge = Callable[[Any], Verdict]
JUDGES: dict[str, Judge] = {}
"""Claim -> the function that applies its rule to a result. Filled by `find_judges`."""


def judges(claim: str) -> Callable[[Judge], Judge]:
    """Register the decorated function as the judge of `claim`."""

    def register(judge: Judge) -> Judge:
        JUDGES[claim] = judge
        return judge

    return register


def find_judges() -> dict[str, Judge]:
    """All judges by claim; imports the judge.py of every experiment, which registers them."""
    for _ in import_all("judge"):
        pass
    return JUDGES


def decide(holds: bool, measured: str, caveat: str = "", strip: Strip | None = None) -> Verdict:
    """Reproduced if the rule holds, with a caveat if there is one; else not reproduced."""
    status = (CAVEAT if caveat else REPRODUCED) if holds else NOT_REPRODUCED
    return Verdict(status, measured, caveat if holds else "", strip)


def decide_transferred(holds: bool, fails: bool, measured: str, note: str, strip: Strip | None = None) -> Verdict:
    """The verdict on a claim of the paper that is tested on another task: reproduced with a caveat at best."""
    return Verdict(CAVEAT if holds else NOT_REPRODUCED if fails else UNDECIDED, measured, note, strip)


def mark_as_quick(verdict: Verdict) -> Verdict:
    """The verdict of a run with --quick: small sizes can show that a claim holds, but not that it fails."""
    if verdict.status == NOT_REPRODUCED:
        return replace(verdict, status=UNDECIDED, note="Small sizes (--quick) cannot decide this: run it in full.")
    return replace(verdict, note=f"{verdict.note} Small sizes (--quick).".strip())


def find_latest(records: Iterable[Record]) -> dict[str, Record]:
    """The record of each name: full before quick, then of all data, then the most complete, then the newest."""

    def rank(record: Record) -> tuple[bool, bool, int, str]:
        sample = any(str(record.recipe.get(name, "")).endswith(SAMPLE) for name in ("data", "sweep"))
        left = record.left if isinstance(record, Summary) else 0
        return not record.environment.get("quick", False), not sample, -left, record.environment.get("made", "")

    return {record.name: record for record in sorted(records, key=rank)}


def judge(records: Iterable[Record]) -> list[Judged]:
    """Each claim with its verdict, in the order of the report."""
    by_name, rules = find_latest(records), find_judges()
    verdicts = []
    for claim in load_claims():
        record = by_name.get(claim.target)
        if record is None or claim.id not in rules:
            why = f"It needs {claim.needs}." if claim.needs else f"`mvngrad reproduce {claim.target}` decides it."
            verdicts.append((claim, Verdict(NOT_RUN, "", why)))
        else:
            with catch_unreadable(record):
                verdict = rules[claim.id](record.result)
            verdicts.append((claim, mark_as_quick(verdict) if record.environment.get("quick") else verdict))
    return verdicts
