"""What an optimizer keeps, in the paper's letters m, v, s and u: ours, and torch's Adam and AdamW."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from mvngrad.optim import blocks, storage
from mvngrad.optim.gather import local
from mvngrad.optim.optimizer import RuleOptimizer, _hyper
from mvngrad.optim.state import Group, real
from mvngrad.rule import ADAM, Hyper, Rule


class Reading(NamedTuple):
    """The cell that a group is stepped by, and the name under which each letter of its state is kept."""

    rule: Rule
    hyper: Hyper
    names: dict[str, str]

    @property
    def root(self) -> str:
        """The letter that stands under the root."""
        return "s" if self.rule.centered else "v"


def read(optimizer: Optimizer, group: Group) -> Reading:
    """How to read a group's state; its `lr` is left as it is, a number or a tensor."""
    if isinstance(optimizer, RuleOptimizer):
        rule = optimizer._rule(group)
        return Reading(rule, _hyper(group, group["lr"]), {slot: slot for slot in rule.state_names})
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        names = {"m": "exp_avg", "v": "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"}
        return Reading(ADAM, _hyper(group, group["lr"]), names)
    raise TypeError(
        f"{type(optimizer).__name__} is not an optimizer of mvngrad, nor torch.optim.Adam or AdamW: what it keeps is "
        "unknown; of a wrapper, give the optimizer inside"
    )


def coordinates(param: Tensor) -> int:
    """How many real coordinates of a parameter are here."""
    return real(local(param)).numel()


def whole(state: dict[str, Any], slot: str, dtype: torch.dtype) -> Tensor:
    """A slot of a parameter's state as floats, the part of it that is here; the kept tensor itself where it is that."""
    return storage.opened((slot,), {name: local(value) for name, value in state.items()}, dtype)[slot]


def some(state: dict[str, Any], slot: str, index: Tensor | None) -> Tensor:
    """The values of a slot at some of its flat coordinates, or at all, in a row."""
    kept, scale = real(local(state[slot])), state.get(f"{slot}_scale")
    if index is None or (scale is not None and not kept.is_contiguous()):
        row = whole(state, slot, torch.float32) if scale is not None else kept
        return row.reshape(-1) if index is None else torch.take(row, index)
    values = torch.take(kept, index)
    if scale is None:
        return values
    codes, part = values.to(torch.int32), index // blocks.BLOCK  # only these are decoded
    return blocks.squares(codes, *scale[:, part]) if slot in storage.SQUARES else blocks.signed(codes, scale[part])
