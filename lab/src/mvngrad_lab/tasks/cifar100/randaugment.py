"""The 14 operations of torchvision's RandAugment, bit by bit, on a batch in which each image draws its own.

torchvision computes in float32 and truncates to whole levels, so that a last bit can decide between two levels.
Compilers for the GPU fuse a product with the following sum, and approximate quotients. Therefore products are taken in
float64, where the product of two float32 numbers is exact, and rounded to float32 once. If a compiler sees that both
factors come from float32 it may return to float32 and fuse: the factors of a blend are float64 from the start.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

OPERATIONS = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
    "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip
LUMA = (0.29890000820159912, 0.58700001239776611, 0.11400000005960464)
"""Weights of red, green and blue in grey: 0.2989, 0.587 and 0.114 in float32."""


class Strengths(NamedTuple):
    """The parameters of the operations at one magnitude."""

    shear: float
    translate: int
    """Pixels."""
    angle: float
    """Degrees."""
    blend: float
    """Distance from 1 of the factor of Brightness, Color, Contrast and Sharpness."""
    factors: tuple[float, float]
    """1 - blend and 1 + blend in float32."""
    mask: int
    """The bits that Posterize keeps."""
    threshold: float
    """Solarize inverts values from here on."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def get_strengths(magnitude: int, bins: int, size: int) -> Strengths:
    """Step `magnitude` of `bins` in torchvision's ranges, with torch's linspace because its last bit matters."""

    def step(start: float, end: float) -> float:
        return torch.linspace(start, end, bins)[magnitude].item()

    def single(value: float) -> float:
        return torch.tensor(value, dtype=torch.float32).item()

    blend = step(0.0, 0.9)
    dropped_bits = round(magnitude / ((bins - 1) / 4))
    return Strengths(
        shear=step(0.0, 0.3),
        translate=int(step(0.0, 150.0 / 331.0 * size)),
        angle=step(0.0, 30.0),
        blend=blend,
        factors=(single(1 - blend), single(1 + blend)),
        mask=256 - 2**dropped_bits,
        threshold=step(255.0, 0.0),
    )


def apply_operations(images: Tensor, operation: Tensor, negative: Tensor, strengths: Strengths) -> Tensor:
    """Apply to each image its `operation`, an index into OPERATIONS, with the sign given by `negative`, both [n]."""
    drawn = {name: (operation == index).view(-1, 1, 1, 1) for index, name in enumerate(OPERATIONS)}
    sign = torch.where(negative, -1.0, 1.0).view(-1, 1, 1, 1)
    result = _move(images, drawn, sign, strengths)
    blends = drawn["Brightness"] | drawn["Color"] | drawn["Contrast"] | drawn["Sharpness"]
    result = torch.where(blends, _blend(images, drawn, sign, strengths), result)
    result = torch.where(drawn["Posterize"], images & strengths.mask, result)
    result = torch.where(drawn["Solarize"] & (images >= strengths.threshold), 255 - images, result)
    result = torch.where(drawn["AutoContrast"], _stretch_contrast(images), result)
    return torch.where(drawn["Equalize"], _equalize(images), result)


# Operations that move pixels: to the nearest pixel, black from outside


def gather_pixels(images: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Pixels at integer positions of the source: `row` [n, size, 1 or size] and `column` [n, 1 or size, size]."""
    size = images.shape[-1]
    inside = (row >= 0) & (row < size) & (column >= 0) & (column < size)
    index = (row.clamp(0, size - 1) * size + column.clamp(0, size - 1)).flatten(1)
    pixels = images.flatten(2).gather(2, index[:, None].expand(-1, images.shape[1], -1))
    return torch.where(inside[:, None], pixels.view_as(images), 0)


def _move(images: Tensor, drawn: dict[str, Tensor], sign: Tensor, strengths: Strengths) -> Tensor:
    """Shear from the upper left corner, translate, or rotate about the centre; other images stay as they are."""
    middle, angle = images.shape[-1] / 2, math.radians(strengths.angle)

    def signed(name: str, amount: float) -> Tensor:
        return torch.where(drawn[name], sign * amount, 0.0)[:, 0]

    shear_x, shear_y = signed("ShearX", strengths.shear), signed("ShearY", strengths.shear)
    shift_x, shift_y = signed("TranslateX", strengths.translate), signed("TranslateY", strengths.translate)
    sine, cosine = signed("Rotate", math.sin(angle)), torch.where(drawn["Rotate"], math.cos(angle), 1.0)[:, 0]
    # The source of each pixel, measured from the centre, is an affine function of its position x, y.
    to_column = (cosine, shear_x - sine, middle * shear_x - shift_x)
    to_row = (shear_y + sine, cosine, middle * shear_y - shift_y)
    x = torch.arange(images.shape[-1], device=images.device) + (0.5 - middle)
    column, row = (
        _product(by_x, x) + _product(by_y, x[:, None]) + offset + middle - 0.5
        for by_x, by_y, offset in (to_column, to_row)
    )
    return gather_pixels(images, row.round().long(), column.round().long())


# Operations that change values


def _blend(images: Tensor, drawn: dict[str, Tensor], sign: Tensor, strengths: Strengths) -> Tensor:
    """Move towards or away from black, the grey image, its mean, or the blurred image, within a pixel's range."""
    red, green, blue = (_product(channel, weight) for channel, weight in zip(images.unbind(1), LUMA, strict=True))
    grey = (red + green + blue).to(torch.uint8)[:, None]
    other = torch.where(drawn["Brightness"], 0, _blur(images))
    other = torch.where(drawn["Color"], grey, other).double()
    other = torch.where(drawn["Contrast"], grey.double().mean((2, 3), keepdim=True), other)
    towards, away = (torch.full_like(sign, factor, dtype=torch.float64) for factor in strengths.factors)
    factor = torch.where(sign < 0, towards, away)
    rest = sign.double() * -strengths.blend
    return (_product(images, factor) + _product(other, rest)).clamp(0, 255).to(torch.uint8)


def _blur(images: Tensor) -> Tensor:
    """The mean of the eight neighbours and five times the pixel itself; pixels at the border stay."""
    size, values = images.shape[-1], images.int()
    rows = values + values.roll(1, 2) + values.roll(-1, 2)
    total = rows + rows.roll(1, 3) + rows.roll(-1, 3) + 4 * values
    border = torch.arange(size, device=images.device) % (size - 1) == 0
    nearest = (2 * total + 13) // 26  # total / 13, which is never half-way between two integers
    return torch.where(border | border[:, None], values, nearest).to(torch.uint8)


def _stretch_contrast(images: Tensor) -> Tensor:
    """AutoContrast: map the darkest value of each channel to 0 and the brightest to 255; constant channels stay."""
    values = images.int()  # torch 2.13's compiled minimum of uint8 is 0 on a CPU, whatever the pixels
    low, high = values.amin((2, 3), keepdim=True), values.amax((2, 3), keepdim=True)
    scale = (high - low).clamp(min=1).double().reciprocal().float() * 255
    return torch.where(low == high, values, ((values - low) * scale).clamp(0, 255)).to(torch.uint8)


def _equalize(images: Tensor) -> Tensor:
    """Equalize: spread the values of each channel so that all ranges have about equally many pixels.

    A value becomes the number of pixels below it, divided by a 255th of the number below the brightest value. Channels
    in which that is less than one stay.
    """
    values = images.flatten(2).long()
    channels = torch.arange(values.shape[0] * values.shape[1], device=images.device).view(-1, values.shape[1], 1)
    bins = (256 * channels + values).flatten()
    # Along one axis, where torch has a deterministic scatter_add; integers give the same sums in any order.
    counts = torch.zeros(256 * channels.numel(), dtype=torch.int32, device=images.device)
    counts = counts.scatter_add(0, bins, torch.ones_like(bins, dtype=torch.int32)).view(-1, values.shape[1], 256)
    below = counts.cumsum(2, dtype=torch.int32) - counts
    step = below.gather(2, values.amax(2, keepdim=True)) // 255
    equalized = ((below.gather(2, values) + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step == 0, values, equalized).to(torch.uint8).view_as(images)


def _product(first: Tensor, second: Tensor | float) -> Tensor:
    """first * second, rounded to float32 once: no compiler fuses it with a following sum."""
    return (first.double() * second).float()
