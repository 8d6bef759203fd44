"""Verdicts on tables of the paper, and their cells as text: see `mvngrad_lab.report.make_table`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from mvngrad.rule import CELLS
from mvngrad_lab.recipe import RULES
from mvngrad_lab.report import Row
from mvngrad_lab.report.statistics import (
    LEVEL,
    adjust_by_holm,
    mean_and_deviation,
    mean_interval,
    p_deviations_differ,
    p_farther_than,
)  # fmt: skip
from mvngrad_lab.report.verdicts import NOT_REPRODUCED, NOT_RUN, UNDECIDED, Estimate, Strip, Verdict, decide

OPTIMIZERS = {rule.name: name for name, rule in sorted(RULES.items(), key=lambda named: named[1].centered)}
"""Name in the paper -> name in recipes, in the order of the paper's tables."""
VARIANCE = tuple(rule.name for rule in CELLS if rule.centered)
SECOND_MOMENT = tuple(rule.name for rule in CELLS if not rule.centered)

LEADING = re.compile(r"[−-]?\d+(\.\d+)?")


def get_values(row: Row, metric: str) -> list[float]:
    """Of the runs that have the metric: one that diverged has no loss, and some data sets may be missing."""
    return [value for value in row[metric] if value is not None]


def check_rows(rows: Mapping[str, Row], metric: str, link: str = "of") -> tuple[dict[str, list[float]], Verdict | None]:
    """The values by name; and the verdict, if runs are missing or have diverged."""
    values = {name: get_values(row, metric) for name, row in rows.items()}
    if left := describe_counts(rows, "to_come", link):
        return values, Verdict(NOT_RUN, describe(values), f"Runs to come: {left}.")
    if lost := describe_counts(rows, "diverged", link):
        return values, Verdict(UNDECIDED, f"{describe(values)}; diverged: {lost}")
    return values, None


def describe_counts(rows: Mapping[str, Row], what: str, link: str = "of") -> str:
    """How many runs of each are `to_come` or have `diverged`; an empty string if none."""
    return ", ".join(f"{row[what]} {link} {name}" for name, row in rows.items() if row[what])


def describe(values: Mapping[str, Sequence[float]], digits: int = 2) -> str:
    return ", ".join(f"{name} {mean_and_deviation(of, digits)} (n = {len(of)})" for name, of in values.items() if of)


def make_mean_strip(
    what: str, values: Mapping[str, Sequence[float]], paper: Mapping[str, float] | None = None, digits: int | None = 2
) -> Strip:
    """Means over seeds with their 95% intervals, and the paper's numbers."""
    rows = tuple(
        Estimate(name, fmean(of), mean_interval(of), len(of), (paper or {}).get(name))
        for name, of in values.items()
        if of
    )
    return Strip(f"{what}, mean over seeds and 95% interval", rows, digits)


def judge_means(
    what: str, values: Mapping[str, Sequence[float]], paper: Mapping[str, float], margin: float, digits: int = 2
) -> Verdict:
    """Whether means are within a margin of the paper's: all of them, or with a caveat all but one.

    Otherwise not reproduced if two or more are farther than that by a t-test at LEVEL, after Holm's correction, and
    undecided if not.
    """
    strip = make_mean_strip(what, values, paper, digits)
    outside = [name for name, row in values.items() if abs(fmean(row) - paper[name]) > margin]
    if len(outside) <= 1:
        return decide(True, "", f"Outside {margin:g}: {outside[0]}." if outside else "", strip)
    p_values = adjust_by_holm([p_farther_than(row, paper[name], margin) for name, row in values.items()])
    clear = sum(p < LEVEL for p in p_values) >= 2
    note = "" if clear else f"Outside {margin:g}, but not beyond doubt: {', '.join(outside)}."
    text = f"test for two or more means outside the margin: p = {sorted(p_values)[1]:.2g} (Holm)"
    return Verdict(NOT_REPRODUCED if clear else UNDECIDED, text, note, strip)


def judge_deviations(values: Mapping[str, Sequence[float]], paper: Mapping[str, float], size: int) -> Verdict:
    """Whether standard deviations over seeds are within a factor of 2 of the paper's, which are of `size` seeds.

    Otherwise not reproduced if one differs by an F test at LEVEL, after Holm's correction, and undecided if not.
    """
    spread = {name: stdev(row) for name, row in values.items()}
    rows = tuple(Estimate(name, value, None, len(values[name]), paper[name]) for name, value in spread.items())
    strip = Strip("standard deviation over seeds", rows, None)
    if all(0.5 <= value / paper[name] <= 2 for name, value in spread.items()):
        return decide(True, "", strip=strip)
    p_values = adjust_by_holm([p_deviations_differ(row, paper[name], size) for name, row in values.items()])
    text = f"tests for different deviations: smallest p = {min(p_values):.2g} (Holm)"
    return Verdict(NOT_REPRODUCED if min(p_values) < LEVEL else UNDECIDED, text, strip=strip)


# Cells of a printed table


def bold_best(cells: Sequence[str], higher: bool = True) -> list[str]:
    """The cells, with asterisks around those whose leading number is best.

    >>> bold_best(["79.25 ± 0.15", "79.44 ± 0.29", "to come"])
    ['79.25 ± 0.15', '**79.44 ± 0.29**', 'to come']
    """
    numbers = [float(found[0].replace("−", "-")) if (found := LEADING.match(cell)) else None for cell in cells]
    best = (max if higher else min)((number for number in numbers if number is not None), default=None)
    return [
        f"**{cell}**" if number is not None and number == best else cell
        for cell, number in zip(cells, numbers, strict=True)
    ]


def format_count(row: Row) -> str:
    return f"{len(row['seeds'])}" + (f", {row['diverged']} diverged" if row["diverged"] else "")


def format_mean(row: Row, metric: str, digits: int = 2) -> str:
    if not row["seeds"]:
        return "to come"
    values = get_values(row, metric)
    return mean_and_deviation(values, digits) if values else "diverged" if row["diverged"] else "not measured"


def format_seconds(row: Row) -> str:
    times = get_values(row, "seconds")
    return f"{fmean(times):.0f}" if times else ""
