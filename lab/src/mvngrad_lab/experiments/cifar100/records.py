"""Table 1: 24 trainings, each stored as a run of its own, and the table of those that are done."""

from __future__ import annotations

from pathlib import Path

from mvngrad_lab.experiments import OnEvent, Tick
from mvngrad_lab.recipe import COUPLED
from mvngrad_lab.report import MakeRow, Row, Sources, TableResult, make_table
from mvngrad_lab.report.tables import OPTIMIZERS
from mvngrad_lab.tasks.cifar100.recipe import Cifar100, paper

SEEDS = (0, 1, 2)
MORE_SEEDS = (3, 4, 5)
"""Of the same settings, for the order of the cells."""
BATCH_SIZES = (128, 1024)


def table1() -> list[Cifar100]:
    """The 24 runs of Table 1, seeds innermost: consecutive runs share their compiled and captured step."""
    return [paper(optimizer, batch, seed) for batch in BATCH_SIZES for optimizer in COUPLED for seed in SEEDS]


def train_all(root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
    from mvngrad_lab.training.train import require_gpu, train_missing

    require_gpu("table1", "trains 24 networks for 200 epochs each")
    train_missing(table1(), root, data, tick, on_event)


def collect(sources: Sources) -> list[TableResult]:
    def fill(make_row: MakeRow) -> dict[str, dict[str, dict[str, Row]]]:
        return {
            name: {
                str(batch): {
                    cell: make_row([paper(optimizer, batch, seed) for seed in seeds])  # type: ignore[arg-type]
                    for cell, optimizer in OPTIMIZERS.items()
                }
                for batch in BATCH_SIZES
            }
            for name, seeds in (("cells", SEEDS), ("order", (*SEEDS, *MORE_SEEDS)))
        }

    return make_table("table1", table1(), sources, ("test_accuracy", "train_accuracy", "curve"), fill)
