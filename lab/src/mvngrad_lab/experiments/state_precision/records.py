"""The table of state formats from the trainings that are done."""

from __future__ import annotations

from mvngrad_lab.report.records import Sources, TableResult
from mvngrad_lab.report.tables import MakeRow, Row, make_table
from mvngrad_lab.tasks.cifar100.recipe import STATES, state_precision


def collect(sources: Sources) -> list[TableResult]:
    """The runs with float32 state are of Table 1; without another one there is nothing to compare them with."""
    recipes = state_precision()
    if not any(recipe.key in sources.runs for recipe in recipes if recipe.state_dtype != "float32"):
        return []

    def fill(make_row: MakeRow) -> dict[str, dict[str, Row]]:
        return {"states": {state: make_row([r for r in recipes if r.state_dtype == state]) for state in STATES}}

    return make_table("state-precision", recipes, sources, ("test_accuracy", "state_bytes", "parameters"), fill)
