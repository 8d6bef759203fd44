"""What the two MNIST targets share: which digits, in which order, through which optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mvngrad.optim.cells import AdaBelief, Adam, LaProp, MVNGrad
from mvngrad_lab.tasks.files import find_files
from mvngrad_lab.tasks.mnist import data as mnist

CELLS = {"Adam": Adam, "AdaBelief": AdaBelief, "LaProp": LaProp, "MVN-Grad": MVNGrad}
EPS_S = 1e-16
"""The paper gives none for MNIST."""


@dataclass(frozen=True)
class Digits:
    """MNIST with its mean and deviation taken out, in memory."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    source: str


def digits(folder: Path | None) -> Digits:
    data = mnist.load(folder)
    train, test = mnist.normalize(data.train_images), mnist.normalize(data.test_images)
    return Digits((train, data.train_labels), (test, data.test_labels), data.source)


_kept: list[Digits] = []
"""In a worker, its one copy of the data."""


def keep(folder: Path | None) -> None:
    _kept[:] = [digits(folder)]


def kept() -> Digits:
    return _kept[0]


def source(folder: Path | None) -> str:
    """What the digits are, in words for a report."""
    return mnist.load(folder).source


def known(folder: Path | None) -> str:
    """Which digits there are, as a recipe says it: without reading them."""
    return "mnist" if find_files("mnist", mnist.FILES, folder) else "mnist-5k"


def batches(data: tuple[Tensor, Tensor], size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Epoch after epoch without end, each in its own order, without the last partial batch."""
    images, labels = data
    generator = torch.Generator().manual_seed(seed)
    for _ in count():
        order = torch.randperm(len(labels), generator=generator)
        for chosen in torch.split(order, size)[: len(labels) // size]:
            yield images[chosen], labels[chosen]


def optimizer(cell: str, model: nn.Module, lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    floor: dict[str, Any] = {"eps_s": EPS_S} if cell in ("AdaBelief", "MVN-Grad") else {}
    made: torch.optim.Optimizer = CELLS[cell](model.parameters(), lr=lr, betas=betas, eps=eps, foreach=True, **floor)
    return made


def step(model: nn.Module, made: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    """One step of training; its loss before the step."""
    made.zero_grad()
    loss = cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    made.step()
    return loss.detach()
