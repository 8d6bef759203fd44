"""Mean and variance of tensors that come one at a time, none of them kept."""

from __future__ import annotations

import torch
from torch import Tensor


class Welford:
    """Coordinate-wise; by Welford's recursion, which does not subtract large sums from one another.

    >>> variance = Welford()
    >>> for value in (1.0, 2.0, 6.0):
    ...     _ = variance.add(torch.tensor([value]))
    >>> variance.variance
    tensor([7.])
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(())
        self.squares = torch.zeros(())

    def add(self, value: Tensor) -> Tensor:
        """Take a value in; what is returned has the variance as its mean, and is independent of what came before.

        Not at the first value, where it is 0: these are the squares of Helmert's contrasts, one less than the values.
        """
        if self.count == 0:
            self.mean, self.squares = torch.zeros_like(value), torch.zeros_like(value)
        self.count += 1
        deviation = value - self.mean
        self.mean.add_(deviation, alpha=1 / self.count)
        contrast = deviation * (value - self.mean)
        self.squares.add_(contrast)
        return contrast

    @property
    def variance(self) -> Tensor:
        """Without bias: divided by the count less one."""
        return self.squares / (self.count - 1)
