"""From stored results to verdicts, by the rules in the claims.toml of each experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mvngrad_lab.experiments import import_all
from mvngrad_lab.report.claims import Claim, load_claims
from mvngrad_lab.report.exports import PREFIX, SAMPLE
from mvngrad_lab.store import FinishedRun

REPRODUCED, CAVEAT, NOT_REPRODUCED, UNDECIDED, NOT_RUN = STATUSES = (
    "reproduced",
    "reproduced with a caveat",
    "not reproduced",
    "undecided",
    "not run",
)


COMPARED = "A comparison, not a verdict: another GPU and another loop."
"""The note on a claim of which nothing is to be reproduced."""


@dataclass(frozen=True)
class Verdict:
    status: str
    """One of STATUSES."""
    measured: str
    note: str = ""
    """The caveat, what limits another verdict, or why it was not run."""


Judge = Callable[[dict[str, Any]], Verdict]
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


def decided(holds: bool, measured: str, caveat: str = "") -> Verdict:
    """`caveat` is what limits a claim that holds, if anything does."""
    status = (CAVEAT if caveat else REPRODUCED) if holds else NOT_REPRODUCED
    return Verdict(status, measured, caveat if holds else "")


def transferred(holds: bool, fails: bool, measured: str, note: str) -> Verdict:
    """What holds elsewhere than in the paper holds with a caveat; what shows neither way is undecided."""
    return Verdict(CAVEAT if holds else NOT_REPRODUCED if fails else UNDECIDED, measured, note)


def at_small_sizes(verdict: Verdict) -> Verdict:
    """Few seeds and short runs can show that a claim holds; that it does not, they leave open."""
    if verdict.status == NOT_REPRODUCED:
        return Verdict(NOT_RUN, verdict.measured, "Undecided at small sizes (--quick): run it in full.")
    return Verdict(verdict.status, verdict.measured, f"{verdict.note} Small sizes (--quick).".strip())


def latest(runs: Iterable[FinishedRun]) -> dict[str, FinishedRun]:
    """The run behind each target: full before quick, then one of all data, then what lacks least, then the newest."""

    def rank(run: FinishedRun) -> tuple[bool, bool, int, str]:
        sample = any(str(run.recipe.get(name, "")).endswith(SAMPLE) for name in ("data", "sweep"))
        left = run.result["left"] if run.name.startswith(PREFIX) else 0
        return not run.environment.get("quick", False), not sample, -left, run.environment.get("made", "")

    return {run.name: run for run in sorted(runs, key=rank)}


def judge(runs: Iterable[FinishedRun]) -> list[tuple[Claim, Verdict]]:
    """Each claim with its verdict, in the order of the report."""
    found, known = latest(runs), find_judges()
    verdicts = []
    for claim in load_claims():
        run = found.get(claim.target)
        if run is None or claim.id not in known:
            why = f"It needs {claim.needs}." if claim.needs else f"`mvngrad reproduce {claim.target}` decides it."
            verdicts.append((claim, Verdict(NOT_RUN, "", why)))
        else:
            verdict = known[claim.id](run.result)
            if run.environment.get("quick"):
                verdict = at_small_sizes(verdict)
            verdicts.append((claim, verdict))
    return verdicts
