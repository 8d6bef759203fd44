"""Loading a state_dict: checked whole before anything changes, copied, and kept as the optimizer keeps its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mvngrad.optim import storage
from mvngrad.optim.gather import is_sharded, local_part
from mvngrad.optim.state import KINDS, OPTIONS, Group, asked_kind, no_kind, real, state_kind, step_count
from mvngrad.rule import ADAM

if TYPE_CHECKING:
    from mvngrad.optim.optimizer import RuleOptimizer


TORCHS = {"step": "step", "exp_avg": "m", "exp_avg_sq": "v"}
"""What torch.optim.Adam calls its state, and we."""


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
    if _is_torchs(states):
        raise ValueError(_foreign(optimizer))
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in own]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the state_dict's groups hold {sizes[0]} parameters, this optimizer's {sizes[1]}")
    filled = [_checked_group(optimizer, group, mine) for group, mine in zip(groups, own, strict=True)]
    saved_ids = chain.from_iterable(group["params"] for group in groups)
    places = [(param, group) for mine, group in zip(own, filled, strict=True) for param in mine["params"]]
    known = dict(zip(saved_ids, places, strict=True))
    if strangers := [key for key in states if key not in known]:
        raise ValueError(f"corrupted state_dict: it has state for {strangers[:3]}, which are none of its parameters")
    kept = {key: _sealed_state(optimizer, known[key], states[key]) for key in states}
    return {**state_dict, "state": kept, "param_groups": filled}


def _is_torchs(states: Mapping[Any, Any]) -> bool:
    return any(isinstance(kept, Mapping) and "exp_avg" in kept for kept in states.values())


def _foreign(optimizer: RuleOptimizer) -> str:
    """What to do with a state of torch.optim."""
    name, own = type(optimizer).__name__, optimizer.param_groups[0]
    told = f"not a state_dict of {name}: it has exp_avg, as torch.optim's do"
    if optimizer.rule == ADAM:
        return f"{told}; load mvngrad.convert_state_dict(state_dict, {own['state_dtype']!r})"
    slots = ", ".join(optimizer._rule(own).state_names)
    return f"{told}, and {name} keeps other averages, {slots}: start it anew, without loading"


def _ours(state_dict: dict[str, Any]) -> dict[str, Any]:
    """That of torch.optim.Adam or AdamW as our cell of that name would have it; others as they are."""
    states, groups = state_dict["state"], state_dict["param_groups"]
    if not _is_torchs(states):
        return state_dict
    if not (all(kept.keys() <= TORCHS.keys() for kept in states.values()) and all("amsgrad" in g for g in groups)):
        raise ValueError("of torch.optim only the state of Adam and AdamW, without amsgrad, can be converted")
    return {
        **state_dict,
        "state": {key: {TORCHS[name]: value for name, value in kept.items()} for key, kept in states.items()},
        "param_groups": [{name: value for name, value in group.items() if name != "amsgrad"} for group in groups],
    }


def _checked_group(optimizer: RuleOptimizer, saved: Group, own: Group) -> Group:
    name, rule = type(optimizer).__name__, optimizer.rule
    needed = {"lr", "betas", "eps", "weight_decay", *rule.options} - {"lean"}
    foreign = {option for option in OPTIONS if option in saved and option not in rule.options}
    if foreign or not needed <= saved.keys():
        differs = sorted(foreign or needed - saved.keys())
        raise ValueError(f"not a state_dict of {name}: a group {'has' if foreign else 'lacks'} {differs}")
    if saved.get("decoupled_weight_decay", optimizer.decoupled) != optimizer.decoupled:
        kind = "coupled" if optimizer.decoupled else "decoupled"
        raise ValueError(f"not a state_dict of {name}: its weight decay is {kind}")
    if saved.get("amsgrad"):
        raise ValueError(f"not a state_dict of {name}: it has amsgrad=True")
    if bool(saved.get("lean")) != bool(own.get("lean")):
        raise ValueError(f"not a state_dict of {name}(lean={bool(own.get('lean'))}): it has the other state")
    kinds = _family(saved.get("state_dtype")), _family(own["state_dtype"])
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"the state_dict keeps its state in {kinds[0]}, this optimizer in {kinds[1]}: make the optimizer with that "
            f"state_dtype, or load mvngrad.convert_state_dict(state_dict, {own['state_dtype']!r})"
        )
    filled = {**own, **saved, "state_dtype": own["state_dtype"]}
    optimizer._check(filled)
    return filled


def _family(kind: Any) -> str:
    """How a checkpoint's state was rounded: the wide floats are one family, as in torch."""
    return "int8" if kind == "int8" else "bfloat16" if kind in (torch.bfloat16, "bfloat16") else "float32"


def _named(kind: torch.dtype | str | None) -> str | None:
    """A `state_dtype` as checkpoints have it: torch.distributed.checkpoint takes no dtypes."""
    return None if kind is None else _family(kind)


def _sealed_state(optimizer: RuleOptimizer, place: tuple[Tensor, Group], saved: Any) -> dict[str, Sealed]:
    param, group = place
    slots, kind = optimizer._rule(group).state_names, state_kind(param, group)
    if not isinstance(saved, Mapping):
        raise ValueError(f"corrupted state_dict: the state of a parameter is {_shown(saved)}, not a dict")
    if not saved:
        return {}
    room = storage.empty(slots, param, kind)
    if saved.keys() not in ({"step", *room}, {"step", *slots}):
        raise ValueError(
            f"not a state_dict of {type(optimizer).__name__}: it keeps {sorted({'step', *room})} for each parameter, "
            f"this one {sorted(saved)}"
        )
    step = step_count(_steps(saved["step"]), param, group)
    for name, value in saved.items():
        if name != "step":
            _check_fits(name, value, param, room[name], floats=f"{slots[0]}_scale" not in saved)
    if f"{slots[0]}_scale" not in room:
        for slot, kept in room.items():
            real(kept).copy_(real(saved[slot]))
    elif saved.keys() == {"step", *room} and all(saved[slot].stride() == room[slot].stride() for slot in slots):
        for name, kept in room.items():
            kept.copy_(saved[name])
    else:  # blocks that lie otherwise, or floats
        if is_sharded(param):
            saved = {slot: local_part(saved[slot], param) for slot in slots}
        values = storage.opened(slots, saved, torch.float32)
        storage.close(
            room, {slot: torch.empty_like(room[slot], dtype=torch.float32).copy_(values[slot]) for slot in slots}
        )
    return {"step": Sealed(step), **{name: Sealed(value) for name, value in room.items()}}


def _steps(value: Any) -> float:
    single = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    steps = float(value) if single and not torch.is_complex(torch.as_tensor(value)) else -1.0
    if not (steps >= 0 and steps == steps // 1):
        raise ValueError(f"corrupted state_dict: step is {value!r}, not a count")
    return steps


def _check_fits(name: str, value: Any, param: Tensor, kept: Tensor, floats: bool) -> None:
    if is_sharded(param) and not floats:
        raise ValueError(
            f"{name} is in 8-bit blocks, which cannot be cut where shards are: load it in float32 into another "
            "optimizer of these parameters, and its state_dict into this one; mvngrad.convert_state_dict converts"
        )
    whole = real(param.detach()) if floats else kept
    fits = (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.is_meta == param.is_meta
        and real(value).shape == whole.shape
        and (real(value).is_floating_point() if floats else value.dtype == kept.dtype)
    )
    if not fits:
        raise ValueError(f"corrupted state_dict: {name} is {_shown(value)} for a parameter that is {_shown(param)}")
    if is_sharded(value) != is_sharded(param):
        case = ("sharded", "whole", "save", "get") if is_sharded(value) else ("whole", "sharded", "load", "set")
        raise ValueError(
            "{} is {}, its parameter {}: {} it by {}_optimizer_state_dict of torch.distributed.checkpoint.state_dict, "
            "with full_state_dict=True".format(name, *case)
        )
    known = floats and type(value) is Tensor and not value.is_meta
    if known and name in storage.SQUARES and bool((real(value) < 0).any()):
        raise ValueError(f"corrupted state_dict: {name} has negative values, and no average of squares has")


def _shown(value: Any) -> str:
    return f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def portable(optimizer: RuleOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state_dict as torch.distributed.checkpoint takes it, for any number of processes.

    Dtypes are named. 8-bit state of sharded parameters becomes sharded floats, because blocks cannot be cut where
    shards are; nothing is lost: floats made from codes are encoded as the same values.
    """
    states, groups = dict(state_dict["state"]), []
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        groups.append({**saved, "state_dtype": _named(group["state_dtype"])})
        slots = optimizer._rule(group).state_names
        for key, param in zip(saved["params"], group["params"], strict=True):
            if is_sharded(param) and f"{slots[0]}_scale" in states.get(key, {}):
                values = storage.opened(slots, states[key], torch.float32)
                states[key] = {"step": states[key]["step"], **{slot: _spread(values[slot], param) for slot in slots}}
    return {**state_dict, "state": states, "param_groups": groups}


def _spread(part: Tensor, param: Any) -> Tensor:
    """The part of a state that is here as a DTensor, spread as its parameter is."""
    from torch.distributed.tensor import DTensor

    whole = real(param.detach())
    return DTensor.from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def convert_state_dict(state_dict: dict[str, Any], state_dtype: torch.dtype | str | None) -> dict[str, Any]:
    """A copy of an optimizer's state_dict with its state kept in another dtype, rounded to the nearest.

    One of torch.optim.Adam or AdamW becomes one of `mvngrad.Adam` or `AdamW`, which go on as torch's would.

    >>> import mvngrad, torch
    >>> x = torch.nn.Parameter(torch.ones(3))
    >>> x.grad = torch.ones(3)
    >>> small, wide = (mvngrad.MVNGrad([x], state_dtype=dtype) for dtype in ("int8", torch.float32))
    >>> small.step()
    >>> wide.load_state_dict(convert_state_dict(small.state_dict(), torch.float32))
    """
    state_dtype, state_dict = asked_kind(state_dtype), _ours(state_dict)
    if state_dtype not in KINDS:
        raise ValueError(no_kind(state_dtype))
    states: dict[Any, dict[str, Any]] = {}
    for key, kept in state_dict["state"].items():
        slots = [name for name in kept if name != "step" and not name.endswith("_scale")]
        if not slots:  # of a parameter that was looked up and never stepped
            states[key] = {}
            continue
        wide = torch.float64 if real(kept[slots[0]]).dtype == torch.float64 else torch.float32
        values = storage.opened(slots, kept, wide)
        in_floats = is_sharded(values[slots[0]]) and state_dtype == "int8"  # as `portable` has them
        room = storage.empty(slots, values[slots[0]], torch.float32 if in_floats else state_dtype or wide)
        storage.close(room, values)
        step = kept["step"]
        states[key] = {"step": step.clone() if isinstance(step, torch.Tensor) else step, **room}
    groups = [{**group, "state_dtype": _named(state_dtype)} for group in state_dict["param_groups"]]
    return {**state_dict, "state": states, "param_groups": groups}
