"""Table 2 on the stand-in: its trainings, the tables of those that are done, and the benchmark of training steps."""

from __future__ import annotations

import dataclasses
from itertools import chain
from pathlib import Path
from typing import Any

from mvngrad.diagnostics import Diagnosis
from mvngrad_lab.errors import MissingFile
from mvngrad_lab.experiments import OnEvent, Tick
from mvngrad_lab.recipe import COUPLED, DECOUPLED
from mvngrad_lab.report import BenchmarkFile, MakeRow, Row, Sources, TableResult, make_table
from mvngrad_lab.report.tables import OPTIMIZERS
from mvngrad_lab.tasks.language.recipe import STAND_IN, Language, OpenWebText, WikiText103, openwebtext, wikitext103

METRICS = (
    "validation_loss", "wikitext103_loss", "train_loss", "loss_spikes", "norm_spikes", "nonfinite_steps", "curve",
)  # fmt: skip
SEEDS = (0, 1, 2)
"""Of our runs; the paper has four for WikiText-103."""
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
TUNED: dict[str, float] = dict.fromkeys(COUPLED, 3e-3)
"""The rate of RATES with the lowest validation loss of each after 1,000 steps on the stand-in."""


def table2() -> list[WikiText103]:
    """tab:GPT-Wiki in 3,000 steps on the stand-in, seeds innermost."""
    return [
        dataclasses.replace(wikitext103(optimizer, seed), text=STAND_IN, steps=3_000, warmup_steps=200, eval_every=5)
        for optimizer in COUPLED
        for seed in SEEDS
    ]


def rates() -> list[WikiText103]:
    """Lower and higher rates than the paper's 1e-3 on the stand-in."""
    return [
        dataclasses.replace(wikitext103(optimizer), text=STAND_IN, steps=1_000, warmup_steps=200, lr=lr)
        for optimizer in COUPLED
        for lr in RATES
    ]


def tuned() -> list[WikiText103]:
    """`table2` with the best rate of each optimizer in `rates`."""
    return [dataclasses.replace(recipe, lr=TUNED[recipe.optimizer]) for recipe in table2()]


def official() -> dict[str, list[WikiText103 | OpenWebText]]:
    """Table 2 as the paper has it: four seeds on WikiText-103, three on OpenWebText."""
    return {
        "wikitext103": [wikitext103(optimizer, seed) for optimizer in COUPLED for seed in range(4)],
        "openwebtext": [openwebtext(optimizer, seed) for optimizer in DECOUPLED for seed in range(3)],
    }


def shortened() -> list[OpenWebText]:
    """tab:GPT-Open-loss in 120 steps on the stand-in: too few to rank optimizers, enough to see each train at full
    size. Micro-batches of 96 are faster on a GPU than of 12.
    """
    return [
        dataclasses.replace(
            openwebtext(optimizer),
            text=STAND_IN,
            micro_batch_size=96,
            steps=120,
            warmup_steps=12,
            epoch_steps=10,
            eval_every=4,
        )
        for optimizer in DECOUPLED
    ]


def on_stand_in() -> list[WikiText103 | OpenWebText]:
    """All our runs: at the paper's rate, at others, at the best of these, and at full size."""
    return [*table2(), *rates(), *tuned(), *shortened()]


def train_all(root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
    """Train what is not stored, with a Monitor for seed 0 of the runs that are compared."""
    from mvngrad_lab.tasks.language.data import tokens
    from mvngrad_lab.training.train import SMALL_TEXT, require_gpu, train_missing

    require_gpu("table2", "trains 40 networks of 30M parameters and 4 of 124M", SMALL_TEXT)
    if tokens.find_tokens(STAND_IN, data) is None:
        raise MissingFile(
            f"table2 trains on the tokens of {STAND_IN}, which are not in data={data}: make them with "
            f"`mvngrad data get {STAND_IN} --data FOLDER`, where FOLDER has the text, and pass the same FOLDER here"
        )
    watched = {recipe.key for recipe in (*table2(), *shortened()) if recipe.seed == 0}
    train_missing(on_stand_in(), root, data, tick, on_event, is_monitored=lambda recipe: recipe.key in watched)


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
        "optimizer": group.trained_with + ("W" if recipe.optimizer in DECOUPLED else ""),
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
