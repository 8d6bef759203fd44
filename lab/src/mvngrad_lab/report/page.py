"""The report: claims with their verdicts, figures, and what each run was, as one HTML page that needs nothing else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mvngrad_lab.experiments import find_experiments
from mvngrad_lab.report.claims import Claim
from mvngrad_lab.report.exports import PREFIX
from mvngrad_lab.report.figures import draw
from mvngrad_lab.report.figures.svg import Figure
from mvngrad_lab.report.template import ENVIRONMENT
from mvngrad_lab.report.verdicts import CAVEAT, NOT_REPRODUCED, NOT_RUN, REPRODUCED, UNDECIDED, Verdict, latest
from mvngrad_lab.store import FinishedRun

KINDS = {
    REPRODUCED: "reproduced",
    CAVEAT: "caveat",
    NOT_REPRODUCED: "refuted",
    UNDECIDED: "undecided",
    NOT_RUN: "open",
}
"""Status -> the word for it in HTML and CSS."""

Judged = tuple[Claim, Verdict]


@dataclass
class Group:
    """A heading with the claims under it that were judged, and the runs that are first asked for there."""

    name: str
    claims: list[Judged] = field(default_factory=list)
    runs: list[tuple[FinishedRun, list[Figure]]] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        return "group-" + re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def known(self) -> bool:
        return any(claim.known for claim, _ in self.claims)

    @property
    def tally(self) -> str:
        counts = Counter(verdict.status for _, verdict in self.claims)
        return ", ".join(f"{counts[status]} {status}" for status in KINDS if counts[status])


def render(judged: Sequence[Judged], runs: Sequence[FinishedRun], *, version: str, made: str) -> str:
    """The whole page. Claims without a verdict come last, with why; runs behind no verdict after them."""
    counts = Counter(verdict.status for _, verdict in judged)
    found = latest(runs)
    groups = _groups([pair for pair in judged if pair[1].status != NOT_RUN], found)
    groups += _begun(found, {run.name for group in groups for run, _ in group.runs})
    shown = {run.name: run.key for group in groups for run, _ in group.runs}
    told = {key for run in runs for key in _behind(run)}
    others = [run for run in runs if run.key not in shown.values() and run.key not in told]
    return ENVIRONMENT.get_template("page.html").render(
        version=version,
        made=made,
        kinds=KINDS,
        counts={status: counts[status] for status in KINDS},
        groups=groups,
        not_run=_not_run([pair for pair in judged if pair[1].status == NOT_RUN]),
        other_runs=[(run, [] if run.name in shown else draw(run)) for run in others],
    )


def _groups(judged: Sequence[Judged], found: dict[str, FinishedRun]) -> list[Group]:
    groups: dict[str, Group] = {}
    drawn: set[str] = set()
    for claim, verdict in judged:
        group = groups.setdefault(claim.group, Group(claim.group))
        group.claims.append((claim, verdict))
        if claim.target in found and claim.target not in drawn:
            drawn.add(claim.target)
            run = found[claim.target]
            group.runs.append((run, draw(run)))
    return list(groups.values())


def _begun(found: dict[str, FinishedRun], shown: set[str]) -> list[Group]:
    """A section for each table or sweep that is behind no verdict: not done, or a sweep of a user."""
    waiting = [run for name, run in sorted(found.items()) if _behind(run) and name not in shown]
    return [Group(_title(run), runs=[(run, draw(run))]) for run in waiting]


def _behind(run: FinishedRun) -> list[str]:
    """The keys of the runs that this one stands for."""
    if run.name.startswith(PREFIX):
        return [row["key"] for row in run.result["runs"]]
    return list(run.result.get("behind", ()))


def _title(run: FinishedRun) -> str:
    if run.name.startswith(PREFIX):
        return f"Sweep {run.result['sweep']}"
    return f"{find_experiments()[run.name].summary}: {run.result['done']} done"


def _not_run(judged: Sequence[Judged]) -> dict[str, dict[str, list[Claim]]]:
    """Group -> why -> the claims of the group that wait for the same."""
    waiting: dict[str, dict[str, list[Claim]]] = {}
    for claim, verdict in judged:
        waiting.setdefault(claim.group, {}).setdefault(verdict.note, []).append(claim)
    return waiting
