"""State in 8 bits: a code for each coordinate, and a scale for each block of 256 that lie together in memory.

A code is the top of a float's bits, as in the codecs of telephony: equal steps within an octave, half as large in the
octave below. Rounding is adding noise below the last bit and cutting.

Signed averages (m, u) are sign and 127 magnitudes with 8 steps an octave, over 16 octaves under the block's largest and
with equal steps from there to zero. Averages of squares (v, s) stand under a root in a denominator and span many orders
of magnitude: code 0 is zero, and 255 codes reach from the block's smallest positive value to its largest, with 4 to 128
steps an octave, as many as its range allows. No positive value becomes zero. A value that is not finite takes its block
with it.

`mvngrad.optim.kernel` repeats these lines.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
OFFSET = 2.0**-16
"""Added to a magnitude in (0, TOP], so that what is far below it falls into octaves that have no end."""
OFFSET_BITS = 0x37800000
TOP = 0.9375 - OFFSET
"""The magnitude of code 127."""
CUT = 20
"""The bits of a float below a signed code: 3 of its 23 stay."""
FINE, COARSE = 16, 21
"""The fewest and the most bits of a float below a code of squares."""


def signed(codes: Tensor, scale: Tensor) -> Tensor:
    """The values of signed codes: the highest of 8 bits is the sign."""
    size = _float(((codes & 127) << CUT) + OFFSET_BITS) - OFFSET
    value = size * (1 / TOP) * scale
    return torch.where(codes > 127, -value, value)


def to_signed(value: Tensor, noise: Tensor | int) -> tuple[Tensor, Tensor]:
    """The codes of rows of signed values, as int32, and their scales: the largest magnitudes of the rows.

    `noise` has 16 bits; the half of them rounds to the nearest.
    """
    size = value.abs()
    scale = _float(size.view(torch.int32).amax(-1, keepdim=True).clamp(min=LEAST))  # by its bits, a NaN is the largest
    part = size * (UP * TOP / scale)
    codes = (((part + OFFSET).view(torch.int32) + (noise << CUT - 16)) >> CUT) - (OFFSET_BITS >> CUT)
    return codes.clamp(max=127) | (value.view(torch.int32) >> 24) & 128, scale


UP = 1 + 2.0**-22
"""Lifts the largest value of a row above the bound of its code, lest it be cut below it."""
LEAST = 1 << 23
"""The bits of the least normal number: the inverse of a scale below it would be infinite."""


def squares(codes: Tensor, first: Tensor, cut: Tensor) -> Tensor:
    """The values of codes of squares."""
    return torch.where(codes > 0, _float((codes - 1 + first) << cut), 0)


def to_squares(value: Tensor, noise: Tensor | int) -> tuple[Tensor, Tensor, Tensor]:
    """The codes of rows of squares, and for each row what code 1 stands for and how many bits are cut off, as int32."""
    bits = value.abs().view(torch.int32)
    there = bits > 0
    high = bits.amax(-1, keepdim=True)
    low = torch.where(there, bits, high).amin(-1, keepdim=True)
    cut = torch.full_like(high, FINE)
    for k in range(FINE, COARSE):
        cut = cut + (_last(high, k) - (low >> k) > 254)
    first = (_last(high, cut) - 254).clamp(min=1)
    codes = ((bits + (noise << cut - 16)) >> cut) - first + 1
    return torch.where(there, codes.clamp(min=1), 0), first, cut


def _last(bits: Tensor, cut: Tensor | int) -> Tensor:
    """What they are at most after rounding, as a number of steps."""
    return -((-bits) >> cut)


def _float(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)
