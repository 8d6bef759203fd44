"""Training augmentation on the device of the images, as pure functions of tensors: crop, flip, RandAugment, MixUp."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mvngrad_lab.tasks.cifar100.randaugment import OPERATIONS, apply_operations, gather_pixels, get_strengths

UNIFORMS = 7
"""Random numbers for one image: two for the crop, one for the flip, and two for each of two operations."""
MEAN = (0.5071, 0.4865, 0.4409)
DEVIATION = (0.2673, 0.2564, 0.2762)
"""Of red, green and blue over CIFAR-100's training images, scaled to [0, 1]."""


class Choices(NamedTuple):
    """The choices that the uniform numbers of a batch stand for."""

    top: Tensor
    """int64 [n], like `left`: where the crop begins in the padded image."""
    left: Tensor
    flipped: Tensor
    """bool [n]"""
    operation: Tensor
    """int64 [n, operations], indices into OPERATIONS."""
    negative: Tensor
    """bool [n, operations]: the sign of an operation that has one."""


def choose(uniforms: Tensor, crop: int, operations: int) -> Choices:
    """Map equal parts of [0, 1) to equally likely choices."""
    corner = (uniforms[:, :2] * (2 * crop + 1)).long()
    pairs = uniforms[:, 3 : 3 + 2 * operations]
    operation = (pairs[:, ::2] * len(OPERATIONS)).long()
    return Choices(corner[:, 0], corner[:, 1], uniforms[:, 2] < 0.5, operation, pairs[:, 1::2] < 0.5)


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
    """Crop, flip and RandAugment square uint8 images [n, 3, size, size], each with its own random choices.

    Takes a crop out of the image padded by `crop` black pixels on all sides, flips half of the images horizontally, and
    applies `operations` times one of the 14 operations of torchvision's RandAugment(magnitude=...,
    num_magnitude_bins=bins), whose results are reproduced bit by bit.

    All randomness is in `uniforms`, float32 [n, UNIFORMS] in [0, 1): equal numbers give equal images on every device,
    and no image depends on the others of its batch. Every image goes through every operation and keeps the result of
    the one it drew, so that nothing waits for the device and no shape depends on data: the function compiles to one
    graph and can be captured by CUDA.

    >>> images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    >>> augment(images, torch.rand(2, UNIFORMS)).shape
    torch.Size([2, 3, 32, 32])
    """
    choices = choose(uniforms, crop, operations)
    images = _crop_and_flip(images, choices, crop, flip)
    strengths = get_strengths(magnitude, bins, images.shape[-1])
    for operation, negative in zip(choices.operation.unbind(1), choices.negative.unbind(1), strict=True):
        images = apply_operations(images, operation, negative, strengths)
    return images


def _crop_and_flip(images: Tensor, choices: Choices, crop: int, flip: bool) -> Tensor:
    size = images.shape[-1]
    pixel = torch.arange(size, device=images.device)
    row = pixel + choices.top[:, None] - crop
    column = torch.where(choices.flipped[:, None], size - 1 - pixel, pixel) if flip else pixel
    return gather_pixels(images, row[:, :, None], (column + choices.left[:, None] - crop)[:, None])


def normalize(images: Tensor) -> Tensor:
    """uint8 [n, 3, height, width] to float32, with CIFAR-100's channel means subtracted and divided by deviations."""
    # Channel by channel with Python numbers: a tensor of constants would have to be copied to the device.
    channels = zip(images.unbind(1), MEAN, DEVIATION, strict=True)
    return torch.stack([(channel.float() / 255 - mean) / deviation for channel, mean, deviation in channels], 1)


def mixup(images: Tensor, labels: Tensor, lam: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """MixUp (Zhang et al., 2018) of each image with the one before it: lam x_i + (1 - lam) x_{i-1}.

    Batches are shuffled, so the neighbour is a random partner. Returns the mixed images and, with the labels mixed in
    the same way, probabilities [n, classes] for a cross entropy.

    >>> images, targets = mixup(torch.tensor([0.0, 8.0]), torch.tensor([0, 2]), torch.tensor(0.75), classes=3)
    >>> images.tolist(), targets.tolist()
    ([2.0, 6.0], [[0.75, 0.0, 0.25], [0.25, 0.0, 0.75]])
    """
    targets = (labels[:, None] == torch.arange(classes, device=labels.device)).to(lam.dtype)
    mixed = [lam * values + (1 - lam) * values.roll(1, 0) for values in (images, targets)]
    return mixed[0], mixed[1]
