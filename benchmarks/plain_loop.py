"""The loop most people write for CIFAR-100: torchvision transforms in worker processes, eager torch, torch's AdamW."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DataLoader, Dataset

from benchmarks.timing import synchronize
from mvngrad_lab.tasks.cifar100.augment import DEVIATION, MEAN
from mvngrad_lab.tasks.cifar100.recipe import Cifar100
from mvngrad_lab.tasks.cifar100.task import CLASSES, Cifar100Task

AHEAD = 2
"""Batches that each worker prepares in advance, which is the loader's default."""


class Images(Dataset[Any]):
    """Images, stored and transformed as in torchvision's CIFAR100."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Any) -> None:
        self.images = images.permute(0, 2, 3, 1).cpu().numpy()
        self.labels, self.transform = labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


class PlainLoop:
    """The same recipe, step by step."""

    def __init__(self, recipe: Cifar100, task: Cifar100Task, workers: int) -> None:
        from torchvision import transforms

        transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=recipe.crop),
                transforms.RandomHorizontalFlip(),
                transforms.RandAugment(recipe.randaugment_operations, recipe.randaugment_magnitude),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, DEVIATION),
            ]
        )
        self.recipe, self.device, self.workers = recipe, task.device, workers
        self.loader: DataLoader[Any] = DataLoader(
            Images(task.train_images, task.train_labels, transform),
            batch_size=recipe.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
            persistent_workers=workers > 0,
        )
        self.model = task.build_model().to(self.device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
        steps = recipe.epochs * len(self.loader)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.batches = self._endless()
        self.step()

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def step(self) -> None:
        images, labels = (part.to(self.device, non_blocking=True) for part in next(self.batches))
        images, recipe = images.contiguous(memory_format=torch.channels_last), self.recipe
        lam, partner = random.betavariate(recipe.mixup, recipe.mixup), torch.randperm(len(labels), device=self.device)
        targets = one_hot(labels, CLASSES).float()
        images, targets = (lam * part + (1 - lam) * part[partner] for part in (images, targets))
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            loss = cross_entropy(self.model(images), targets, label_smoothing=recipe.label_smoothing)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()

    def train(self, seconds: float) -> float:
        """Train for about `seconds` and return the images per second.

        Batches that the workers prepared while other arms trained are used up first.
        """
        for _ in range(AHEAD * self.workers):
            self.step()
        synchronize(self.device)
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < seconds or not steps:
            self.step()
            steps += 1
        synchronize(self.device)
        return steps * self.recipe.batch_size / (time.perf_counter() - start)
