"""Train the queue `dial`, the dial on CIFAR-100, also the runs that results/ has."""

from __future__ import annotations

from pathlib import Path

from mvngrad_lab.experiments import OnEvent, Tick
from mvngrad_lab.experiments.floor import arms
from mvngrad_lab.experiments.floor.run import QUEUES
from mvngrad_lab.training.queue import train_queues
from mvngrad_lab.training.train import require_gpu


def train_all(root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
    what = f"trains {len(arms.dial())} networks for 30 epochs each"
    require_gpu("floor-dial", what, "`mvngrad reproduce floor-mnist`")
    train_queues(QUEUES._replace(names=("dial",)), root, data, tick, on_event, again=True)
