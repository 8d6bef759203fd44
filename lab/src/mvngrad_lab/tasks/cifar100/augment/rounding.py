"""Arithmetic that rounds alike everywhere.

torchvision computes in float32 and cuts to whole levels, so a last bit may decide between two of them: a value blended
with itself can come out one lower. Compilers for the GPU fuse a product with the sum it goes into, and approximate
quotients. In float64 the product of two float32 numbers is exact; rounded from there, it is what float32 alone yields.
A compiler may know that too, and go back to float32 and fuse, where it sees both factors come from float32: the factors
of a blend are float64 from the start.
"""

from __future__ import annotations

from torch import Tensor


def product(first: Tensor, second: Tensor | float) -> Tensor:
    """first * second, rounded to float32 before it is used."""
    return (first.double() * second).float()


def reciprocal(values: Tensor) -> Tensor:
    """1 / values, rounded to float32."""
    return values.double().reciprocal().float()
