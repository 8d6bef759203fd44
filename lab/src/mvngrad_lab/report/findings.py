"""What we found, in a few sentences for the first screen of the report and the end of `mvngrad reproduce`.

The figure.py of an experiment may define FINDINGS: name of a record -> (order, function). The function gets the
record's result and the verdicts by claim, and returns a sentence, or "" if there is nothing to say yet. LEAD: name of a
record -> a function that draws the figure beside the sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib

from mvngrad_lab.discovery import import_all
from mvngrad_lab.report import Record
from mvngrad_lab.report.claims import KINDS, Claim
from mvngrad_lab.report.figures.style import RC
from mvngrad_lab.report.figures.svg import Figure
from mvngrad_lab.report.verdicts import CAVEAT, NOT_RUN, REPRODUCED, STATUSES, Verdict

MOST = 4
"""Sentences on the first screen of the report."""

THEORY = ("thm:", "lem:", "cor:", "prop:", "rem:", "eq:")
"""Labels of statements that have a proof."""


@dataclass(frozen=True)
class Finding:
    text: str
    target: str
    """The record that it is about."""


def find(judged: Sequence[tuple[Claim, Verdict]], by_name: Mapping[str, Record]) -> list[Finding]:
    """All findings; theorems last."""
    verdicts = {claim.id: verdict for claim, verdict in judged}
    found = []
    for module in import_all("figure"):
        for name, (order, describe) in getattr(module, "FINDINGS", {}).items():
            if name in by_name and (text := describe(by_name[name].result, verdicts)):
                found.append((order, Finding(text, name)))
    return [finding for _, finding in sorted(found, key=lambda pair: pair[0])] + count_theorems(judged)


def count_theorems(judged: Sequence[tuple[Claim, Verdict]]) -> list[Finding]:
    """How many of the statements with a proof hold in simulations."""
    theory = [(c, v) for c, v in judged if any(label.startswith(THEORY) for label in c.where) and v.status != NOT_RUN]
    if not theory:
        return []
    counts = Counter(verdict.status for _, verdict in theory)
    caveats = f" and {counts[CAVEAT]} hold with a caveat" if counts[CAVEAT] else ""
    text = f"Of {len(theory)} statements of the theorems that we simulate, **{counts[REPRODUCED]} hold**{caveats}."
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


def summarize(judged: Sequence[tuple[Claim, Verdict]], by_name: Mapping[str, Record]) -> list[str]:
    """The counts and the findings as lines of text."""
    counts = [
        f"{sum(of.values())} claims, {kind}: " + ", ".join(f"{n} {status}" for status, n in of.items() if n)
        for kind, of in count(judged).items()
    ]
    return [*counts, *(f"- {finding.text.replace('**', '')}" for finding in find(judged, by_name))]


def count(judged: Sequence[tuple[Claim, Verdict]]) -> dict[str, dict[str, int]]:
    """Kind of claim -> status -> how many."""
    counts = Counter((claim.kind, verdict.status) for claim, verdict in judged)
    return {kind: {status: counts[kind, status] for status in STATUSES} for kind in KINDS}
