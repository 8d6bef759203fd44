"""Verdicts on Table 1."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from mvngrad.lab.recipes.cifar100 import SEEDS
from mvngrad.lab.report.claims import load
from mvngrad.lab.report.gather import CELLS
from mvngrad.lab.report.statistics import mean_and_deviation, welch
from mvngrad.lab.report.verdicts import NOT_RUN, Verdict, decided, judges

NEAR = 0.6
"""Points of accuracy."""
VARIANCE, SECOND_MOMENT = ("AdaBelief", "MVN-Grad"), ("Adam", "LaProp")


def column(result: dict[str, Any], batch: str, metric: str) -> tuple[dict[str, list[float]], Verdict | None]:
    """Values by optimizer; and the verdict at once, where runs are missing or have diverged."""
    cells = result["cells"][batch]
    values = {cell: [value for value in cells[cell][metric] if value is not None] for cell in CELLS}
    missing = {cell: len(SEEDS) - len(cells[cell]["seeds"]) for cell in CELLS}
    if any(missing.values()):
        left = ", ".join(f"{count} of {cell}" for cell, count in missing.items() if count)
        return values, Verdict(NOT_RUN, told(values), f"Runs to come: {left}.")
    diverged = {cell: cells[cell]["diverged"] for cell in CELLS if cells[cell]["diverged"]}
    if diverged:
        lost = ", ".join(f"{count} of {cell}" for cell, count in diverged.items())
        return values, decided(False, f"{told(values)}; diverged: {lost}")
    return values, None


def told(values: dict[str, list[float]]) -> str:
    return ", ".join(f"{cell} {mean_and_deviation(row)} (n = {len(row)})" for cell, row in values.items() if row)


def near(claim: str, result: dict[str, Any], batch: str, metric: str) -> Verdict:
    values, at_once = column(result, batch, metric)
    if at_once:
        return at_once
    expected = next(each.values for each in load() if each.id == claim)
    off = {cell: fmean(values[cell]) - expected[cell] for cell in CELLS}
    text = f"{told(values)}; off by " + ", ".join(f"{cell} {by:+.2f}" for cell, by in off.items())
    outside = [cell for cell, by in off.items() if abs(by) > NEAR]
    return decided(len(outside) < len(off), text, f"Outside {NEAR} points: {', '.join(outside)}." if outside else "")


@judges("cifar-test-128")
def _(result: dict[str, Any]) -> Verdict:
    return near("cifar-test-128", result, "128", "test_accuracy")


@judges("cifar-test-1024")
def _(result: dict[str, Any]) -> Verdict:
    return near("cifar-test-1024", result, "1024", "test_accuracy")


@judges("cifar-train-128")
def _(result: dict[str, Any]) -> Verdict:
    return near("cifar-train-128", result, "128", "train_accuracy")


@judges("cifar-train-1024")
def _(result: dict[str, Any]) -> Verdict:
    return near("cifar-train-1024", result, "1024", "train_accuracy")


def order(result: dict[str, Any], batch: str, judge: Callable[[Any, bool, str], Verdict]) -> Verdict:
    """`judge` is given the values, whether variance is above second moment, and the numbers in words."""
    values, at_once = column(result, batch, "test_accuracy")
    if at_once:
        return at_once
    p = [welch(values[low], values[high]) for low in SECOND_MOMENT for high in VARIANCE]
    gains = [fmean(values["MVN-Grad"]) - fmean(values[cell]) for cell in SECOND_MOMENT]
    above = ", ".join(f"{cell} by {gain:.2f}" for cell, gain in zip(SECOND_MOMENT, gains, strict=True))
    return judge(values, max(p) < 0.01, f"{told(values)}; MVN-Grad above {above}; largest p {max(p):.2g}")


@judges("cifar-order-128")
def _(result: dict[str, Any]) -> Verdict:
    def near(values: Any, above: bool, text: str) -> Verdict:
        return decided(above and abs(fmean(values["MVN-Grad"]) - fmean(values["AdaBelief"])) <= NEAR, text)

    return order(result, "128", near)


@judges("cifar-order-1024")
def _(result: dict[str, Any]) -> Verdict:
    def best(values: Any, above: bool, text: str) -> Verdict:
        lead, p = fmean(values["MVN-Grad"]) - fmean(values["AdaBelief"]), welch(values["AdaBelief"], values["MVN-Grad"])
        return decided(above, text, f"MVN-Grad less AdaBelief: {lead:+.2f}, p = {p:.2g}." if p >= 0.05 else "")

    return order(result, "1024", best)
