"""Rows of `gather`, each one setting over its seeds: the values that there are, and what tables and verdicts say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from mvngrad_lab.report.statistics import mean_and_deviation

Row = dict[str, Any]


def known(row: Row, name: str) -> list[float]:
    """Of the runs that have it: one that diverged has no loss, and not every machine has WikiText-103's text."""
    return [value for value in row[name] if value is not None]


def runs(row: Row) -> str:
    return f"{len(row['seeds'])}" + (f", {row['diverged']} diverged" if row["diverged"] else "")


def mean(row: Row, name: str, digits: int = 2) -> str:
    if not row["seeds"]:
        return "to come"
    values = known(row, name)
    return mean_and_deviation(values, digits) if values else "diverged" if row["diverged"] else "not measured"


def seconds(row: Row) -> str:
    times = known(row, "seconds")
    return f"{fmean(times):.0f}" if times else ""


def told(values: Mapping[str, Sequence[float]], digits: int = 2) -> str:
    return ", ".join(
        f"{name} {mean_and_deviation(found, digits)} (n = {len(found)})" for name, found in values.items() if found
    )


def counted(rows: Mapping[str, Row], what: str, link: str = "of") -> str:
    """How many runs of each are `to_come` or have `diverged`; empty where none are."""
    return ", ".join(f"{row[what]} {link} {name}" for name, row in rows.items() if row[what])
