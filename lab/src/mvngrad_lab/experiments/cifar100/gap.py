"""fig:thm_vgap_ada_prop_cifar: the variance gap at frozen states of CIFAR-100 trainings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mvngrad.diagnostics import VarianceGap, variance_gap
from mvngrad_lab.errors import NotPossible
from mvngrad_lab.experiments import OnEvent, Tick
from mvngrad_lab.recipe import RULES, Recipe, TrainingRecipe, get_cell
from mvngrad_lab.store import FinishedRun, MetricsFile, RunFolder, read_rows, timestamp
from mvngrad_lab.store.environment import get_changes, get_environment
from mvngrad_lab.tasks.cifar100.recipe import paper
from mvngrad_lab.training.step import TrainingStep
from mvngrad_lab.training.task import StepPlan
from mvngrad_lab.training.train import require_gpu, stored_keys, train

OTHER_BATCHES = 10_000
"""Added to the seed for the batches at a frozen state, so that they differ from those of the training."""
FIELDS = ("before", "after", "gap", "error")
"""The fields of a `VarianceGap` that are stored."""


@dataclasses.dataclass(frozen=True)
class GapRecipe(Recipe):
    """The paper gives neither the batch size nor the checkpoints of its figure; ours are of two runs of Table 1."""

    name: ClassVar[str] = "cifar-gap"
    trainings: tuple[TrainingRecipe, ...] = (paper("adabelief", 128, seed=1), paper("mvngrad", 128, seed=1))
    K: int = 128
    epochs: tuple[int, ...] = (1, 5, 20, 50, 100, 150, 199)
    """The state is frozen after these. Not after the last one, when lr is 0."""


def measure_gap(training: TrainingRecipe, training_step: TrainingStep, epoch: int, K: int) -> VarianceGap:
    """The gap at the state of `training_step`, over new batches, augmented and mixed as those of the training.

    The model is in training mode, as when the optimizer gets its gradients. Nothing is compiled or captured: gradients
    come from torch.autograd.grad, and `.grad`, which a captured step writes, does not change.
    """
    task, other_seed = training_step.task, dataclasses.replace(training, seed=OTHER_BATCHES + training.seed)

    def batches() -> Iterator[StepPlan]:
        for later in count(epoch, training.epochs):
            plan = {name: value.to(task.device) for name, value in task.plan_epoch(other_seed, later).items()}
            for index in range(task.steps_per_epoch - (task.last_batch_size > 0)):
                yield {name: value[index] for name, value in plan.items()}

    def loss(plan: StepPlan) -> Tensor:
        with torch.autocast(task.device.type, torch.bfloat16, enabled=training_step.autocast):
            return task.loss(training_step.model, task.make_batch(plan))

    training_step.model.train()
    return variance_gap(training_step.optimizer, loss, batches(), K, model=training_step.model)


def measure(recipe: GapRecipe, root: Path, data: Path | None, tick: Tick, **options: Any) -> FinishedRun:
    """Train and measure after the recipe's epochs; `options` are those of `train`.

    It trains in the folder of the measurement, because finished runs of the store have no checkpoints left. Measuring
    does not change a training, so it is moved to the store if the store has no such run yet.
    """
    folder = RunFolder(recipe, root)
    if (finished := folder.run) is not None:
        return finished
    folder.start(environment_now := {**get_environment(str(options["device"])), "made": timestamp()}, get_changes())
    rows: dict[str, list[dict[str, Any]]] = {}
    for number, training in enumerate(recipe.trainings, start=1):
        path = folder.path / f"{training.optimizer}.jsonl"
        if _epochs(path) != recipe.epochs:
            _train(recipe, training, path, root, data, options)
        rows[RULES[get_cell(training.optimizer)].name] = read_rows(path)
        tick(number / len(recipe.trainings))
    result = {
        "data": next(iter(rows.values()))[0]["data"],
        "K": recipe.K,
        "epochs": list(recipe.epochs),
        "trained_with": {cell: {name: [row[name] for row in of] for name in FIELDS} for cell, of in rows.items()},
    }
    folder.finish(result)
    return FinishedRun(recipe.key, recipe.name, recipe.settings, environment_now, result)


def _epochs(path: Path) -> tuple[int, ...]:
    return tuple(row["epoch"] for row in read_rows(path))


def _train(
    recipe: GapRecipe, training: TrainingRecipe, path: Path, root: Path, data: Path | None, options: dict[str, Any]
) -> None:
    def observe(epoch: int, training_step: TrainingStep) -> None:
        if epoch in recipe.epochs:
            gap, step = (
                measure_gap(training, training_step, epoch, recipe.K),
                epoch * training_step.task.steps_per_epoch,
            )
            row = {name: getattr(gap, name) for name in FIELDS}
            # Drop rows of this epoch and later ones: the process that wrote them was killed before its checkpoint.
            MetricsFile(path, step - 1).add({"step": step, "epoch": epoch, **row, "data": training_step.task.source})

    trained = train(training, root=path.parent, data=data, observe=observe, **options)
    if _epochs(path) != recipe.epochs:
        raise NotPossible(
            f"{training.key} was measured after epochs {_epochs(path)} and not {recipe.epochs}: it is "
            f"{trained.result['status']}; delete {path.parent} to start again"
        )
    if training.key not in stored_keys(root) and not (root / training.key).exists():
        (path.parent / training.key).rename(root / training.key)


def train_all(root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
    require_gpu("cifar-gap", "trains 2 networks for 200 epochs each")
    measure(GapRecipe(), root, data, tick, device="cuda", compile=True, on_event=on_event)
