"""What the step of a group works on, found once and kept while only gradients change."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mvngrad.optim.launch import Launches


class Gathered:
    """The parameters of a group that have gradients, with those, their state slot by slot, and their step counts."""

    def __init__(self, slots: tuple[str, ...]) -> None:
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.steps: list[Tensor] = []
        self.state: dict[str, list[Tensor]] = {slot: [] for slot in slots}
        self.launches: Launches | None = None

    def keep(self, members: list[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Remember of which members of the group, and of which of their state, this was gathered."""
        self.members = list(members)
        self.absent = [member.grad is None for member in members]
        self.owned = [states[param] for param in self.params]
        self.values = list(chain.from_iterable(kept.values() for kept in self.owned))

    def renew(self, members: list[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Take the gradients of now; False if anything but them has changed, or one of them is not dense."""
        grads = [member.grad for member in members]
        same = (
            len(members) == len(self.members)
            and all(map(is_, members, self.members))
            and [grad is None for grad in grads] == self.absent
            and all(map(is_, map(states.get, self.params), self.owned))
            and all(map(is_, chain.from_iterable(kept.values() for kept in self.owned), self.values))
        )
        if same:
            self.grads = [grad for grad in grads if grad is not None]
            same = all(grad.layout is torch.strided for grad in self.grads)
        return same
