"""What we found, in a few sentences for the first screen of the report and the end of `mvngrad reproduce`.

The figure.py of an experiment may define FINDINGS: name of a record -> (order, function). The function gets the
record's result and the verdicts by claim, and returns a sentence, or "" if there is nothing to say yet. LEAD: name of a
record -> a function that draws the figure beside the sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import matplotlib

from mvngrad_lab.discovery import find_experiments, import_all
from mvngrad_lab.report import Record, catch_unreadable
from mvngrad_lab.report.claims import KINDS, Claim
from mvngrad_lab.report.figures.style import RC
from mvngrad_lab.report.figures.svg import Figure
from mvngrad_lab.report.verdicts import CAVEAT, NOT_RUN, REPRODUCED, SHOWN_STATUSES, STATUSES, Judged, name_status

MOST = 4
"""Sentences on the first screen of the report."""

THEORY = ("thm:", "lem:", "cor:", "prop:", "rem:", "eq:")
"""Labels of statements that have a proof."""


@dataclass(frozen=True)
class Finding:
    text: str
    target: str
    """The record that it is about."""


def find(judged: Sequence[Judged], by_name: Mapping[str, Record], experiments: Sequence[str] = ()) -> list[Finding]:
    """All findings, or those about `experiments`; theorems last."""
    verdicts = {claim.id: verdict for claim, verdict in judged}
    found = []
    for module in import_all("figure"):
        for name, (order, describe) in getattr(module, "FINDINGS", {}).items():
            chosen = name in by_name and (not experiments or get_experiment(name) in experiments)
            if not chosen:
                continue
            with catch_unreadable(by_name[name]):
                text = describe(by_name[name].result, verdicts)
            if text:
                found.append((order, Finding(text, name)))
    theirs = [pair for pair in judged if not experiments or get_experiment(pair[0].target) in experiments]
    return [finding for _, finding in sorted(found, key=lambda pair: pair[0])] + count_theorems(theirs)


def get_experiment(target: str) -> str:
    """The experiment that makes a record: the longest name of one that the record's begins with, else its own.

    >>> get_experiment("spikes-images"), get_experiment("floor-mnist"), get_experiment("sweep-mnist")
    ('spikes', 'floor-mnist', 'sweep-mnist')
    """
    names = [name for name in find_experiments() if target == name or target.startswith(f"{name}-")]
    return max(names, key=len, default=target)


def count_theorems(judged: Sequence[Judged]) -> list[Finding]:
    """How many of the statements with a proof hold in simulations."""
    theory = [(c, v) for c, v in judged if any(label.startswith(THEORY) for label in c.where) and v.status != NOT_RUN]
    if not theory:
        return []
    counts = Counter(verdict.status for _, verdict in theory)
    caveats = f" and {counts[CAVEAT]} hold with a caveat" if counts[CAVEAT] else ""
    text = f"Of {len(theory)} simulated claims that have a proof, **{counts[REPRODUCED]} hold**{caveats}."
    return [Finding(text, theory[0][0].target)]


def draw_lead(by_name: Mapping[str, Record]) -> Figure | None:
    """The figure of the first screen; None if no record has one."""
    for module in import_all("figure"):
        for name, draw in getattr(module, "LEAD", {}).items():
            with matplotlib.rc_context(RC | {"svg.hashsalt": f"lead {name}"}):
                figure: Figure | None = draw(by_name[name].result) if name in by_name else None
            if figure:
                return figure
    return None


def summarize(judged: Sequence[Judged], by_name: Mapping[str, Record], experiments: Sequence[str] = ()) -> list[str]:
    """Counts and findings as lines of text; with `experiments`, theirs, and then all other claims in one line."""
    found = [f"- {finding.text.replace('**', '')}" for finding in find(judged, by_name, experiments)]
    if not experiments:
        by_kind = sorted(judged, key=lambda pair: KINDS.index(pair[0].kind))
        return [*_describe_counts(by_kind, lambda claim: f"claims, {claim.kind}"), *found]
    theirs = [pair for pair in judged if get_experiment(pair[0].target) in experiments]
    others = [pair for pair in judged if get_experiment(pair[0].target) not in experiments]
    counts = _describe_counts(theirs, lambda claim: f"claims of {get_experiment(claim.target)}")
    return [*counts, *found, *_describe_counts(others, lambda claim: "other claims")]


def _describe_counts(judged: Sequence[Judged], describe: Callable[[Claim], str]) -> list[str]:
    """How many claims have each status: a line for each description."""
    counts: dict[str, Counter[str]] = {}
    for claim, verdict in judged:
        counts.setdefault(describe(claim), Counter())[name_status(claim, verdict.status)] += 1
    return [
        f"{of.total()} {what if of.total() > 1 else what.replace('claims', 'claim')}: "
        + ", ".join(f"{of[status]} {status}" for status in SHOWN_STATUSES if of[status])
        for what, of in counts.items()
    ]


def count(judged: Sequence[Judged]) -> dict[str, dict[str, int]]:
    """Kind of claim -> status -> how many."""
    counts = Counter((claim.kind, verdict.status) for claim, verdict in judged)
    return {kind: {status: counts[kind, status] for status in STATUSES} for kind in KINDS}
