"""HTML pages that need no other file: the report, a user's own sweep or table, and a diagnosis."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Any

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mvngrad.diagnostics.statements import Diagnosis, GroupDiagnosis
from mvngrad_lab.discovery import import_all
from mvngrad_lab.report import Record, Summary, catch_unreadable, findings
from mvngrad_lab.report.claims import ARXIV, NUMBERS, OURS, Claim
from mvngrad_lab.report.figures import monitor, style
from mvngrad_lab.report.figures.svg import Figure, Table
from mvngrad_lab.report.verdicts import (
    NAMES_FOR_OURS,
    NOT_RUN,
    SHOWN_STATUSES,
    STATUSES,
    Estimate,
    Judged,
    find_latest,
    judge,
    name_status,
)

MARKERS = {
    "s": "M10 2h6v6h-6z",
    "^": "M13 1.4l3.6 6.6h-7.2z",
    "o": "M13 1.7a3.3 3.3 0 1 0 .01 0z",
    "D": "M13 1l4 4-4 4-4-4z",
}
"""matplotlib's markers as SVG paths."""
NUMBER = re.compile(r"\**[−+-]?[\d,]+(?:\.(?P<decimals>\d+))?(?P<rest>%|[ ×].*|, [−+-]?\d.*)?\**")
"""A cell of a table that starts with a number."""
NO_VALUE = ("", "–", "to come", "diverged")
"""Cells that say nothing about whether their column has numbers or words."""
LABEL = re.compile("|".join(re.escape(label) for label in sorted(NUMBERS, key=len, reverse=True)))
"""A label of the paper's source."""


@dataclass(frozen=True)
class NumberedFigure:
    """A figure with its number on the page."""

    figure: Figure
    number: int

    @property
    def label(self) -> str:
        return f"{'Figure' if self.figure.panels else 'Table'} {self.number}"

    @property
    def anchor(self) -> str:
        return f"figure-{self.number}"


@dataclass
class Group:
    """A heading, the records under it that are not drawn before, and the claims that they decide."""

    name: str
    position: int
    """Of its first claim among all; groups are sorted by it."""
    claims: list[Judged] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        return f"group-{get_slug(self.name)}"

    @property
    def tally(self) -> str:
        counts = Counter(name_status(claim, verdict.status) for claim, verdict in self.claims)
        return ", ".join(f"{counts[status]} {status}" for status in SHOWN_STATUSES if counts[status])


def render(judged: Sequence[Judged], records: Sequence[Record], *, version: str, made: str, docs: str = "") -> str:
    """The report. Claims without a verdict come last, with the reason; then records that decide no claim.

    Tables and sweeps that are not done have no verdict yet: they get a heading where their claims will be. Those that
    no claim is about have a page of their own (`render_own`), which the report links to. `docs` is the address of the
    documentation, if it has one.
    """
    by_name = find_latest(records)
    groups, numbers = _make_groups(judged, by_name), itertools.count(1)
    shown = {
        record.name: [NumberedFigure(figure, next(numbers)) for figure in draw(record)]
        for group in groups
        for record in group.records
    }
    groups = [group for group in groups if group.claims or any(shown[record.name] for record in group.records)]
    own = find_own(judged, by_name)
    summarized = {key for record in records if isinstance(record, Summary) for key in record.run_keys}
    used = {by_name[name].key for name in (*shown, *own)} | summarized
    others = [record for record in records if record.key not in used]
    return TEMPLATES.get_template("page.html").render(
        version=version,
        made=made,
        docs=docs,
        found=[
            (f.text, _find_anchor(f.target, groups, judged)) for f in findings.find(judged, by_name)[: findings.MOST]
        ],
        lead=findings.draw_lead(by_name),
        counts=findings.count(judged),
        groups=groups,
        shown=shown,
        not_run=_group_by_reason([pair for pair in judged if pair[1].status == NOT_RUN]),
        own=name_pages(own),
        other_records=[
            (record, [NumberedFigure(figure, next(numbers)) for figure in draw(record)], _judge_alone(record))
            for record in others
        ],
    )


def _judge_alone(record: Record) -> list[Judged]:
    """The verdicts that this record would give, if no other had its name."""
    return [(claim, verdict) for claim, verdict in judge([record]) if verdict.status != NOT_RUN]


def draw(record: Record) -> list[Figure]:
    """All figures of a record; none if no figure.py has its name among its FIGURES, whose keys may be patterns."""
    for module in import_all("figure"):
        for pattern, draw_figures in module.FIGURES.items():
            if fnmatchcase(record.name, pattern):
                with catch_unreadable(record), matplotlib.rc_context(style.RC | {"svg.hashsalt": record.key}):
                    return list(draw_figures(record.result))
    return []


def find_own(judged: Sequence[Judged], by_name: Mapping[str, Record]) -> dict[str, Record]:
    """Sweeps and tables that no claim is about: a user's own."""
    targets = {claim.target for claim, _ in judged}
    return {
        name: record
        for name, record in sorted(by_name.items())
        if isinstance(record, Summary) and record.run_keys and _find_first_target(name, targets) is None
    }


def name_pages(names: Iterable[str]) -> dict[str, str]:
    """The file of each sweep's own page; sweeps whose files would have one name get a hash in it.

    >>> name_pages(["sweep-a:b"])
    {'sweep-a:b': 'sweep-a-b.html'}
    """
    slugs = {name: get_slug(name) for name in names}
    counts = Counter(slugs.values())
    return {
        name: f"{slug}.html" if counts[slug] == 1 else f"{slug}-{sha256(name.encode()).hexdigest()[:8]}.html"
        for name, slug in slugs.items()
    }


def render_own(record: Record, *, version: str, made: str) -> str:
    """The page of one sweep or table that no claim is about."""
    shown = [NumberedFigure(figure, number) for number, figure in enumerate(draw(record), start=1)]
    title = record.title if isinstance(record, Summary) else record.name
    return TEMPLATES.get_template("own.html").render(
        title=title, record=record, shown=shown, version=version, made=made
    )


def _find_first_target(name: str, targets: Iterable[str]) -> int | None:
    """The index of the first target of this name, or else of the first that starts with it."""
    ranks = [(target != name, i) for i, target in enumerate(targets) if target == name or target.startswith(f"{name}-")]
    return min(ranks)[1] if ranks else None


def _find_anchor(target: str, groups: Sequence[Group], judged: Sequence[Judged]) -> str:
    """Of the group that shows the record, or of the first claim about it."""
    group = next((each for each in groups if target in (record.name for record in each.records)), None)
    return group.anchor if group else next(claim.id for claim, _ in judged if claim.target == target)


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
            group.records.append(by_name[claim.target])
    targets = [claim.target for claim, _ in judged]
    for name, record in sorted(by_name.items()):
        first = _find_first_target(name, targets)
        if isinstance(record, Summary) and record.run_keys and name not in drawn and first is not None:
            title = judged[first][0].group if targets[first] == name else record.title
            groups.setdefault(title, Group(title, first)).records.append(record)
    return sorted(groups.values(), key=lambda group: group.position)


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
        trained = self.diagnosis.trained_with.removeprefix("lean ")
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
        source=source, steps=diagnosis.steps, notes=diagnosis.notes, recorded=len(records), groups=groups
    )


def get_slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def mark_up(text: str) -> Markup:
    """Escape a text; what is between backticks is code, between double asterisks bold.

    A hyphen before a number becomes a minus, a label of the paper's source the number of its theorem, table or figure.

    >>> mark_up("1 < 2, says `mvngrad report`: **done**")
    Markup('1 &lt; 2, says <code>mvngrad report</code>: <b>done</b>')
    >>> mark_up("-0.02 at 1e-3, by thm:spike; `lr=-1`")
    Markup('−0.02 at 1e-3, by Theorem 3.3; <code>lr=-1</code>')
    """
    parts = str(escape(text)).split("`")
    for i in range(0, len(parts), 2):  # those between are code
        words = LABEL.sub(lambda match: NUMBERS[match[0]], parts[i])
        parts[i] = re.sub(r"(?<![\w.,)}\]-])-(?=\d)", "−", words)
    marked = re.sub(r"`([^`]*)`", r"<code>\1</code>", "`".join(parts))
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", marked))


def align_column(cells: Sequence[str]) -> list[str] | None:
    """Numbers padded on the right with spaces as wide as digits, so that their points are aligned; None for words.

    >>> [cell.replace("\u2007", "_").replace("\u2008", ".") for cell in align_column(["1.25", "**10**", "to come"])]
    ['1.25', '**10**.__', 'to come']
    """
    numbers = [NUMBER.fullmatch(cell) for cell in cells]
    if sum(number is not None for number in numbers) <= sum(cell not in NO_VALUE for cell in cells) / 2:
        return None
    longest = max(len(number["decimals"] or "") for number in numbers if number)

    def pad(number: re.Match[str]) -> str:
        decimals = len(number["decimals"] or "")
        return ("\u2008" if decimals == 0 < longest else "") + "\u2007" * (longest - decimals)

    return [
        cell + (pad(number) if number and not number["rest"] else "")
        for cell, number in zip(cells, numbers, strict=True)
    ]


def format_digits(value: float, digits: int | None) -> str:
    """With so many decimals; None for four significant digits."""
    if not math.isfinite(value):
        return "failed"
    return style.number(value, 4) if digits is None else f"{value:,.{digits}f}".replace("-", "−")


def make_strip_column(rows: Sequence[Estimate], name: str, digits: int | None) -> list[str]:
    """The values or references of a strip as text, aligned on their points."""
    numbers = [getattr(row, name) for row in rows]
    cells = ["" if value is None else format_digits(value, digits) for value in numbers]
    return align_column(cells) or cells


def make_columns(table: Table) -> list[tuple[str, bool, list[str]]]:
    """The columns: head, whether numbers are aligned, cells."""
    columns = []
    for head, cells in zip(table.head, zip(*table.rows, strict=True), strict=True):
        aligned = align_column(cells)
        columns.append((head, aligned is not None, aligned or list(cells)))
    return columns


def estimate_width(columns: Sequence[tuple[str, bool, list[str]]]) -> int:
    """About how many characters wide a table is at least: words may wrap, numbers do not.

    >>> estimate_width([("test accuracy", True, ["79.44 ± 0.29"]), ("state", False, ["torch, float32"])])
    23
    """
    return sum(
        2 + max(map(len, [*head.split(), *(part for cell in cells for part in ([cell] if aligned else cell.split()))]))
        for head, aligned, cells in columns
    )


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
TEMPLATES.filters |= {
    "code": mark_up,
    "lines": list_values,
    "slug": get_slug,
    "columns": make_columns,
    "width": estimate_width,
    "strip_column": make_strip_column,
}
TEMPLATES.tests["finite"] = math.isfinite
TEMPLATES.globals |= {
    "marks": style.MARKS,
    "mark": style.cell_mark,
    "light": style.LIGHT,
    "dark": style.DARK,
    "markers": MARKERS,
    "arxiv": ARXIV,
    "numbers": NUMBERS,
    "statuses": STATUSES,
    "names_for_ours": NAMES_FOR_OURS,
    "ours": OURS,
    "name_status": name_status,
}
