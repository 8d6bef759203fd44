"""Table 2 on the stand-in from the trainings that are done, and the benchmark of training steps."""

from __future__ import annotations

from itertools import chain
from typing import Any

from mvngrad.diagnostics.diagnosis import Diagnosis
from mvngrad_lab.experiments.language.recipes import (
    RATES,
    TUNED,
    official,
    on_stand_in,
    rates,
    shortened,
    table2,
    tuned,
)
from mvngrad_lab.recipe import DECOUPLED
from mvngrad_lab.report.records import BenchmarkFile, Sources, TableResult
from mvngrad_lab.report.tables import OPTIMIZERS, MakeRow, Row, make_table
from mvngrad_lab.tasks.language.recipe import Language

METRICS = (
    "validation_loss", "wikitext103_loss", "train_loss", "loss_spikes", "norm_spikes", "nonfinite_steps", "curve",
)  # fmt: skip


def collect(sources: Sources) -> list[TableResult | BenchmarkFile]:
    types = {"environment": dict, "throughput": dict, "overhead": dict, "data": str}

    def fill(make_row: MakeRow) -> dict[str, Any]:
        return _fill(make_row, sources)

    return [
        *make_table("table2", on_stand_in(), sources, METRICS, fill),
        *make_table("table2-official", list(chain(*official().values())), sources, METRICS, _fill_official),
        *sources.read_benchmark("language-cuda.json", "throughput-gpt2", types),
    ]


def _fill(make_row: MakeRow, sources: Sources) -> dict[str, Any]:
    """The 30M runs, the learning rates tried, the runs at the best of these, the 124M runs, and Monitors' records."""
    tried = {
        cell: {f"{lr:g}": make_row([r for r in rates() if (r.optimizer, r.lr) == (optimizer, lr)]) for lr in RATES}
        for cell, optimizer in OPTIMIZERS.items()
    }
    monitored = [(recipe, sources.diagnose(recipe.key)) for recipe in (*table2(), *shortened())]
    return {
        "cells": {cell: make_row([r for r in table2() if r.optimizer == name]) for cell, name in OPTIMIZERS.items()},
        "tuned": {cell: make_row([r for r in tuned() if r.optimizer == name]) for cell, name in OPTIMIZERS.items()},
        "large": {
            f"{cell}W": make_row([r for r in shortened() if r.optimizer == f"{name}w"])
            for cell, name in OPTIMIZERS.items()
        },
        "monitored": [_summarize(recipe, diagnosis) for recipe, diagnosis in monitored if diagnosis is not None],
        "rates": tried,
        "best_rate": {cell: find_best_rate(rows) for cell, rows in tried.items()},
        "tuned_rate": {cell: f"{TUNED[name]:g}" for cell, name in OPTIMIZERS.items()},
    }


def _fill_official(make_row: MakeRow) -> dict[str, Any]:
    return {
        text: {
            f"{cell}{suffix}": make_row([r for r in official()[text] if r.optimizer == f"{name}{suffix.lower()}"])
            for cell, name in OPTIMIZERS.items()
        }
        for text, suffix in (("wikitext103", ""), ("openwebtext", "W"))
    }


def _summarize(recipe: Language, diagnosis: Diagnosis) -> dict[str, Any]:
    """Of the first parameter group, which has the matrices."""
    group = diagnosis.groups[0]
    return {
        "optimizer": group.trained_with + "W" * (recipe.optimizer in DECOUPLED),
        "model": recipe.model,
        "steps": diagnosis.steps,
        **{each.topic: [each.verdict, each.numbers.get("snr", each.numbers.get("share"))] for each in group.statements},
    }


def find_best_rate(tried: dict[str, Row]) -> str | None:
    """The learning rate with the lowest validation loss; None while one is to come. A diverged run never wins."""
    if not all(row["seeds"] for row in tried.values()):
        return None
    losses = {lr: row["validation_loss"][0] for lr, row in tried.items() if not row["diverged"]}
    return min(losses, key=losses.__getitem__, default=None)
