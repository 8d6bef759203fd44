"""Saving and loading: a state_dict is checked as a whole before anything changes, then copied in the group's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mvngrad.optim import formats
from mvngrad.optim.backends import make_step_count
from mvngrad.optim.inputs import Group
from mvngrad.optim.options import check_group
from mvngrad.optim.tensors import get_local, get_local_like, is_sharded, view_as_real
from mvngrad.rule import ADAM, CELLS, LEAN, MVNGRAD

if TYPE_CHECKING:
    from mvngrad.optim.optimizer import RuleOptimizer

TORCH_NAMES = {"step": "step", "exp_avg": "m", "exp_avg_sq": "v"}
"""Our names for the state of torch.optim.Adam."""
LOAD_FROM_ADAMW = (
    "load mvngrad.from_adamw(optimizer, state_dict) or, in a framework that loads it, call "
    "optimizer.register_load_state_dict_pre_hook(mvngrad.from_adamw) before"
)
"""What to do with a state_dict of AdamW."""
AS_FLOATS = "int8 as float32"
"""The `state_dtype` in a state_dict whose 8-bit state is saved as floats, because parameters are sharded."""
CODES, SCALE, LAYOUT = "unsharded_int8_codes (load other checkpoints into float32 state first)", "scale", "layout"
"""The parts of saved 8-bit blocks. torch.distributed.checkpoint shows the first name if a checkpoint lacks it."""
AVERAGES = formats.ALL_NAMES - {"low"}
"""The names of state that depends on `state_dtype`."""


@dataclass(frozen=True)
class RawTensor:
    """A loaded tensor, wrapped so that torch's `load_state_dict` does not cast it to its parameter's dtype."""

    value: Tensor


def check_and_copy(optimizer: RuleOptimizer, state_dict: Any) -> dict[str, Any]:
    """The state_dict with copies of its tensors in the optimizer's format; a ValueError if it does not fit."""
    _check_structure(state_dict)
    states, groups, own_groups = state_dict["state"], state_dict["param_groups"], optimizer.param_groups
    if _is_from_torch(states):
        name = type(optimizer).__name__
        remedy = f"; load mvngrad.convert_state_dict(state_dict, {own_groups[0]['state_dtype']!r})"
        if optimizer.rule != ADAM:
            remedy = f", and {name} has {_list_state(optimizer)}: {LOAD_FROM_ADAMW}"
        raise ValueError(f"not a state_dict of {name}: it has exp_avg, as torch.optim's do{remedy}")
    states = unpack_states(states)
    check_group_sizes(groups, own_groups)
    _check_cell(optimizer, states, groups)
    new_groups = [_complete_group(optimizer, saved, own) for saved, own in zip(groups, own_groups, strict=True)]
    saved_ids = chain.from_iterable(saved["params"] for saved in groups)
    members = [(param, new) for own, new in zip(own_groups, new_groups, strict=True) for param in own["params"]]
    owners = dict(zip(saved_ids, members, strict=True))
    if unknown := [key for key in states if key not in owners]:
        raise ValueError(f"corrupted state_dict: it has state for {unknown[:3]}, which are not among its parameters")
    copies = {key: _copy_state(optimizer, owners[key][0], owners[key][1], saved) for key, saved in states.items()}
    return {**state_dict, "state": copies, "param_groups": new_groups}


def _check_structure(state_dict: Any) -> None:
    """Raise a ValueError if an object does not have the structure of an optimizer's state_dict."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        parts = state_dict.items() if isinstance(state_dict, Mapping) else ()
        inner = [key for key, part in parts if isinstance(part, Mapping) and {"state", "param_groups"} <= part.keys()]
        remedy = f"; it looks like a whole checkpoint: pass its {inner[0]!r}" if inner else ""
        raise ValueError(
            f"not an optimizer's state_dict: it is {_describe(state_dict)}, without state and param_groups{remedy}"
        )
    groups = state_dict["param_groups"]
    has_groups = isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )
    if not has_groups or not isinstance(state_dict["state"], Mapping):
        raise ValueError("corrupted state_dict: state must be a dict, param_groups a list of dicts with params")


def _is_from_torch(states: Mapping[Any, Any]) -> bool:
    return any(isinstance(saved, Mapping) and "exp_avg" in saved for saved in states.values())


def check_group_sizes(saved: Sequence[Group], own: Sequence[Group]) -> None:
    """Raise a ValueError if a state_dict and an optimizer have groups of different sizes."""
    sizes, own_sizes = ([len(group["params"]) for group in groups] for groups in (saved, own))
    if sizes != own_sizes:
        raise ValueError(
            f"the state_dict's groups hold {sizes} parameters, the optimizer's {own_sizes}: give both the same"
        )


def get_state_names(saved: Mapping[Any, Any]) -> list[str]:
    """The names of the averages in the saved state of a parameter."""
    return [name for name in saved if name in AVERAGES and not name.endswith("_scale")]


def get_other_entries(saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """What is not averages in the saved state of a parameter: step, low, and entries of a hook or a wrapper."""
    return {name: value for name, value in saved.items() if name not in AVERAGES}


def clone_other_entries(saved: Mapping[Any, Any]) -> dict[Any, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in get_other_entries(saved).items()
    }


def load_wide(names: Sequence[str], saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Saved state as floats: of 64 bits if it has them, else of 32."""
    is_double = view_as_real(saved[names[0]]).dtype == torch.float64
    return formats.load_state(names, saved, torch.float64 if is_double else torch.float32)


def _list_state(optimizer: RuleOptimizer) -> str:
    return ", ".join(optimizer.get_rule(optimizer.param_groups[0]).state_names)


def _check_cell(optimizer: RuleOptimizer, states: Mapping[Any, Any], groups: list[Group]) -> None:
    """Raise a ValueError that names the cell of a state_dict, if it is another one.

    The cell is recognized by its state or, before the first step, by the options of its groups.
    """
    saved = next((saved for saved in states.values() if isinstance(saved, Mapping) and saved), {})
    names = {*get_state_names(saved)}
    options = {option for option in MVNGRAD.options if any(option in group for group in groups)}
    from_mvngrad = all("state_dtype" in group for group in groups)
    source = next((rule for rule in (*CELLS, LEAN) if names == {*rule.state_names}), None)
    if not names and from_mvngrad:
        source = next((rule for rule in CELLS if options == {*rule.options}), None)
    if source is not None and (MVNGRAD if source is LEAN else source) != optimizer.rule:
        name, cell = type(optimizer).__name__, source.name.replace("-", "").removeprefix("lean ")
        raise ValueError(
            f"not a state_dict of {name}: its state is {', '.join(source.state_names)}, as that of {cell} and {cell}W, "
            f"and {name} has {_list_state(optimizer)}: load it into mvngrad.{cell} or {cell}W, or start {name} without "
            "loading"
        )


def rename_torch_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state_dict of torch.optim.Adam or AdamW under our names; others as they are."""
    states, groups = state_dict["state"], state_dict["param_groups"]
    if not _is_from_torch(states):
        return state_dict
    is_adam = all(saved.keys() <= TORCH_NAMES.keys() for saved in states.values())
    if not (is_adam and all("amsgrad" in group for group in groups)):
        raise ValueError("of torch.optim only the state of Adam and AdamW, without amsgrad, can be converted")
    return {
        **state_dict,
        "state": {key: {TORCH_NAMES[name]: value for name, value in saved.items()} for key, saved in states.items()},
        "param_groups": [{name: value for name, value in group.items() if name != "amsgrad"} for group in groups],
    }


def _complete_group(optimizer: RuleOptimizer, saved: Group, own: Group) -> Group:
    """The saved group, completed from the optimizer's own; a ValueError if the optimizer cannot have it."""
    name, rule = type(optimizer).__name__, optimizer.rule
    needed = {"lr", "betas", "eps", "weight_decay", *rule.options} - {"lean"}
    foreign = {option for option in rule.missing_options if option in saved}
    if foreign or not needed <= saved.keys():
        differs = sorted(foreign or needed - saved.keys())
        remedy = f"; if it is AdamW's, {LOAD_FROM_ADAMW}" if "amsgrad" in saved else ""
        if "betas" not in saved:
            remedy = "; of other optimizers only Adam and AdamW can be converted (mvngrad.from_adamw)"
        raise ValueError(f"not a state_dict of {name}: a group {'has' if foreign else 'lacks'} {differs}{remedy}")
    if saved.get("decoupled_weight_decay", optimizer.decoupled) != optimizer.decoupled:
        decay = "coupled" if optimizer.decoupled else "decoupled"
        raise ValueError(f"not a state_dict of {name}: its weight decay is {decay}")
    if saved.get("amsgrad"):
        raise ValueError(f"not a state_dict of {name}: it has amsgrad=True")
    bits = saved.get("master_bits") or own["master_bits"]  # without it, masters begin at the parameters
    for option, before, now, remedy in (
        ("lean", bool(saved.get("lean")), bool(own.get("lean")), "start it without loading"),
        ("master_bits", bits, own["master_bits"], "load the weights by mvngrad.load_master_state_dict"),
    ):
        if before != now:
            raise ValueError(
                f"not a state_dict of {name}({option}={now}): it was saved with {option}={before}; make the optimizer "
                f"with that, or {remedy}"
            )
    saved_dtype, own_dtype = _get_family(saved.get("state_dtype")), _get_family(own["state_dtype"])
    if saved_dtype != own_dtype:
        targets = [_get_target(group) for group in optimizer.param_groups]
        target = targets[0] if all(each == targets[0] for each in targets) else targets
        raise ValueError(
            f"the state_dict has its state in {saved_dtype}, this optimizer in {own_dtype}: make the optimizer with "
            f"that state_dtype, or load mvngrad.convert_state_dict(state_dict, {target!r})"
        )
    kept = {name: own[name] for name in ("state_dtype", "master_bits", "differentiable")}
    filled = {**own, "decouple_lr": False, **saved, **kept}
    check_group(filled, rule, optimizer.decoupled, name)
    return filled


def _get_target(group: Group) -> Any:
    """The `state_dtype` to give `convert_state_dict`, so that a group can load the result."""
    sharded = group["state_dtype"] == "int8" and any(map(is_sharded, group["params"]))
    return AS_FLOATS if sharded else group["state_dtype"]


def _get_family(state_dtype: Any) -> str:
    """How a checkpoint's state was rounded: the wide floats are one family, as in torch."""
    if state_dtype in ("int8", AS_FLOATS):
        return "int8"
    return "bfloat16" if state_dtype in (torch.bfloat16, "bfloat16") else "float32"


def get_dtype_name(state_dtype: torch.dtype | str | None, as_floats: bool) -> str | None:
    """The name of a `state_dtype` in checkpoints: torch.distributed.checkpoint cannot store dtypes."""
    if state_dtype == "int8" and as_floats:
        return AS_FLOATS
    return None if state_dtype is None else _get_family(state_dtype)


def _copy_state(optimizer: RuleOptimizer, param: Tensor, group: Group, saved: Any) -> dict[str, Any]:
    """A copy of the saved state of one parameter, in the group's format; a ValueError if it does not fit."""
    names, state_format = optimizer.get_rule(group).state_names, formats.get_format(group["state_dtype"], param)
    if not isinstance(saved, Mapping):
        raise ValueError(f"corrupted state_dict: the state of a parameter is {_describe(saved)}, not a dict")
    if not saved:
        return {}
    stored = state_format.allocate(names, param)
    known = AVERAGES if group["master_bits"] else formats.ALL_NAMES  # `low` without masters is refused below
    averages = {name: value for name, value in saved.items() if name in known}
    if "step" not in saved or averages.keys() not in ({*stored}, {*names}):
        raise ValueError(
            f"not a state_dict of {type(optimizer).__name__}: it has {sorted({'step', *stored})} for each parameter, "
            f"this one {sorted(saved.keys() & {'step', *averages})}"
        )
    step = make_step_count(parse_steps(saved["step"]), param, group)
    for name, value in averages.items():
        _check_tensor(name, value, param, stored[name], floats=f"{names[0]}_scale" not in averages)
    low = copy_low(saved, param, group["master_bits"])
    if state_format is not formats.INT8:
        for name, tensor in stored.items():
            view_as_real(tensor).copy_(view_as_real(averages[name]))
    elif averages.keys() == {*stored} and all(averages[name].stride() == stored[name].stride() for name in names):
        for name, tensor in stored.items():
            tensor.copy_(averages[name])
    else:  # floats, or blocks of other strides
        if is_sharded(param):
            averages = {name: get_local_like(averages[name], param) for name in names}
        state_format.store(stored, formats.load_state(names, averages, torch.float32))
    return clone_other_entries(saved) | {
        name: RawTensor(value) for name, value in {"step": step, **stored, **low}.items()
    }


def copy_low(saved: Mapping[str, Any], param: Tensor, master_bits: int | None) -> dict[str, Tensor]:
    """A copy of `low` in the saved state of a parameter; without it, zeros: the master equals its parameter."""
    low = formats.allocate_low(master_bits, param)
    if low and "low" in saved:
        value, own = saved["low"], _view_as_bytes(low["low"])
        get_properties = attrgetter("dtype", "shape", "layout", "is_meta")
        if not isinstance(value, Tensor) or get_properties(value) != get_properties(own):
            raise ValueError(f"corrupted state_dict: low is {_describe(value)}, where it must be {_describe(own)}")
        own.copy_(value)
    return low


def _view_as_bytes(low: Tensor) -> Tensor:
    """A view of `low` as it is saved. 16 bits become a last dimension of 2 bytes: gloo and NCCL cannot send int16."""
    if low.dtype == torch.int8:
        return low
    pairs = get_local(low)[..., None].view(torch.int8)
    return _make_sharded(pairs, low) if is_sharded(low) else pairs


def parse_steps(value: Any) -> float:
    """The number of steps in a saved state, a number or a tensor; a ValueError if it is not a count."""
    single = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    steps = float(value) if single and not torch.is_complex(torch.as_tensor(value)) else -1.0
    if not (steps >= 0 and steps == steps // 1):
        raise ValueError(f"corrupted state_dict: step is {value!r}, not a count")
    return steps


def _check_tensor(name: str, value: Any, param: Tensor, stored: Tensor, floats: bool) -> None:
    """Raise a ValueError if a saved tensor does not fit: as `floats` its parameter, else `stored` codes or scales."""
    if is_sharded(param) and (not floats or isinstance(value, int)):
        raise ValueError(
            f"{name} is in 8-bit blocks of an unsharded parameter, which cannot be cut into shards: convert the "
            f"state_dict of the unsharded optimizer by mvngrad.convert_state_dict(state_dict, {AS_FLOATS!r}), and load "
            "that by set_optimizer_state_dict with full_state_dict=True"
        )
    like = view_as_real(param.detach()) if floats else stored
    fits = (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.is_meta == param.is_meta
        and view_as_real(value).shape == like.shape
        and (view_as_real(value).is_floating_point() if floats else value.dtype == stored.dtype)
    )
    if not fits:
        raise ValueError(
            f"the state_dict does not fit: {name} is {_describe(value)} for a parameter that is {_describe(param)}; "
            "is it the checkpoint of another model?"
        )
    if is_sharded(value) != is_sharded(param):
        problem, remedy = (
            (f"{name} is sharded, its parameter whole", "save it by get_optimizer_state_dict")
            if is_sharded(value)
            else (f"{name} is whole, its parameter sharded", "load it by set_optimizer_state_dict")
        )
        raise ValueError(f"{problem}: {remedy} of torch.distributed.checkpoint.state_dict, with full_state_dict=True")
    readable = floats and type(value) is Tensor and not value.is_meta
    if readable and name in formats.SQUARES and bool((view_as_real(value) < 0).any()):
        raise ValueError(f"corrupted state_dict: {name} has negative values, which an average of squares cannot have")


def _describe(value: Any) -> str:
    return f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def make_portable(optimizer: RuleOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state_dict as torch.distributed.checkpoint takes it, for any number of processes.

    Dtypes become their names. 8-bit state becomes floats if a parameter of the optimizer is sharded, because blocks
    cannot be cut at the borders of shards; nothing is lost: floats decoded from codes are encoded as the same values.
    Otherwise it stays in blocks. The low bits of masters become bytes.
    """
    sharded = any(is_sharded(param) for group in optimizer.param_groups for param in group["params"])
    states, groups = dict(state_dict["state"]), []
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        groups.append({**saved, "state_dtype": get_dtype_name(group["state_dtype"], sharded)})
        names = optimizer.get_rule(group).state_names
        for key, param in zip(saved["params"], group["params"], strict=True):
            stored = unpack_blocks(states.get(key, {}))  # packed if ZeroRedundancyOptimizer has just loaded them
            if "low" in stored:
                stored = states[key] = {**stored, "low": _view_as_bytes(stored["low"])}
            if f"{names[0]}_scale" in stored and sharded:
                values = formats.load_state(names, stored, torch.float32)
                if is_sharded(param):
                    values = {name: _make_sharded(value, param) for name, value in values.items()}
                states[key] = get_other_entries(stored) | values
            elif f"{names[0]}_scale" in stored:
                states[key] = pack_blocks(names, stored)
    return {**state_dict, "state": states, "param_groups": groups}


def pack_blocks(names: Sequence[str], stored: Mapping[str, Tensor]) -> dict[str, Any]:
    """8-bit state of a parameter as it is saved: `m_scale` has codes in memory order, scales and layout, `m` is 8.

    Codes have a name that sharded state, saved as floats, does not have: torch.distributed.checkpoint would read them
    as floats. The numbers 8 reach every process that such state is broadcast to, so that all refuse it alike.
    """
    packed: dict[str, Any] = get_other_entries(stored)
    for name in names:
        codes = stored[name]
        layout = torch.tensor([codes.shape, codes.stride()], dtype=torch.int64, device="cpu")
        packed[f"{name}_scale"] = {CODES: formats.to_row(codes, codes), SCALE: stored[f"{name}_scale"], LAYOUT: layout}
    return packed | dict.fromkeys(names, formats.CODE_BITS)


def unpack_states(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """The saved state of each parameter, unpacked.

    torch.distributed.checkpoint, if it was given the optimizer itself, loads tensors in place, but adds numbers to
    other dicts, under the text of the key.
    """
    keys = {str(key): key for key in states if isinstance(key, int)}
    numbers = {keys[text]: saved for text, saved in states.items() if text in keys}
    return {
        key: unpack_blocks({**saved, **numbers[key]} if key in numbers else saved)
        for key, saved in states.items()
        if key not in keys
    }


def unpack_blocks(saved: Any) -> Any:
    """The saved state of a parameter with packed blocks as codes and scales; any other value unchanged.

    If floats and blocks are there, the blocks are those of the optimizer before loading: torch's set_state_dict adds
    what it has not found. Its flattened form has empty dicts for them.
    """
    if not isinstance(saved, Mapping):
        return saved
    flat = {name: value for name, value in saved.items() if name not in AVERAGES or not isinstance(value, Mapping)}
    for scale_name, blocks in saved.items():
        name = str(scale_name).removesuffix("_scale")
        packed = isinstance(blocks, Mapping) and blocks.keys() == {CODES, SCALE, LAYOUT}
        if packed and not isinstance(saved.get(name), Tensor):
            try:
                shape, strides = blocks[LAYOUT].tolist()
                codes = blocks[CODES].as_strided(shape, strides)
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:
                raise ValueError(f"corrupted state_dict: the layout of the 8-bit codes of {name}: {error}") from error
            flat |= {name: codes, scale_name: blocks[SCALE]}
    return flat


def _make_sharded(part: Tensor, param: Any) -> Tensor:
    """The local part of a state tensor as a DTensor, placed as its parameter is."""
    from torch.distributed.tensor import DTensor

    whole = view_as_real(param.detach())
    shape, stride = whole.shape, whole.stride()
    if part.dim() > whole.dim():  # pairs of bytes
        shape, stride = torch.Size((*shape, 2)), (*(2 * each for each in stride), 1)
    return DTensor.from_local(part, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride)
