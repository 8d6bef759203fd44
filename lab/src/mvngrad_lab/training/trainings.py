"""What the targets of many trainings share: only what no store has yet is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mvngrad_lab import store
from mvngrad_lab.experiments import OnEvent, Tick
from mvngrad_lab.training.monitored import monitored
from mvngrad_lab.training.train import Interrupted, train
from mvngrad_lab.training_recipe import Training

SMALL_IMAGES = "`mvngrad train cifar100 --train-limit 256 --batch-size 32 --epochs 2 --warmup-epochs 1`"
SMALL_TEXT = (
    "`mvngrad train wikitext103 --model tiny --text FOLDER --steps 100 --warmup-steps 10 --batch-size 8 "
    "--micro-batch-size 8`"
)


def need_gpu(target: str, what: str, small: str = SMALL_IMAGES) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(f"{target} {what} and needs a CUDA device; on a CPU, try a small one with {small}")


def done(root: Path) -> set[str]:
    """Keys of the runs in the store, and of those that the repository keeps."""
    return {run.key for run in store.runs(root, store.KEPT)}


def train_missing(
    recipes: Sequence[Training],
    root: Path,
    data: Path | None,
    tick: Tick,
    on_event: OnEvent,
    watched: Callable[[Training], bool] = lambda recipe: False,
) -> None:
    """Train on the GPU what is not done, with a Monitor beside those that are `watched`.

    A run that is interrupted goes on from its last checkpoint.
    """
    finished = done(root)
    for number, recipe in enumerate(recipes, start=1):
        if recipe.key not in finished:
            try:
                observe = monitored(root / recipe.key) if watched(recipe) else None
                train(recipe, root=root, data=data, device="cuda", compile=True, on_event=on_event, observe=observe)
            except Interrupted as stop:
                raise KeyboardInterrupt from stop
        tick(number / len(recipes))
