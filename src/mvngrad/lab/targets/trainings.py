"""What the targets of many trainings share: only what no store has yet is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from mvngrad.lab import store
from mvngrad.lab.recipes.training import Training
from mvngrad.lab.targets import OnEvent, Tick
from mvngrad.lab.train import Interrupted, train


def need_gpu(target: str, what: str) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"{target} {what} and needs a CUDA device; on a CPU, try a small one with "
            "`mvngrad train cifar100 --train-limit 2048 --epochs 2 --warmup-epochs 1`"
        )


def done(root: Path) -> set[str]:
    """Keys of the runs in the store, and of those that the repository keeps."""
    return {run.key for run in store.runs(root, store.KEPT)}


def train_missing(recipes: Sequence[Training], root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
    """Train on the GPU what is not done. A run that is interrupted goes on from its last checkpoint."""
    finished = done(root)
    for number, recipe in enumerate(recipes, start=1):
        if recipe.key not in finished:
            try:
                train(recipe, root=root, data=data, device="cuda", compile=True, on_event=on_event)
            except Interrupted as stop:
                raise KeyboardInterrupt from stop
        tick(number / len(recipes))
