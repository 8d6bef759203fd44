"""Table 1: 24 trainings of ResNet-18 on CIFAR-100, each kept as a run of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from mvngrad.lab.report.gather import table1
from mvngrad.lab.targets import Tick
from mvngrad.lab.train import Interrupted, train


def train_all(root: Path, data: Path | None, tick: Tick) -> None:
    """What is not in the store yet. A run that is interrupted goes on from its last checkpoint."""
    if not torch.cuda.is_available():
        raise RuntimeError(
            "table1 trains 24 networks for 200 epochs each and needs a CUDA device; on a CPU, try a small one with "
            "`mvngrad train cifar100 --train-limit 2048 --epochs 2 --warmup-epochs 1`"
        )
    recipes = table1()
    for done, recipe in enumerate(recipes, start=1):
        try:
            train(recipe, root=root, data=data, device="cuda", compile=True)
        except Interrupted as stop:
            raise KeyboardInterrupt from stop
        tick(done / len(recipes))
