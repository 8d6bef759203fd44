"""Images whose pixels change their values, as torchvision's functions change them on uint8 tensors, to the last bit."""

from __future__ import annotations

import torch
from torch import Tensor

from mvngrad_lab.tasks.cifar100.augment.rounding import product, reciprocal

LUMA = (0.29890000820159912, 0.58700001239776611, 0.11400000005960464)
"""Weights of red, green and blue in grey: 0.2989, 0.587 and 0.114 as float32 has them."""


def grey(images: Tensor) -> Tensor:
    """uint8 [n, 1, size, size]"""
    red, green, blue = (product(channel, weight) for channel, weight in zip(images.unbind(1), LUMA, strict=True))
    return (red + green + blue).to(torch.uint8)[:, None]


def blurred(images: Tensor) -> Tensor:
    """The mean of the eight neighbours and five times the pixel itself. What has no eight neighbours stays."""
    size, values = images.shape[-1], images.int()
    rows = values + values.roll(1, 2) + values.roll(-1, 2)
    total = rows + rows.roll(1, 3) + rows.roll(-1, 3) + 4 * values
    edge = torch.arange(size, device=images.device) % (size - 1) == 0
    nearest = (2 * total + 13) // 26  # of thirteenths, which have no middle
    return torch.where(edge | edge[:, None], values, nearest).to(torch.uint8)


def blend(images: Tensor, other: Tensor, ratio: Tensor, rest: Tensor) -> Tensor:
    """ratio * images + rest * other, within a pixel's range; the last three in float64, with values of float32."""
    return (product(images, ratio) + product(other, rest)).clamp(0, 255).to(torch.uint8)


def stretched(images: Tensor) -> Tensor:
    """AutoContrast: each channel with its darkest value at 0 and its brightest at 255. A channel of one value stays."""
    values = images.int()  # torch 2.13's compiled minimum of uint8 is 0 on a CPU, whatever the pixels
    low, high = values.amin((2, 3), keepdim=True), values.amax((2, 3), keepdim=True)
    scale = reciprocal((high - low).clamp(min=1)) * 255
    return torch.where(low == high, values, ((values - low) * scale).clamp(0, 255)).to(torch.uint8)


def equalized(images: Tensor) -> Tensor:
    """Equalize: each channel with its values spread so that all ranges of them have about equally many pixels.

    A value becomes the number of pixels below it, divided by a 255th of the number below the brightest. A channel with
    too few of those stays.
    """
    values = images.flatten(2).long()
    channels = torch.arange(values.shape[0] * values.shape[1], device=images.device).view(-1, values.shape[1], 1)
    bins = (256 * channels + values).flatten()
    # Along one axis, because only there torch adds in a fixed order if asked to; for whole numbers any order is right.
    counts = torch.zeros(256 * channels.numel(), dtype=torch.int32, device=images.device)
    counts = counts.scatter_add(0, bins, torch.ones_like(bins, dtype=torch.int32)).view(-1, values.shape[1], 256)
    below = counts.cumsum(2, dtype=torch.int32) - counts
    step = below.gather(2, values.amax(2, keepdim=True)) // 255
    spread = ((below.gather(2, values) + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step == 0, values, spread).to(torch.uint8).view_as(images)
