"""A task of your own: mvngrad train spirals:spirals"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mvngrad_lab.tasks.own.task import OwnTask


def make_points(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    label = torch.arange(count) % 2
    angle = 3 * torch.pi * torch.rand(count).sqrt()
    radius = angle / 10 * (1 - 2 * label)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return points + 0.02 * torch.randn(count, 2), label


def loss(model: nn.Module, points: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(points), label)


def accuracy(model: nn.Module, points: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (model(points).argmax(1) == label).float().mean()


def spirals() -> OwnTask:
    """Tell two spirals apart."""
    return OwnTask(
        model=lambda: nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)),
        loss=loss,
        train=make_points(3000),
        validation=make_points(1000),
        metrics={"accuracy": accuracy},
        settings={"epochs": 20, "batch_size": 50, "lr": 3e-3},
    )
