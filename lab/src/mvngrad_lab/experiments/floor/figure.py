"""Accuracy against the learning rate, with a floor under the divisor and without."""

from __future__ import annotations

from typing import Any

from mvngrad_lab.experiments.floor.arms import GRID_ARMS, SGD_SCALE
from mvngrad_lab.report.figures.style import BOUND, MARKS, Mark, draw_curve, make_axes, number
from mvngrad_lab.report.figures.svg import Figure, Panel, Table, make_panel
from mvngrad_lab.report.tables import OPTIMIZERS

NAMES = {optimizer: name for name, optimizer in OPTIMIZERS.items()}
SGD = BOUND.with_label("SGD at 1,000 times the rate")
TITLES = {"floor": "A floor of 10⁻³ under the divisor", "none": "No floor"}


def draw(result: dict[str, Any]) -> list[Figure]:
    arms = result["arms"]
    caption = (
        f"ResNet-18 on CIFAR-100, batch 1024, 30 epochs, seed 0: the best of four pairs of betas at each rate. "
        f"{result['done']} of {result['of']} runs are done; nothing is judged before all are. The floor is ε for Adam "
        "and LaProp and √(ε_s/(1−β₂)) for AdaBelief and MVN-Grad, where it is 3.2×10⁻³ at β₂ = 0.999. The paper's "
        "settings are Adam and LaProp without a floor against AdaBelief and MVN-Grad with one."
    )
    panels = tuple(_panel(arms, kind) for kind in TITLES)
    return [Figure("Variance or epsilon", caption, panels, (*MARKS.values(), SGD), _table(arms))]


def _panel(arms: dict[str, list[dict[str, Any]]], kind: str) -> Panel:
    at = make_axes("learning rate", "test accuracy, %", log="x")
    parts = []
    for arm, cell in GRID_ARMS.items():
        if arm.endswith(f"-{kind}") and arms[arm]:
            _draw_best(at, MARKS[NAMES[cell]], arms[arm], 1.0)
            parts.append(f"{NAMES[cell]} {_best(arms[arm])['test_accuracy']:.2f}")
    if kind == "floor" and arms["sgd"]:
        _draw_best(at, SGD, arms["sgd"], 1 / SGD_SCALE)
        parts.append(f"SGD {_best(arms['sgd'])['test_accuracy']:.2f}")
    at.set_ylim(60, 76)
    return make_panel(at, TITLES[kind], f"Best: {', '.join(parts)}.")


def _draw_best(at: Any, mark: Mark, rows: list[dict[str, Any]], scale: float) -> None:
    rates = sorted({row["lr"] for row in rows})
    best = [max(row["test_accuracy"] for row in rows if row["lr"] == lr) for lr in rates]
    draw_curve(at, mark, [lr * scale for lr in rates], best)


def _best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return max(rows, key=lambda row: row["test_accuracy"])


def _table(arms: dict[str, list[dict[str, Any]]]) -> Table:
    rows = []
    for arm in (*GRID_ARMS, "sgd"):
        if not arms[arm]:
            continue
        best = _best(arms[arm])
        name = "SGD" if arm == "sgd" else NAMES[GRID_ARMS[arm]]
        betas = f"{best['beta1']:g}" if arm == "sgd" else f"{best['beta1']:g}, {best['beta2']:g}"
        floor = "" if arm == "sgd" else "yes" if arm.endswith("-floor") else "no"
        rows.append((name, floor, f"{best['test_accuracy']:.2f}", number(best["lr"]), betas, f"{len(arms[arm])} of 16"))
    head = ("optimizer", "floor", "best test accuracy", "learning rate", "betas or momentum", "runs done")
    return Table("Best of each arm so far", head, tuple(rows))


FIGURES = {"floor": draw}
