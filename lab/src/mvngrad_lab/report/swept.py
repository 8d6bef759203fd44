"""What an export of a sweep says of each optimizer: the values behind its boxes, tables and verdicts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from mvngrad_lab.report.exports import LOST, OPEN, SEEDS, number
from mvngrad_lab.report.tables import OPTIMIZERS

LABELS = {f"{name}{w}": f"{cell}{w.upper()}" for w in ("", "w") for cell, name in OPTIMIZERS.items()}
Row = dict[str, Any]


def label(row: Row) -> str:
    """The optimizer as the paper writes it, or as it calls itself; a recipe without one, by the recipe's name."""
    name = str(row.get("optimizer") or row["key"].rpartition("-")[0])
    return LABELS.get(name, name)


def configuration(row: Row) -> str:
    """Equal for runs of different optimizers with the same settings. Only the variance cells have an eps_s."""
    return _without(row, "optimizer", "eps_s")


def _without(row: Row, *fields: str) -> str:
    return json.dumps({name: value for name, value in row["settings"].items() if name not in fields}, sort_keys=True)


class Swept:
    """One export. A run that diverged or failed is worse than any that finished, and is never left out; where the grid
    has one that failed, that is for figures alone, because `judges.sweeps.undecidable` gives no verdict.
    """

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result
        self.sweep, self.metric, self.higher = result["sweep"], result["metric"], result["higher"]
        self.worst = -math.inf if self.higher else math.inf
        rows: list[Row] = result["runs"]
        self.swept = [row for row in rows if row["stage"] != SEEDS]
        self.repeated = [row for row in rows if row["stage"] == SEEDS]
        found = {label(row) for row in self.swept}
        known = [cell for cell in LABELS.values() if cell in found]
        self.optimizers = known + sorted(found - set(known))

    def rows(self, optimizer: str) -> list[Row]:
        """Of the sweep proper, done or not."""
        return [row for row in self.swept if label(row) == optimizer]

    def judged(self, optimizer: str) -> list[Row]:
        """Those of the grid alone, where it is known: what was tried beside it decides nothing."""
        grid = self.result["grid"]
        return [row for row in self.rows(optimizer) if grid is None or row["key"] in grid]

    def value(self, row: Row, metric: str) -> float | None:
        """None where the run is to come."""
        if row["status"] in OPEN:
            return None
        if row["status"] in LOST:
            return self.worst
        return float(row["value"] if metric == self.metric else row["metrics"][metric])

    def values(self, rows: Sequence[Row], metric: str) -> list[float]:
        return [value for row in rows if (value := self.value(row, metric)) is not None]

    def measured(self, metric: str) -> bool:
        """Whether every run that finished has it."""
        finished = [row for row in (*self.swept, *self.repeated) if row["status"] == "finished"]
        return metric == self.metric or (bool(finished) and all(number(row["metrics"].get(metric)) for row in finished))

    @property
    def train_metric(self) -> str | None:
        """The like of the sweep's metric on training data, if there is one."""
        _, _, kind = self.metric.partition("_")
        other = f"train_{kind}"
        return other if kind and other != self.metric and self.measured(other) else None

    def pairs(self, one: str, other: str, metric: str) -> list[tuple[float, float]]:
        """Values of two optimizers with the same settings."""
        ours, theirs = (
            {configuration(row): value for row in self.judged(name) if (value := self.value(row, metric)) is not None}
            for name in (one, other)
        )
        return [(ours[key], theirs[key]) for key in ours if key in theirs]

    @property
    def varied(self) -> list[str]:
        """The fields of which some optimizer tried more than one value."""
        fields = dict.fromkeys(
            name for row in self.swept for name in row["settings"] if name not in ("optimizer", "seed")
        )
        return [
            name
            for name in fields
            if any(len({json.dumps(r["settings"].get(name)) for r in self.rows(o)}) > 1 for o in self.optimizers)
        ]

    def chosen(self, optimizer: str) -> Row | None:
        keys = set(self.result["selected"].values())
        return next((row for row in self.rows(optimizer) if row["key"] in keys), None)

    def seeds(self, chosen: Row) -> list[Row]:
        """The selected run and those that repeat it."""
        return [chosen, *(row for row in self.repeated if _without(row, "seed") == _without(chosen, "seed"))]
