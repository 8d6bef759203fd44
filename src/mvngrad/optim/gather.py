"""What the step of a group works on, found once and kept while only gradients change."""

from __future__ import annotations

from itertools import chain, repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mvngrad.optim.launch import Launches

_gradient, _dtype, _layout = map(attrgetter, ("grad", "dtype", "layout"))


class Gathered:
    """The parameters of a group that have gradients, with those, their state name by name, and their step counts.

    Of a parameter that is sharded over several processes (a DTensor) all are the local part.
    """

    def __init__(self, names: tuple[str, ...], form: tuple[Any, ...]) -> None:
        self.form = form
        """What of the group's options decided on the state."""
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.steps: list[Tensor] = []
        self.state: dict[str, list[Tensor]] = {name: [] for name in names}
        self.launches: Launches | None = None
        self.sharded: list[Tensor] = []
        """The DTensors of which `params` are the local parts."""
        self.rows: dict[int, Any] = {}
        """What the compiled path keeps from step to step."""
        self.asked: tuple[Any, ...] = ()
        """What was asked of the group when its launches were made."""

    def keep(self, members: list[Tensor], owned: list[dict[str, Any]]) -> None:
        """Remember of which members of the group, and of which of their state, this was gathered."""
        self.members = list(members)
        self.absent = [member.grad is None for member in members]
        self.owned = owned
        self.values = list(chain.from_iterable(map(dict.values, owned)))
        self.lie = self._lie(self.grads)
        self.sharded = [member for member in members if member.grad is not None and is_sharded(member)]
        self.parts = list(map(local, members)) if self.sharded else []

    def renew(self, members: list[Tensor]) -> bool:
        """Take the gradients of now; False if anything but them has changed, or one of them is not dense."""
        # For every parameter at every step: all of this is C, and that is half of a small model's step.
        grads = list(map(_gradient, members))
        values = list(chain.from_iterable(map(dict.values, self.owned)))
        same = (
            len(members) == len(self.members)
            and all(map(is_, members, self.members))
            and list(map(is_, grads, repeat(None))) == self.absent
            and len(values) == len(self.values)
            and all(map(is_, values, self.values))
            and (not self.sharded or all(map(is_, map(local, members), self.parts)))
        )
        if not same:
            return False
        if True in self.absent:
            grads = [grad for grad in grads if grad is not None]
        if self.sharded:
            present = (member for member, absent in zip(members, self.absent, strict=True) if not absent)
            grads = [local_part(grad, param) for grad, param in zip(grads, present, strict=True)]
        self.grads = grads
        if (lie := self._lie(grads)) == self.lie:
            return True
        self.lie = lie  # which no address tells
        self.rows.clear()
        if self.launches is not None:
            self.launches.forget()
        return set(map(_layout, grads)) <= {torch.strided}

    def _lie(self, grads: list[Tensor]) -> list[Any]:
        """How parameters and gradients lie in memory, and what gradients are; nothing where one has no strides."""
        try:
            return [*map(Tensor.stride, self.params), *map(Tensor.stride, grads), *map(_dtype, grads)]
        except RuntimeError:
            return []


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that is here, to be changed in place; any other tensor itself."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def local_part(tensor: Any, param: Any) -> Tensor:
    """The part of a gradient, or of a state, that belongs to the local part of its parameter."""
    if is_sharded(tensor) != is_sharded(param):
        kinds = ["DTensor" if is_sharded(each) else "plain tensor" for each in (param, tensor)]
        raise ValueError(f"a {kinds[0]} of {tuple(param.shape)} has a {kinds[1]} as its gradient; both must be alike")
    if is_sharded(param) and tensor.placements != param.placements:
        tensor = tensor.redistribute(param.device_mesh, param.placements)
    part = local(tensor)
    arrived: Tensor = part.wait() if hasattr(part, "wait") else part  # the end of a collective that still runs
    return arrived
