"""Stochastic rounding: up or down at random, so that on average nothing is lost, however small a change is.

The random bits are a hash of a seed, the parameter's place, the step and the coordinate. They need no memory, a resumed
run draws the same, and every path draws the same: `mvngrad.optim.kernel` repeats these lines.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

GOLDEN = -1640531527
"""2^32 over the golden ratio, as 32 bits with a sign."""


class Rounding(NamedTuple):
    """How a group rounds: state in fewer than 32 bits always at random, bfloat16 parameters where they are to be."""

    seed: int = 0
    params: bool = False

    def wanted(self, param: Tensor, kept: Tensor) -> bool:
        """Whether a parameter, of which `kept` is a slot of state, needs random bits."""
        return (self.params and param.dtype == torch.bfloat16) or not (kept.is_complex() or kept.itemsize >= 4)

    def key(self, place: int, t: Any) -> Tensor:
        """What tells a parameter from the others of its group, and its step t from its others: 32 bits."""
        count = (t if isinstance(t, Tensor) else torch.tensor(t, device="cpu")).to(torch.int32)
        return mixed(mixed(torch.full_like(count, wrapped(self.seed + place * GOLDEN))) + count)

    def noise(self, place: int, t: Any, param: Tensor, kept: Tensor) -> Noise | None:
        """The random bits of a parameter at its step t; None if it needs none."""
        if not self.wanted(param, kept):
            return None
        return Noise(self.key(place, t), kept.numel(), kept.device)


DEFAULT = Rounding()


def mixed(word: Tensor) -> Tensor:
    """32 bits in, 32 bits out, every one of which depends on all (Wellons' lowbias32). Products wrap around."""
    word = (word ^ ((word >> 16) & 0xFFFF)) * 0x7FEB352D
    word = (word ^ ((word >> 15) & 0x1FFFF)) * -0x7B935975
    return word ^ ((word >> 16) & 0xFFFF)


def wrapped(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


class Noise:
    """The random bits of one parameter at one step: 32 for each coordinate, in a row, as they lie in memory.

    Each of m, s and u is rounded by 16 of them. Some are shared, so the roundings of one coordinate are not independent
    of one another; each is without bias all the same.
    """

    def __init__(self, key: Tensor, coordinates: int, device: torch.device) -> None:
        self.word = mixed(torch.arange(coordinates, device=device).to(torch.int32) ^ key.to(device))

    def __getitem__(self, name: str) -> Tensor:
        """16 bits for the rounding of a slot, or of the parameter x itself."""
        word = self.word * GOLDEN if name == "x" else self.word
        return (word >> SHIFT[name]) & 0xFFFF


SHIFT = {"m": 0, "u": 8, "v": 16, "s": 16, "x": 16}


def to_bfloat16(value: Tensor, noise: Tensor) -> Tensor:
    """The value, rounded to one of its two neighbours in bfloat16 with odds that leave its mean as it is.

    Noise of one unit in the last place is added, and the sum cut; here in floating point, where a compiler for the CPU
    is faster than on bits. `mvngrad.optim.kernel` does it on bits.
    """
    size = value.to(torch.float32).abs()
    scaled = size * (2.0**23 + 1)
    octave = (scaled - scaled * (1 - 2.0**-24)).abs()  # the power of 2 below, exactly (Rump, Ogita and Oishi's ufp)
    odds = ((noise >> 1).to(torch.float32) - (2**14 - 0.5)) * 2.0**-15
    rounded = torch.maximum(size + odds * (octave * 2.0**-7), octave)  # nearest rounding is cutting half a unit later
    rounded = torch.where(size < 2.0**100, rounded, size)  # beyond, the scaled value would overflow
    return torch.where(value < 0, -rounded, rounded).to(torch.bfloat16)
