"""The 14 operations of torchvision's RandAugment on a batch in which every image has drawn its own."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mvngrad_lab.tasks.cifar100.augment.color import blend, blurred, equalized, grey, stretched
from mvngrad_lab.tasks.cifar100.augment.geometry import resample

OPERATIONS = (
    "Identity",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
)


class Strengths(NamedTuple):
    """What a magnitude means to each kind of operation."""

    shear: float
    translate: int
    """Pixels."""
    angle: float
    """Degrees."""
    blend: float
    """How far from 1 the factor of Brightness, Color, Contrast and Sharpness is."""
    ratios: tuple[float, float]
    """That factor towards and away from the other image, as float32 has it."""
    mask: int
    """The bits that Posterize leaves."""
    threshold: float
    """Solarize inverts what is not below."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def strengths(magnitude: int, bins: int, size: int) -> Strengths:
    """Step `magnitude` of `bins` in torchvision's ranges, by torch's linspace as there: its last bit matters."""

    def step(start: float, end: float) -> float:
        return torch.linspace(start, end, bins)[magnitude].item()

    def single(value: float) -> float:
        return torch.tensor(value, dtype=torch.float32).item()

    blend = step(0.0, 0.9)
    dropped = round(magnitude / ((bins - 1) / 4))
    translate, mask = int(step(0.0, 150.0 / 331.0 * size)), 256 - 2**dropped
    ratios = single(1 - blend), single(1 + blend)
    return Strengths(step(0.0, 0.3), translate, step(0.0, 30.0), blend, ratios, mask, step(255.0, 0.0))


def operate(images: Tensor, operation: Tensor, negative: Tensor, strength: Strengths) -> Tensor:
    """Each image after its `operation`, an index into OPERATIONS, with the sign that `negative` tells, both [n]."""
    drawn = {name: (operation == index).view(-1, 1, 1, 1) for index, name in enumerate(OPERATIONS)}
    sign = torch.where(negative, -1.0, 1.0).view(-1, 1, 1, 1)
    result = _moved(images, drawn, sign, strength)
    blends = drawn["Brightness"] | drawn["Color"] | drawn["Contrast"] | drawn["Sharpness"]
    result = torch.where(blends, _blended(images, drawn, sign, strength), result)
    result = torch.where(drawn["Posterize"], images & strength.mask, result)
    result = torch.where(drawn["Solarize"] & (images >= strength.threshold), 255 - images, result)
    result = torch.where(drawn["AutoContrast"], stretched(images), result)
    return torch.where(drawn["Equalize"], equalized(images), result)


def _moved(images: Tensor, drawn: dict[str, Tensor], sign: Tensor, strength: Strengths) -> Tensor:
    """Shears lean on the upper left corner, rotations turn about the middle; without either, as it was."""
    middle, angle = images.shape[-1] / 2, math.radians(strength.angle)

    def signed(name: str, amount: float) -> Tensor:
        return torch.where(drawn[name], sign * amount, 0.0)[:, 0]

    shear_x, shear_y = signed("ShearX", strength.shear), signed("ShearY", strength.shear)
    shift_x, shift_y = signed("TranslateX", strength.translate), signed("TranslateY", strength.translate)
    sine, cosine = signed("Rotate", math.sin(angle)), torch.where(drawn["Rotate"], math.cos(angle), 1.0)[:, 0]
    across = (cosine, shear_x - sine, middle * shear_x - shift_x)
    return resample(images, across, (shear_y + sine, cosine, middle * shear_y - shift_y))


def _blended(images: Tensor, drawn: dict[str, Tensor], sign: Tensor, strength: Strengths) -> Tensor:
    """Towards or away from black, grey, even grey, or the blurred image."""
    shades = grey(images)
    other = torch.where(drawn["Brightness"], 0, blurred(images))
    other = torch.where(drawn["Color"], shades, other).double()
    other = torch.where(drawn["Contrast"], shades.double().mean((2, 3), keepdim=True), other)
    towards, away = (torch.full_like(sign, value, dtype=torch.float64) for value in strength.ratios)
    ratio = torch.where(sign < 0, towards, away)
    return blend(images, other, ratio, sign.double() * -strength.blend)
