"""What a `Monitor` recorded, as a page: the regime of each parameter group in plain words, with figures over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mvngrad.diagnostics.diagnosis import Diagnosis, GroupDiagnosis
from mvngrad.diagnostics.sinks import Record
from mvngrad_lab.report.figures import monitor
from mvngrad_lab.report.figures.style import CELLS
from mvngrad_lab.report.figures.svg import Figure
from mvngrad_lab.report.template import ENVIRONMENT


@dataclass(frozen=True)
class Shown:
    """One group of the page."""

    diagnosis: GroupDiagnosis
    last: Record
    """Its entry in the last record it is in."""
    figures: list[Figure]

    @property
    def notes(self) -> dict[str, str]:
        """Cell -> what is said of it in the table of the four."""
        picked = self.diagnosis.cell
        notes = dict.fromkeys(picked.split(" or ") if picked else (), "what the theory picks")
        trained = self.diagnosis.trained_with
        notes[trained] = f"trained with it, {notes[trained]}" if trained in notes else "trained with it"
        return {name: note for name, note in notes.items() if name in CELLS}

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in self.last.items() if isinstance(value, (int, float, str))}


def render(records: Sequence[Record], diagnosis: Diagnosis, *, source: str) -> str:
    """The whole page; `source` says where the records are from."""
    groups = []
    for group in diagnosis.groups:
        entries = [
            (record["step"], entry) for record in records for entry in record["groups"] if entry["group"] == group.group
        ]
        groups.append(Shown(group, entries[-1][1], monitor.draw(f"{source} {group.group}", entries)))
    return ENVIRONMENT.get_template("diagnosis.html").render(
        source=source, steps=diagnosis.steps, recorded=len(records), groups=groups
    )
