"""From augmented pixels to what a network sees: normalized, and mixed with another image of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

MEAN = (0.5071, 0.4865, 0.4409)
DEVIATION = (0.2673, 0.2564, 0.2762)
"""Of red, green and blue over CIFAR-100's training images, where 1 is the brightest."""


def normalize(images: Tensor) -> Tensor:
    """uint8 [n, 3, height, width] to float32 with CIFAR-100's channel means and deviations taken out."""
    # Channel by channel with numbers, since a tensor of constants would have to be copied to the device.
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
