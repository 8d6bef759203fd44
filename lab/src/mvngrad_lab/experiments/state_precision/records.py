"""The table of state formats from the trainings that are done."""

from __future__ import annotations

import dataclasses

from mvngrad_lab.recipe import StateDtype
from mvngrad_lab.report.records import Sources, TableResult
from mvngrad_lab.report.tables import MakeRow, Row, make_table
from mvngrad_lab.tasks.cifar100.recipe import Cifar100, paper

SEEDS = (0, 1, 2)
STATES: tuple[StateDtype, ...] = ("float32", "bf16", "int8")


def state_precision() -> list[Cifar100]:
    """MVN-Grad at batch 1024 with its state in each precision; the runs in float32 are also runs of Table 1."""
    return [dataclasses.replace(paper("mvngrad", 1024, seed), state_dtype=state) for state in STATES for seed in SEEDS]


def collect(sources: Sources) -> list[TableResult]:
    """The runs with float32 state are of Table 1; without another one there is nothing to compare them with."""
    recipes = state_precision()
    if not any(recipe.key in sources.runs for recipe in recipes if recipe.state_dtype != "float32"):
        return []

    def fill(make_row: MakeRow) -> dict[str, dict[str, Row]]:
        return {"states": {state: make_row([r for r in recipes if r.state_dtype == state]) for state in STATES}}

    return make_table("state-precision", recipes, sources, ("test_accuracy", "state_bytes", "parameters"), fill)
