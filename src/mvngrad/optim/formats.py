"""How state is stored, and how it is rounded: floats of one dtype, or 8-bit codes in blocks with scales.

A format allocates state, loads it as the floats that the rule computes with, and stores new values:

    format = get_format(state_dtype, param)
    stored = format.allocate(rule.state_names, param)
    values = format.load(rule.state_names, stored, torch.float32)
    format.store(stored, values, noise)

State in fewer than 32 bits is rounded up or down at random, so that on average nothing is lost, however small a change
is. The random bits are a hash of a seed, the parameter's index, the step and the coordinate: they need no memory, and a
resumed run and every backend draw the same. `backends/cuda/kernel.py` and `backends/cpu/kernel.cpp` repeat the
arithmetic of this file.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mvngrad.optim.tensors import get_local, is_flat_shard, is_sharded, view_as_real

SQUARES = "vs"
"""The state names that are averages of squares."""
ALL_NAMES = frozenset(("low", *(name + suffix for name in "msuv" for suffix in ("", "_scale"))))
"""Every name that any cell stores in any format, except `step`."""
LOW_DTYPES = {24: torch.int8, 32: torch.int16}
"""By `master_bits`, the dtype of `low`."""
ROUNDED_DTYPES = (torch.bfloat16, "int8")
"""The values of `state_dtype` that are rounded at random."""
STATE_DTYPES = (None, torch.float32, *ROUNDED_DTYPES)
"""Valid values of `state_dtype`, in a group."""
ALIASES = {"float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
"""Other spellings of them."""
ARITHMETIC_DTYPES = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.complex32: torch.complex64,
}
"""The dtype a step computes in, of parameters that have 16 bits, or parts of 16; others compute in their own."""


def arithmetic_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype a step computes in."""
    return ARITHMETIC_DTYPES.get(tensor.dtype, tensor.dtype)


# Rounding at random

GOLDEN = -1640531527
"""2^32 over the golden ratio, as a signed 32-bit integer."""
GROUP_STEP = 0x85EBCA6B
"""An odd number: what the seeds of successive groups differ by."""
SHIFTS = {"m": 0, "u": 8, "v": 16, "s": 16, "x": 16}
"""Where in a word of `Noise` the 16 bits begin that round each state, and the parameter x."""
ROUND_TO_NEAREST = 2**15
"""The value of 16 random bits that rounds to the nearest."""


def hash32(word: Tensor) -> Tensor:
    """A hash whose output bits each depend on every input bit (Wellons' lowbias32). Products wrap around."""
    word = (word ^ ((word >> 16) & 0xFFFF)) * 0x7FEB352D
    word = (word ^ ((word >> 15) & 0x1FFFF)) * -0x7B935975
    return word ^ ((word >> 16) & 0xFFFF)


def hash_values(param: Tensor) -> int:
    """32 bits that depend on a parameter's shape and first values; on its shape only, if it is sharded.

    Every process must find the same bits, and a shard has other values in each.
    """
    differs = is_sharded(param) or is_flat_shard(param)
    first = [] if differs or param.is_meta else param.detach().reshape(-1)[:16].tolist()
    return zlib.crc32(repr((*param.shape, *first)).encode())


def to_int32(number: int) -> int:
    """The number modulo 2^32, as a signed 32-bit integer."""
    return (number + 2**31) % 2**32 - 2**31


class Noise:
    """The random bits of one parameter at one step: 32 for each coordinate, in memory order.

    Each of m, s and u is rounded by 16 of them. Some are shared, so the roundings of one coordinate are not independent
    of each other; each one is unbiased.
    """

    def __init__(self, key: Tensor, coordinates: int, device: torch.device) -> None:
        self.word = hash32(torch.arange(coordinates, device=device).to(torch.int32) ^ key.to(device))

    def __getitem__(self, name: str) -> Tensor:
        """16 bits for the rounding of the state `name`, or of the parameter, whose name is x."""
        word = self.word * GOLDEN if name == "x" else self.word
        return (word >> SHIFTS[name]) & 0xFFFF


class Rounding(NamedTuple):
    """How a group rounds at random: narrow state always, bfloat16 parameters if `params` is set."""

    seed: int = 0
    params: bool = False

    def make_key(self, index: int, t: Any) -> Tensor:
        """32 bits that differ between the parameters of a group (by `index`) and between steps t."""
        count = (t if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64, device="cpu")).to(torch.int32)
        return hash32(hash32(torch.full_like(count, to_int32(self.seed + index * GOLDEN))) + count)

    def make_noise(self, index: int, t: Any, param: Tensor, stored: Tensor) -> Noise | None:
        """The random bits of a parameter at its step t; None if neither it nor its state is rounded at random."""
        if not ((self.params and param.dtype == torch.bfloat16) or stored.itemsize < 4):
            return None
        return Noise(self.make_key(index, t), stored.numel(), stored.device)


def round_to_bfloat16(value: Tensor, noise: Tensor) -> Tensor:
    """The value, rounded to one of its two neighbours in bfloat16 with odds that keep its mean.

    16 random bits are added below the last bit of a bfloat16, and the sum is truncated.
    """
    single = value.to(torch.float32)
    rounded = _as_float((single.view(torch.int32) + noise) & -(2**16))
    return torch.where(single == single, rounded, single).to(torch.bfloat16)


def copy_rounded(target: Tensor, value: Tensor, noise: Tensor | None) -> None:
    """Copy a value into a tensor of any float dtype, rounded at random to bfloat16 if there is `noise`."""
    if noise is not None and target.dtype == torch.bfloat16:
        target.copy_(round_to_bfloat16(value, _from_row(noise, value)))
    elif value is not target:
        target.copy_(value)


# Split master weights: bfloat16 parameters, and the low bits of their float32 values as the state `low`.
#
# The parameter is the nearest bfloat16 number to its master, and `low` the difference of their bits. Ties are rounded
# away from zero. Casts round them to even: an even number gets the ties of both neighbours, for which `low` would need
# one more bit.


def join_master(param: Tensor, low: Tensor) -> Tensor:
    """The float32 masters of bfloat16 parameters.

    A parameter that was set to 0 by hand may have a negative `low`, of its old value: 0 minus a bit would be NaN.
    """
    high = param.view(torch.int16).to(torch.int32) << 16
    rest = low.to(torch.int32) << (16 - 8 * low.itemsize)
    return (high + torch.where(param == 0, rest.clamp(min=0), rest)).view(torch.float32)


def split_master(master: Tensor, param: Tensor, low: Tensor, noise: Tensor | None = None) -> None:
    """Write masters to their parameters and `low`; for 8 bits of `low`, rounded by 16 bits of noise or to nearest."""
    bits = master.view(torch.int32)
    if low.itemsize == 1:
        bits = bits + (128 if noise is None else _from_row(noise, master) >> 8)
    high = (bits + 2**15) >> 16
    rest = (bits - (high << 16)) >> (16 - 8 * low.itemsize)
    is_nan = master != master
    param.view(torch.int16).copy_(torch.where(is_nan, 0x7FC0, high))
    low.copy_(torch.where(is_nan, 0, rest))


# Codes of 8 bits, in blocks that share a scale

BLOCK, CODE_BITS = 256, 8
"""The coordinates that share a scale, and the bits of a code."""
OFFSET = 2.0**-16
"""Added to a magnitude in (0, TOP], so that everything far below it gets codes with equal steps."""
OFFSET_BITS = 0x37800000
"""The bits of OFFSET as a float32."""
TOP = 0.9375 - OFFSET
"""The magnitude of code 127."""
CUT = 20
"""How many low bits of a float32 a signed code leaves out: it has 3 of the 23 bits of the mantissa."""
FINE, COARSE = 16, 21
"""The fewest and the most low bits of a float32 that a code of squares leaves out."""
UP = 1 + 2.0**-22
"""Lifts the largest value of a block above the bound of its code, so that it is not truncated below it."""
LEAST = 1 << 23
"""The bits of the smallest normal float32: the inverse of a smaller scale would be infinite."""


def decode_signed(codes: Tensor, scale: Tensor) -> Tensor:
    """The values of signed codes: the highest of 8 bits is the sign."""
    size = _as_float(((codes & 127) << CUT) + OFFSET_BITS) - OFFSET
    value = size * (1 / TOP) * scale
    return torch.where(codes > 127, -value, value)


def encode_signed(value: Tensor, noise: Tensor | int) -> tuple[Tensor, Tensor]:
    """The codes of blocks of signed values, as int32, and their scales: the largest magnitudes of the blocks.

    `noise` has 16 bits; `ROUND_TO_NEAREST` is half of their range.
    """
    size = value.abs()
    largest = size.view(torch.int32).amax(-1, keepdim=True)  # compared by bits, a NaN is the largest
    scale = _as_float(largest.clamp(min=LEAST))
    part = size * (UP * TOP / scale)
    codes = (((part + OFFSET).view(torch.int32) + (noise << CUT - 16)) >> CUT) - (OFFSET_BITS >> CUT)
    return codes.clamp(max=127) | (value.view(torch.int32) >> 24) & 128, scale


def decode_squares(codes: Tensor, first: Tensor, cut: Tensor) -> Tensor:
    """The values of codes of squares."""
    return torch.where(codes > 0, _as_float((codes - 1 + first) << cut), 0)


def encode_squares(value: Tensor, noise: Tensor | int) -> tuple[Tensor, Tensor, Tensor]:
    """The codes of blocks of squares and, for each block, the value of code 1 and the number of bits cut, as int32."""
    bits = value.abs().view(torch.int32)
    positive = bits > 0
    high = bits.amax(-1, keepdim=True)
    low = torch.where(positive, bits, high).amin(-1, keepdim=True)
    cut = torch.full_like(high, FINE)
    for k in range(FINE, COARSE):
        cut = cut + (_round_up(high, k) - (low >> k) > 254)
    first = (_round_up(high, cut) - 254).clamp(min=1)
    codes = ((bits + (noise << cut - 16)) >> cut) - first + 1
    return torch.where(positive, codes.clamp(min=1), 0), first, cut


def _round_up(bits: Tensor, cut: Tensor | int) -> Tensor:
    """`bits` over 2^cut, rounded up: the largest number of steps that noise can give."""
    return -((-bits) >> cut)


def _as_float(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def to_row(tensor: Tensor, like: Tensor) -> Tensor:
    """The values of a tensor as one row, in the memory order of a dense one.

    Not by as_strided: computed values may have other strides in inductor than those that it traces.
    """
    strides = like.stride()
    return tensor.permute(sorted(range(like.dim()), key=lambda d: -strides[d])).reshape(-1)


def _from_row(row: Tensor, like: Tensor) -> Tensor:
    """A row, or blocks of it without the padding of the last, as a tensor with the shape and strides of a dense one.

    Not by a slice: of one, inductor in torch 2.13 leaves out the last partial block on a CPU.
    """
    tensor = row.reshape(-1).as_strided(like.shape, like.stride())
    return tensor.clone() if torch.compiler.is_compiling() else tensor  # a compiler refuses to write through this view


def _to_blocks(row: Tensor) -> Tensor:
    """A row cut into blocks, the last one padded with zeros."""
    return torch.nn.functional.pad(row, (0, -row.shape[0] % BLOCK)).view(-1, BLOCK)


# Formats


@dataclass(frozen=True)
class FloatFormat:
    """State as floats (or complex numbers) of one dtype."""

    dtype: torch.dtype

    def allocate(self, names: Sequence[str], param: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step: zeros with the strides of the parameter."""
        like = param if self.dtype.is_complex else view_as_real(param.detach())
        return {name: torch.zeros_like(like, dtype=self.dtype, memory_format=torch.preserve_format) for name in names}

    def load(self, names: Sequence[str], stored: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The state as real numbers of a dtype: the stored tensors themselves if they have it."""
        return {name: view_as_real(stored[name]).to(dtype) for name in names}

    def store(self, stored: Mapping[str, Tensor], new: Mapping[str, Tensor], noise: Noise | None = None) -> None:
        """Store new values, rounded at random if there is `noise`, otherwise to the nearest."""
        for name, value in new.items():
            copy_rounded(view_as_real(stored[name]), value, noise[name] if noise else None)


class Int8Format:
    """State in 8 bits: a code for each coordinate, and a scale for each block of 256 that are adjacent in memory.

    A code is the top of a float's bits, as in the codecs of telephony: equal steps within an octave, half as large in
    the octave below. Rounding is adding noise below the last bit and truncating.

    Signed averages (m, u) are a sign and 127 magnitudes with 8 steps an octave, over 16 octaves below the block's
    largest and with equal steps from there to zero. Averages of squares (v, s) are divided by, under a root, and span
    many orders of magnitude: code 0 is zero, and 255 codes reach from the block's smallest positive value to its
    largest, with 4 to 128 steps an octave, as many as its range allows. No positive value becomes zero. A signed value
    that is not finite makes its whole block not finite; next to an infinite square, others become about 3e19.
    """

    def allocate(self, names: Sequence[str], param: Tensor) -> dict[str, Tensor]:
        """As `FloatFormat.allocate`. A sharded parameter has blocks of its own in every process."""
        like = view_as_real(get_local(param).detach())
        count = -(-like.numel() // BLOCK)
        codes, scales = {}, {}
        for name in names:
            codes[name] = torch.zeros_like(like, dtype=torch.uint8, memory_format=torch.preserve_format)
            shape, dtype = ((2, count), torch.int32) if name in SQUARES else ((count,), torch.float32)
            scales[f"{name}_scale"] = torch.zeros(shape, dtype=dtype, device=param.device)
        return codes | scales

    def load(self, names: Sequence[str], stored: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        values = {}
        for name in names:
            codes = stored[name]
            value = self.decode(
                name, _to_blocks(to_row(codes, codes).to(torch.int32)), stored[f"{name}_scale"][..., None]
            )
            values[name] = _from_row(value, codes).to(dtype)
        return values

    def store(self, stored: Mapping[str, Tensor], new: Mapping[str, Tensor], noise: Noise | None = None) -> None:
        for name, value in new.items():
            bits = _to_blocks(noise[name]) if noise else ROUND_TO_NEAREST
            encode = encode_squares if name in SQUARES else encode_signed
            codes, *scale = encode(_to_blocks(to_row(value, stored[name]).to(torch.float32)), bits)
            stored[name].copy_(_from_row(codes, stored[name]))
            stored[f"{name}_scale"].copy_(torch.cat(scale, -1).mT.squeeze(0))

    def decode(self, name: str, codes: Tensor, scale: Tensor) -> Tensor:
        """The values of codes of the state `name`, with the scales of their blocks."""
        wide = codes.to(torch.int32)
        return decode_squares(wide, *scale) if name in SQUARES else decode_signed(wide, scale)


Format = FloatFormat | Int8Format
INT8 = Int8Format()


def parse_state_dtype(value: Any) -> Any:
    """The `state_dtype` that an alias stands for; any other value unchanged."""
    return ALIASES.get(value, value) if isinstance(value, str) else value


def invalid_state_dtype_message(value: Any) -> str:
    """The message for an invalid `state_dtype`."""
    return f"state_dtype={value!r} is invalid; it must be one of {', '.join(map(repr, (*STATE_DTYPES, *ALIASES)))}"


def get_format(state_dtype: Any, param: Tensor) -> Format:
    """The format in which the state of a parameter is stored; by default, floats of the dtype of the arithmetic."""
    if state_dtype == "int8":
        return INT8
    return FloatFormat(arithmetic_dtype(param) if state_dtype is None else state_dtype)


def get_stored_names(names: Sequence[str], state_dtype: Any, master_bits: int | None = None) -> tuple[str, ...]:
    """The names a parameter's state is stored under, except `step`: with scales, for int8."""
    scales = tuple(f"{name}_scale" for name in names) if state_dtype == "int8" else ()
    return (*names, *scales, *(("low",) if master_bits else ()))


def allocate_low(master_bits: int | None, param: Tensor) -> dict[str, Tensor]:
    """The state `low` of masters that equal their parameter; nothing without masters."""
    return FloatFormat(LOW_DTYPES[master_bits]).allocate(["low"], param) if master_bits else {}


def is_stored_as(state_dtype: Any, dtype: torch.dtype) -> bool:
    """Whether stored tensors of a dtype match a `state_dtype`; None allows every dtype of the arithmetic."""
    if state_dtype is None:
        return dtype.itemsize > 2
    return dtype == (torch.uint8 if state_dtype == "int8" else state_dtype)


def find_format(names: Sequence[str], stored: Mapping[str, Tensor]) -> Format:
    """The format of stored state, recognized by its names and dtype."""
    return INT8 if f"{names[0]}_scale" in stored else FloatFormat(stored[names[0]].dtype)


def load_state(names: Sequence[str], stored: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Stored state of any format as real numbers of a dtype."""
    return find_format(names, stored).load(names, stored, dtype)
