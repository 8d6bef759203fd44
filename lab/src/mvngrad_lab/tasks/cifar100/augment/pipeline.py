"""Random crop, flip and RandAugment of a batch: which numbers decide what, and in which order it is done."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mvngrad_lab.tasks.cifar100.augment.geometry import pick
from mvngrad_lab.tasks.cifar100.augment.randaugment import OPERATIONS, operate, strengths

UNIFORMS = 7
"""Numbers an image needs: two for the crop, one for the flip, and two for each of two operations."""


class Choices(NamedTuple):
    """What the uniform numbers of a batch decide."""

    top: Tensor
    """int64 [n], as `left`: where the crop begins in the padded image."""
    left: Tensor
    flipped: Tensor
    """bool [n]"""
    operation: Tensor
    """int64 [n, operations], indices into OPERATIONS."""
    negative: Tensor
    """bool [n, operations]: the sign of an operation that has one."""


def choose(uniforms: Tensor, crop: int, operations: int) -> Choices:
    """Equal parts of [0, 1) for equal chances."""
    places = (uniforms[:, :2] * (2 * crop + 1)).long()
    slots = uniforms[:, 3 : 3 + 2 * operations]
    operation = (slots[:, ::2] * len(OPERATIONS)).long()
    return Choices(places[:, 0], places[:, 1], uniforms[:, 2] < 0.5, operation, slots[:, 1::2] < 0.5)


def augment(
    images: Tensor,
    uniforms: Tensor,
    *,
    crop: int = 4,
    flip: bool = True,
    operations: int = 2,
    magnitude: int = 9,
    bins: int = 31,
) -> Tensor:
    """Square uint8 images [n, 3, size, size], cropped, flipped and changed by RandAugment, each in its own way.

    A crop out of the image with `crop` black pixels on all sides; for half of the images a horizontal flip; then
    `operations` times one of the 14 operations of torchvision's RandAugment(magnitude=..., num_magnitude_bins=bins),
    whose results are reproduced pixel by pixel.

    All chance is in `uniforms`, float32 [n, UNIFORMS] in [0, 1): equal numbers give equal images, on every device, and
    no image depends on the others of its batch. Every image goes through every operation and keeps the one it drew, so
    nothing waits for the device and no shape depends on data: it can be compiled as one graph and captured by CUDA.

    >>> images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    >>> augment(images, torch.rand(2, UNIFORMS)).shape
    torch.Size([2, 3, 32, 32])
    """
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 3 or images.shape[2] != images.shape[3]:
        raise ValueError(
            f"images is {images.dtype} {list(images.shape)}; augment needs uint8 pixels of shape [n, 3, size, size]"
        )
    if uniforms.dim() != 2 or uniforms.shape[0] != images.shape[0] or uniforms.shape[1] < 3 + 2 * operations:
        raise ValueError(
            f"uniforms has shape {list(uniforms.shape)}; {images.shape[0]} images and operations={operations} need at "
            f"least [{images.shape[0]}, {3 + 2 * operations}]"
        )
    if not 0 <= magnitude < bins:
        raise ValueError(f"magnitude={magnitude} is out of range; with bins={bins} use 0 to {bins - 1}")
    choices = choose(uniforms, crop, operations)
    images = _crop_and_flip(images, choices, crop, flip)
    strength = strengths(magnitude, bins, images.shape[-1])
    for slot in range(operations):
        images = operate(images, choices.operation[:, slot], choices.negative[:, slot], strength)
    return images


def _crop_and_flip(images: Tensor, choices: Choices, crop: int, flip: bool) -> Tensor:
    size = images.shape[-1]
    pixel = torch.arange(size, device=images.device)
    row = pixel + choices.top[:, None] - crop
    column = torch.where(choices.flipped[:, None], size - 1 - pixel, pixel) if flip else pixel
    return pick(images, row[:, :, None], (column + choices.left[:, None] - crop)[:, None])
