"""Images whose pixels come from elsewhere in them: the nearest pixel, black outside."""

from __future__ import annotations

import torch
from torch import Tensor

from mvngrad_lab.tasks.cifar100.augment.rounding import product


def pick(images: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Pixels at integer positions: `row` [n, size, 1 or size] and `column` [n, 1 or size, size] of the source."""
    size = images.shape[-1]
    inside = (row >= 0) & (row < size) & (column >= 0) & (column < size)
    index = (row.clamp(0, size - 1) * size + column.clamp(0, size - 1)).flatten(1)
    picked = images.flatten(2).gather(2, index[:, None].expand(-1, images.shape[1], -1))
    return torch.where(inside[:, None], picked.view_as(images), 0)


def resample(images: Tensor, across: tuple[Tensor, Tensor, Tensor], down: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The nearest pixel to an affine function of each position (x, y), measured from the middle of the image.

    It is x * across[0] + y * across[1] + across[2] to the right of the middle, and as far below it as `down` says,
    each [n, 1, 1].
    """
    middle = images.shape[-1] / 2
    x = torch.arange(images.shape[-1], device=images.device) + (0.5 - middle)
    column, row = (
        product(by_x, x) + product(by_y, x[:, None]) + offset + middle - 0.5 for by_x, by_y, offset in (across, down)
    )
    return pick(images, row.round().long(), column.round().long())
