"""Results and records at small sizes, as a store and a Monitor would give them. No torch."""

import dataclasses
import json
import math
import tempfile
from pathlib import Path

import numpy as np

from mvngrad_lab.arrays import to_json
from mvngrad_lab.experiments.convergence import run as convergence
from mvngrad_lab.experiments.separation import run as separation
from mvngrad_lab.experiments.spike import run as spike
from mvngrad_lab.experiments.sweeps.records import read_export
from mvngrad_lab.experiments.sweeps.sweeps import SWEEPS
from mvngrad_lab.experiments.variance_gap import run as variance_gap
from mvngrad_lab.report import Sources, collect
from mvngrad_lab.report.figures import style
from mvngrad_lab.report.verdicts import judge
from mvngrad_lab.store import FinishedRun
from mvngrad_lab.sweep import Outcome, Results


def mnist_curves():
    random, steps = np.random.default_rng(0), np.arange(0, 600, 20)
    cells = {}
    for name in style.MARKS:
        loss = 2 * np.exp(-steps / 200) * np.exp(0.1 * random.standard_normal((3, len(steps))))
        loss[0, -1] = np.nan  # a run that did not stay finite
        cells[name] = {
            "steps": steps,
            "loss": loss,
            "spikes": [0, 2, 1],
            "final_loss": loss[:, -3:].mean(axis=1),
            "test_accuracy": [97.0, 97.5, 98.0],
        }
    setting = {"batch": 128, "lr": 1e-3, "betas": (0.9, 0.95), "steps": 600, "cells": cells}
    return {"data": "a sample", "seeds": [0, 1, 2], "panels": {"batch 128": setting}, "spike_rule": "a rule"}


def mnist_gap():
    before = np.linspace(0.3, 0.2, 12).reshape(3, 4)
    measured = {"before": before, "after": 0.9 * before, "gap": 0.1 * before, "error": 0.01 * before}
    trained = {"AdaBelief": measured, "MVN-Grad": measured | {"gap": -0.1 * before}}
    return {"data": "a sample", "K": 128, "seeds": [0, 1, 2], "steps": [1, 10, 100, 1000], "trained_with": trained}


def cifar_gap():
    before = np.linspace(0.3, 0.2, 4)
    measured = {"before": before, "after": 0.9 * before, "gap": 0.1 * before, "error": 0.01 * before}
    trained = {"AdaBelief": measured, "MVN-Grad": measured | {"gap": -0.1 * before}}
    return {"data": "a sample", "K": 128, "epochs": [1, 5, 20, 50], "trained_with": trained}


def state_precision():
    row = {"test_accuracy": [79.5, None], "seconds": [9.0, 9.0], "state_bytes": [None, 36], "parameters": [3, 3]}
    states = {state: {**row, "seeds": [0, 1], "diverged": 1} for state in ("float32", "bf16", "int8")}
    return {"states": states, "done": 6, "of": 9, "data": "a sample"}


def table2():
    """One run is diverged, one is to come, and the official text was not there."""
    done = {
        "validation_loss": [4.1, None],
        "validation_perplexity": [60.3, None],
        "wikitext103_loss": [None, None],
        "wikitext103_perplexity": [None, None],
        "train_loss": [4.0, None],
        "loss_spikes": [[120, 250], None],
        "norm_spikes": [[], None],
        "nonfinite_steps": [1, None],
        "curve": [[[25, 9.0], [50, 7.5], [75, 6.0]], None],
        "seconds": [100.0, 20.0],
        "seeds": [0, 1],
        "diverged": 1,
    }
    one = {name: value[:1] if isinstance(value, list) else 0 for name, value in done.items()}
    none = {name: [] if isinstance(value, list) else 0 for name, value in done.items()}
    return {
        "cells": {cell: none if cell == "LaProp" else done for cell in style.MARKS},
        "monitored": [
            {"optimizer": "LaProp", "model": "30M", "steps": [1100, 3000]}
            | {"signal": ["cannot tell", None], "sign collapse": ["absent", 0.01], "epsilon floor": ["active", 0.2]}
            | {"normalizer": ["cannot tell", None], "order": ["either", None]}
        ],
        "rates": {cell: {"0.0003": one, "0.001": one, "0.003": one, "0.01": none} for cell in style.MARKS},
        "best_rate": dict.fromkeys(style.MARKS),
        "tuned": dict.fromkeys(style.MARKS, none),
        "tuned_rate": dict.fromkeys(style.MARKS, "0.003"),
        "large": {f"{cell}W": none if cell == "LaProp" else one for cell in style.MARKS},
        "done": 9,
        "of": 44,
        "data": "a sample",
    }


def sweep(change=lambda optimizer, settings: 0.0, name="mnist", stages=2, **notes):
    """An export as the engine writes it, of the grid that a sweep of ours has; `change` is added to each value.

    Where `change` is a word, the run has that status and no value.
    """
    made, outcomes, rows = SWEEPS[name](), {}, []
    kind = made.metric.partition("_")[2]

    def add(recipe, stage, value, seed=0.0):
        status, value = (value, None) if isinstance(value, str) else ("finished", value + seed)
        metrics = (
            {made.metric: value, f"test_{kind}": value, f"train_{kind}": value - 0.05} if value is not None else {}
        )
        rows.append(make_row(recipe, stage, len(rows), status, value, metrics))
        return value

    for number, stage in enumerate(made.stages[:stages], start=1):
        recipes = stage(Results(list(outcomes.values()), made.higher)) if callable(stage) else stage
        for recipe in recipes:
            if recipe.key not in outcomes:
                shift = change(recipe.optimizer, recipe.settings)
                base = 0.1 + abs(math.log10(recipe.lr / 1e-3)) / 10 + recipe.beta1 / 100 + recipe.beta2 / 100
                value = add(recipe, str(number), shift if isinstance(shift, str) else base + shift)
                outcomes[recipe.key] = Outcome(recipe, value)
    best = Results(list(outcomes.values()), made.higher).best
    for outcome in best.values():
        for seed in (1, 2):
            add(dataclasses.replace(outcome.recipe, seed=seed), "seeds", outcome.value, seed / 100)
    heading = {"sweep": name, "made": "2026-01-02T00:00:00+00:00", "metric": made.metric, "higher": made.higher}
    code = {"test_because": made.test_because, "commit": "0123456789ab", "mvngrad": "0.1", "occupied": 0.9}
    selected = {optimizer: outcome.recipe.key for optimizer, outcome in best.items()}
    return {**heading, **code, "selected": selected, "runs": rows, **notes}


def by(**changes):
    """A change of an optimizer's values in a sweep, or of its status."""
    return lambda optimizer, settings: changes.get(optimizer, 0.0)


def at_large_rates(status, *optimizers):
    return lambda optimizer, settings: status if settings["lr"] == 1e-2 and optimizer in optimizers else 0.0


def make_row(recipe, stage, number, status, value, metrics):
    done = status in ("finished", "diverged", "raised")
    worker = {
        "worker": f"host-{number % 2}",
        "commit": "0123456789ab",
        "mvngrad": "0.1",
        "torch": "2",
        "python": "3",
        "function": None,
    }
    reason = {"diverged": "diverged at step 3", "raised": "ZeroDivisionError: cursed"}.get(status)
    return {
        "key": recipe.key,
        "stage": stage,
        "optimizer": recipe.optimizer,
        "status": status,
        "value": value,
        "settings": recipe.settings,
        "metrics": metrics | ({"reason": reason} if reason else {}),
        "seconds": 7.5 if done else None,
        "reason": reason,
        **(worker if done else dict.fromkeys(worker)),
    }


def sweep_run():
    """As the report reads it: some runs are lost, and some are worse than others by far."""

    def change(optimizer, settings):
        if settings["lr"] == 1e-2 and optimizer in ("adam", "laprop"):
            return "raised" if settings["beta1"] == 0.9 else "diverged"
        return 3.0 if settings["lr"] == 1e-2 else {"adam": 0.02, "mvngrad": -0.01}.get(optimizer, 0.0)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sweep-mnist.json"
        path.write_text(json.dumps(sweep(change)))
        return read_export(path)


def runs():
    """One of each target, at small sizes, as a store would give them."""
    small = {
        convergence: convergence.Rates(longest=300, runs=4, points=4),
        separation: separation.Dimensions(largest=100, steps=40, horizon=100),
        spike: spike.Spikes(per_decade=4, trains_per_decade=1),
        variance_gap: variance_gap.Gap(points=21, samples=20_000),
    }
    results = {
        "cifar-gap": cifar_gap(),
        "memory": {"state": {"AdamW": 2.0, "MVN-GradW": 3.0}, "smaller": {"lean": 2.0}},
        "mnist-curves": mnist_curves(),
        "mnist-gap": mnist_gap(),
        "state-precision": state_precision(),
        "table2": table2(),
        **{recipe.name: module.run(recipe, None, lambda share: None) for module, recipe in small.items()},
    }
    environment = {"device": "a processor", "torch": "2.13.0", "commit": "0123456789ab"}
    made = [
        FinishedRun(
            f"{name}-0123456789ab", name, {"size": 3, "data": {"name": "small"}}, environment, to_json(**result)
        )
        for name, result in results.items()
    ]
    return [*made, sweep_run()]


def add_tables(runs, *folders):
    """The runs, and the tables that they make."""
    warnings = []
    collected = collect(Sources(folders, {run.key: run for run in runs}, warnings.append))
    records = [*runs, *(record for record in collected if hasattr(record, "run_keys"))]
    assert not warnings
    return records


def judge_by_claim(run):
    return {claim.id: verdict for claim, verdict in judge([run])}


def get_verdicts(runs):
    """By claim, from runs and the tables that they make."""
    return {claim.id: verdict for claim, verdict in judge(add_tables(runs))}


def get_table(runs, name):
    return next(record for record in add_tables(runs) if record.name == name)


def records():
    """A Monitor's, of two groups; the second trained with LaProp, which keeps no m."""

    def entry(step, group):
        has_m = group == 0
        levels = dict(zip(("0.05", "0.25", "0.5", "0.75", "0.95"), np.logspace(-2, 0, 5) + step / 1e4, strict=True))
        spike = {"step": 420, "median": 1.0, "multiple": 30.0, "steps": 1, "ended": "recovered", "recovery_steps": 4}
        return {
            "group": group,
            "cell": "MVN-Grad" if has_m else "LaProp",
            "lr": 1e-3,
            "beta1": 0.9,
            "beta2": 0.99,
            "eps": 1e-8,
            "floor": 1e-7,
            "t": step,
            "mean_noise": 0.23,
            "m": "kept" if has_m else None,
            "coordinates": 1000,
            "sampled": 1000,
            "dead": 0.1,
            "ratio": levels if has_m else None,
            "snr": {name: 20 * value for name, value in levels.items()} if has_m else None,
            "sign_collapse": 0.3,
            "sign_collapse_is": "implied" if has_m else "measured",
            "epsilon_floor": 0.0,
            "update": levels | {"0.05": 0.0},
            "gradient_norm": {"median": 1.0, "max": 2.0},
            "gradients_not_finite": 0,
            "spikes": [spike | {"update_during": 2.0, "update_after": 1.0}] if step == 450 else [],
        }

    steps = range(50, 1050, 50)
    made = [{"step": step, "optimizer": "MVNGrad", "groups": [entry(step, 0), entry(step, 1)]} for step in steps]
    return to_json(records=made)["records"]
