"""Table 1: 24 trainings of ResNet-18 on CIFAR-100, each stored as a run of its own."""

from __future__ import annotations

from pathlib import Path

from mvngrad_lab.experiments import OnEvent, Tick
from mvngrad_lab.experiments.cifar100.records import table1
from mvngrad_lab.training.train import require_gpu, train_missing


def train_all(root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
    require_gpu("table1", "trains 24 networks for 200 epochs each")
    train_missing(table1(), root, data, tick, on_event)
