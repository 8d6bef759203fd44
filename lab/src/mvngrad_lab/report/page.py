"""Two HTML pages that need no other file: the report, and the diagnosis of what a Monitor recorded."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mvngrad.diagnostics.diagnosis import Diagnosis, GroupDiagnosis
from mvngrad_lab.report.claims import Claim
from mvngrad_lab.report.figures import draw, monitor, style
from mvngrad_lab.report.figures.svg import Figure
from mvngrad_lab.report.records import Record, Summary
from mvngrad_lab.report.verdicts import NOT_RUN, STATUSES, Verdict, find_latest

MARKERS = {
    "s": "M10 2h6v6h-6z",
    "^": "M13 1.4l3.6 6.6h-7.2z",
    "o": "M13 1.7a3.3 3.3 0 1 0 .01 0z",
    "D": "M13 1l4 4-4 4-4-4z",
}
"""matplotlib's markers as SVG paths."""

Judged = tuple[Claim, Verdict]
Drawn = tuple[Record, list[Figure]]


@dataclass
class Group:
    """A heading, the judged claims under it, and the records that decide them and are not drawn before."""

    name: str
    position: int
    """Of its first claim among all; groups are sorted by it."""
    claims: list[Judged] = field(default_factory=list)
    records: list[Drawn] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        return "group-" + re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def known(self) -> bool:
        return any(claim.known for claim, _ in self.claims)

    @property
    def tally(self) -> str:
        counts = Counter(verdict.status for _, verdict in self.claims)
        return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])


def render(judged: Sequence[Judged], records: Sequence[Record], *, version: str, made: str) -> str:
    """The report. Claims without a verdict come last, with the reason; then records that decide no claim.

    Tables and sweeps that are not done have no verdict yet: they get a heading where their claims will be. Those of
    users have no claims: they come after all others.
    """
    counts = Counter(verdict.status for _, verdict in judged)
    by_name = find_latest(records)
    groups = _make_groups(judged, by_name)
    shown = {record.name: record.key for group in groups for record, _ in group.records}
    for name, record in sorted(by_name.items()):
        if isinstance(record, Summary) and record.run_keys and name not in shown:
            targets = [claim.target for claim, _ in judged]
            position = next((i for i, t in enumerate(targets) if t == name or t.startswith(f"{name}-")), len(targets))
            groups.append(Group(record.title, position, records=[(record, draw(record))]))
            shown[name] = record.key
    groups.sort(key=lambda group: group.position)
    summarized = {key for record in records if isinstance(record, Summary) for key in record.run_keys}
    others = [record for record in records if record.key not in {*shown.values(), *summarized}]
    return TEMPLATES.get_template("page.html").render(
        version=version,
        made=made,
        counts={status: counts[status] for status in STATUSES},
        groups=groups,
        not_run=_group_by_reason([pair for pair in judged if pair[1].status == NOT_RUN]),
        other_records=[(record, [] if record.name in shown else draw(record)) for record in others],
    )


def _make_groups(judged: Sequence[Judged], by_name: Mapping[str, Record]) -> list[Group]:
    groups: dict[str, Group] = {}
    drawn: set[str] = set()
    for position, (claim, verdict) in enumerate(judged):
        if verdict.status == NOT_RUN:
            continue
        group = groups.setdefault(claim.group, Group(claim.group, position))
        group.claims.append((claim, verdict))
        if claim.target in by_name and claim.target not in drawn:
            drawn.add(claim.target)
            record = by_name[claim.target]
            group.records.append((record, draw(record)))
    return list(groups.values())


def _group_by_reason(judged: Sequence[Judged]) -> dict[str, dict[str, list[Claim]]]:
    """Group -> why it is not run -> claims."""
    reasons: dict[str, dict[str, list[Claim]]] = {}
    for claim, verdict in judged:
        reasons.setdefault(claim.group, {}).setdefault(verdict.note, []).append(claim)
    return reasons


@dataclass(frozen=True)
class DiagnosedGroup:
    """A parameter group on the page of a diagnosis."""

    diagnosis: GroupDiagnosis
    last: Mapping[str, Any]
    """Its entry in the last record that has it."""
    figures: list[Figure]

    @property
    def notes(self) -> dict[str, str]:
        """Optimizer -> what is written below it in the table of the four."""
        picked = self.diagnosis.cell
        notes = dict.fromkeys(picked.split(" or ") if picked else (), "what the theory picks")
        trained = self.diagnosis.trained_with
        notes[trained] = f"trained with it, {notes[trained]}" if trained in notes else "trained with it"
        return {name: note for name, note in notes.items() if name in style.MARKS}

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in self.last.items() if isinstance(value, (int, float, str))}


def render_diagnosis(records: Sequence[dict[str, Any]], diagnosis: Diagnosis, *, source: str) -> str:
    """The page of what a Monitor recorded, with figures over steps; `source` names the file."""
    groups = []
    logged = [(record["step"], record.get("logged", {}).get("loss")) for record in records]
    losses = [(step, loss) for step, loss in logged if loss is not None]
    for group in diagnosis.groups:
        entries = [
            (record["step"], entry) for record in records for entry in record["groups"] if entry["group"] == group.group
        ]
        figures = monitor.draw(f"{source} {group.group}", entries, losses)
        groups.append(DiagnosedGroup(group, entries[-1][1], figures))
        losses = []  # the training's, shown once
    return TEMPLATES.get_template("diagnosis.html").render(
        source=source, steps=diagnosis.steps, recorded=len(records), groups=groups
    )


def mark_code(text: str) -> Markup:
    """Escape a text, and put what is between backticks in <code>.

    >>> mark_code("1 < 2, says `mvngrad report`")
    Markup('1 &lt; 2, says <code>mvngrad report</code>')
    """
    parts = str(escape(text)).split("`")
    parts[1::2] = [f"<code>{part}</code>" for part in parts[1::2]]
    return Markup("".join(parts))


def list_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as lines: names joined by points, values as JSON.

    >>> list(list_values({"lr": 0.1, "data": {"name": "mnist"}}))
    [('lr', '0.1'), ('data.name', 'mnist')]
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from list_values(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value)


TEMPLATES = Environment(
    loader=PackageLoader("mvngrad_lab.report", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {"code": mark_code, "lines": list_values, "slug": lambda status: status.replace(" ", "-")}
TEMPLATES.globals |= {"marks": style.MARKS, "light": style.LIGHT, "dark": style.DARK, "markers": MARKERS}
