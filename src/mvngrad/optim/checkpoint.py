"""Loading a state_dict: checked whole before anything changes, copied, and held in the optimizer's own dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mvngrad.optim.state import OPTIONS, Group, state_dtype, step_count

if TYPE_CHECKING:
    from mvngrad.optim.optimizer import RuleOptimizer


@dataclass(frozen=True)
class Sealed:
    """A loaded tensor on its way past torch, which would cast it to its parameter's dtype."""

    value: Tensor


def sealed(optimizer: RuleOptimizer, state_dict: Any) -> dict[str, Any]:
    """The state_dict with finished copies of its tensors, sealed; a ValueError if it is not one of this optimizer."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"not an optimizer's state_dict: it is {_shown(state_dict)}, without state and param_groups")
    states, groups, own = state_dict["state"], state_dict["param_groups"], optimizer.param_groups
    well_formed = isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )
    if not well_formed or not isinstance(states, Mapping):
        raise ValueError("corrupted state_dict: state must be a dict, param_groups a list of dicts with params")
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in own]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the state_dict's groups hold {sizes[0]} parameters, this optimizer's {sizes[1]}")
    filled = [{**optimizer.defaults, **_checked_group(optimizer, group)} for group in groups]
    saved_ids = chain.from_iterable(group["params"] for group in groups)
    places = [(param, group) for mine, group in zip(own, filled, strict=True) for param in mine["params"]]
    known = dict(zip(saved_ids, places, strict=True))
    if strangers := [key for key in states if key not in known]:
        raise ValueError(f"corrupted state_dict: it has state for {strangers[:3]}, which are none of its parameters")
    return {**state_dict, "state": {key: _sealed_state(optimizer, known[key], states[key]) for key in states}}


def _checked_group(optimizer: RuleOptimizer, saved: Group) -> Group:
    name, rule = type(optimizer).__name__, optimizer.rule
    needed = {"lr", "betas", "eps", "weight_decay", *rule.options}
    foreign = {option for option in OPTIONS if option in saved and option not in needed}
    if foreign or not needed <= saved.keys():
        differs = sorted(foreign or needed - saved.keys())
        raise ValueError(f"not a state_dict of {name}: a group {'has' if foreign else 'lacks'} {differs}")
    if saved.get("decoupled_weight_decay", optimizer.decoupled) != optimizer.decoupled:
        kind = "coupled" if optimizer.decoupled else "decoupled"
        raise ValueError(f"not a state_dict of {name}: its weight decay is {kind}")
    if saved.get("amsgrad"):
        raise ValueError(f"not a state_dict of {name}: it has amsgrad=True")
    optimizer._check({**optimizer.defaults, **saved})
    return saved


def _sealed_state(optimizer: RuleOptimizer, place: tuple[Tensor, Group], saved: Any) -> dict[str, Sealed]:
    (param, group), slots = place, optimizer.rule.slots
    if not isinstance(saved, Mapping):
        raise ValueError(f"corrupted state_dict: the state of a parameter is {_shown(saved)}, not a dict")
    if not saved:
        return {}
    if saved.keys() != {"step", *slots}:
        raise ValueError(
            f"not a state_dict of {type(optimizer).__name__}: it keeps {sorted({'step', *slots})} for each parameter, "
            f"this one {sorted(saved)}"
        )
    return {
        "step": Sealed(step_count(_steps(saved["step"]), param, group)),
        **{slot: Sealed(_kept(slot, saved[slot], param)) for slot in slots},
    }


def _steps(value: Any) -> float:
    single = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    steps = float(value) if single and not torch.is_complex(torch.as_tensor(value)) else -1.0
    if not (steps >= 0 and steps == steps // 1):
        raise ValueError(f"corrupted state_dict: step is {value!r}, not a count")
    return steps


def _kept(slot: str, value: Any, param: Tensor) -> Tensor:
    fits = (
        isinstance(value, Tensor)
        and value.shape == param.shape
        and value.layout == torch.strided
        and value.is_complex() == param.is_complex()
        and (value.is_floating_point() or value.is_complex())
        and value.is_meta == param.is_meta
    )
    if not fits:
        raise ValueError(f"corrupted state_dict: {slot} is {_shown(value)} for a parameter that is {_shown(param)}")
    if slot in "vs" and type(value) is Tensor and not value.is_complex() and bool((value < 0).any()):
        raise ValueError(f"corrupted state_dict: {slot} has negative values, and no average of squares has")
    kept: Tensor = value.to(param.device, state_dtype(param), copy=True)
    return kept


def _shown(value: Any) -> str:
    return f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
