"""Table 1 from the trainings that are done."""

from __future__ import annotations

from mvngrad_lab.recipe import COUPLED
from mvngrad_lab.report.records import Sources, TableResult
from mvngrad_lab.report.tables import OPTIMIZERS, MakeRow, Row, make_table
from mvngrad_lab.tasks.cifar100.recipe import Cifar100, paper

SEEDS = (0, 1, 2)
MORE_SEEDS = (3, 4, 5)
"""Of the same settings, for the order of the cells."""
BATCH_SIZES = (128, 1024)


def table1() -> list[Cifar100]:
    """The 24 runs of Table 1, seeds innermost: consecutive runs share their compiled and captured step."""
    return [paper(optimizer, batch, seed) for batch in BATCH_SIZES for optimizer in COUPLED for seed in SEEDS]


def collect(sources: Sources) -> list[TableResult]:
    recipes = table1()
    seeds = (*SEEDS, *MORE_SEEDS)

    def fill(make_row: MakeRow) -> dict[str, dict[str, dict[str, Row]]]:
        return {
            "cells": {
                str(batch): {
                    cell: make_row([r for r in recipes if (r.batch_size, r.optimizer) == (batch, optimizer)])
                    for cell, optimizer in OPTIMIZERS.items()
                }
                for batch in BATCH_SIZES
            },
            "order": {
                str(batch): {
                    cell: make_row([paper(optimizer, batch, seed) for seed in seeds])  # type: ignore[arg-type]
                    for cell, optimizer in OPTIMIZERS.items()
                }
                for batch in BATCH_SIZES
            },
        }

    return make_table("table1", recipes, sources, ("test_accuracy", "train_accuracy", "curve"), fill)
