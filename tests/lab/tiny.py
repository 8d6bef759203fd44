"""A recipe of the training loop that takes a second: random images, a network with batch normalization."""

import dataclasses
import random
import sys
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mvngrad.lab.recipes.training import Training
from mvngrad.lab.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiny(Training):
    name: ClassVar[str] = "tiny"
    trained: ClassVar[str] = "tiny"
    optimizer: str = "mvngrad"
    batch_size: int = 16
    lr: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.99
    eps_s: float | None = 1e-8
    epochs: int = 3
    precision: str = "float32"
    images: int = 100
    break_at: int | None = None
    """A step after which the weights are not finite."""

    def rate(self, step, steps_per_epoch):
        return float("nan") if step == self.break_at else self.lr / (1 + step)


class TinyTask(Task):
    source = "random images"

    def __init__(self, recipe, folder, device):
        self.device = device
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(recipe.images, 3, 8, 8, generator=generator).to(device)
        self.labels = torch.randint(4, (recipe.images,), generator=generator).to(device)
        self.rest = recipe.images % recipe.batch_size
        self.steps_per_epoch = recipe.images // recipe.batch_size + (self.rest > 0)

    def build(self):
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
        )

    def plan(self, recipe, epoch):
        draw = random.Random(f"{recipe.seed} {epoch}")
        generator = torch.Generator().manual_seed(draw.getrandbits(32))
        order = torch.randperm(recipe.images, generator=generator)
        padded = torch.zeros(self.steps_per_epoch * recipe.batch_size, dtype=torch.int64)
        padded[: len(order)] = order
        scale = torch.rand(self.steps_per_epoch, generator=generator)
        return {"order": padded.view(self.steps_per_epoch, -1), "scale": 1 + scale}

    def batch(self, row):
        return self.images[row["order"]] * row["scale"], self.labels[row["order"]]

    def loss(self, model, batch):
        return cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, final):
        scores = model(self.images)
        found = {"test_loss": cross_entropy(scores, self.labels).item()}
        return {**found, "train_accuracy": (scores.argmax(1) == self.labels).float().mean().item()} if final else found


if __name__ == "__main__":
    # A process of its own, to be killed while it pauses after each step: tiny.py ROOT DEVICE SECONDS
    import time

    from mvngrad.lab import checkpoint
    from mvngrad.lab.train import Interrupted, train

    root, device, pause = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    save = checkpoint.save

    def slow(*arguments):
        save(*arguments)
        time.sleep(pause)

    checkpoint.save = slow
    try:
        train(Tiny(deterministic=True), root=root, device=device, checkpoint_every=0, task=TinyTask)
    except Interrupted as stopped:
        print(stopped)
        sys.exit(128 + stopped.signal_number)
