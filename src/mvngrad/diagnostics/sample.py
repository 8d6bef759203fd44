"""Which coordinates of a group are looked at: a fixed random sample, the same at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from mvngrad.diagnostics import reading
from mvngrad.optim.gather import local

SAMPLE = 2**12
"""Coordinates of a group that quantiles and shares are taken from. A share of them is off by 0.8% at most (one
standard error of a share of one half), and a group of a billion costs no more than one of a million."""


class Sample:
    """Coordinates of parameters, each as likely as any other; all of them where they are no more than `size`."""

    def __init__(self, params: Sequence[Tensor], size: int, seed: int) -> None:
        counts = [reading.coordinates(param) for param in params]
        self.population = sum(counts)
        self.pieces: list[tuple[Tensor, Tensor | None, int]] = []
        """Of each parameter that is met: itself, which of its coordinates (None: all), and how many."""
        if self.population <= size:
            self.pieces = [(param, None, count) for param, count in zip(params, counts, strict=True) if count]
            return
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(self.population, (size,), generator=generator, device="cpu").sort().values
        ends = torch.tensor(counts, device="cpu").cumsum(0)
        cuts = [0, *torch.searchsorted(drawn, ends).tolist()]
        for param, end, count, start, stop in zip(params, ends.tolist(), counts, cuts[:-1], cuts[1:], strict=True):
            if stop > start:
                index = (drawn[start:stop] - (end - count)).to(local(param).device)
                self.pieces.append((param, index, stop - start))

    def take(self, optimizer: Optimizer, slot: str) -> list[Tensor]:
        """The values of a slot at these coordinates, a row for each parameter that is met."""
        return [reading.some(optimizer.state[param], slot, index) for param, index, _ in self.pieces]

    def steps(self, optimizer: Optimizer) -> list[Tensor]:
        """The step counts of the parameters that are met."""
        return [optimizer.state[param]["step"] for param, _, _ in self.pieces]

    def spread(self, rows: Tensor) -> Tensor:
        """Values for each parameter, in the last dimension, as values for each coordinate."""
        counts = [count for _, _, count in self.pieces]
        if bool((rows == rows[..., :1]).all()):  # most often all have taken as many steps
            return rows[..., :1].expand(*rows.shape[:-1], sum(counts))
        return rows.repeat_interleave(torch.tensor(counts, device="cpu"), -1)


def with_state(optimizer: Optimizer, group: dict[str, Any]) -> list[Tensor]:
    """The parameters of a group that have been stepped."""
    return [param for param in group["params"] if optimizer.state.get(param)]


def spread_out(params: Sequence[Tensor], count: int) -> list[Tensor]:
    """The largest parameter of each of `count` stretches of a group, on the device of the largest of all.

    Stretches, since the largest of a group are often all embeddings.
    """
    if not params:
        return []
    home = local(max(params, key=reading.coordinates)).device
    here = [param for param in params if local(param).device == home]
    length = -(-len(here) // count)
    return [max(here[i : i + length], key=reading.coordinates) for i in range(0, len(here), length)]
