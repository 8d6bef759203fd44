"""Which options a group may have, alone and together, and which parameters can be stepped with them."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mvngrad.optim.formats import LOW_DTYPES, ROUNDED_DTYPES, STATE_DTYPES, invalid_state_dtype_message
from mvngrad.optim.inputs import LEAN_WITH_BETA_MEAN, TENSOR_OPTIONS, Group, make_hyper
from mvngrad.optim.tensors import is_flat_shard
from mvngrad.rule import CELLS, Hyper, Rule

Init = TypeVar("Init", bound=Callable[..., None])

OPTIONS = {"eps_s": 1e-16, "beta_mean": None, "lean": False, "z_clip": None}
"""Arguments that not every cell has, with their defaults in those that do."""
FLAGS = (
    "decouple_lr", "lean", "stochastic_rounding", "foreach", "fused", "maximize", "capturable", "differentiable",
)  # fmt: skip
"""Arguments that are True or False; None is the default or False."""


def name_called_class(init: Init) -> Init:
    """Decorate an `__init__`: a TypeError about its arguments names the class that was called, not the base class."""

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError:
            _check_arguments(init, self, args, kwargs)
            raise

    return cast(Init, wrapped)


def _check_arguments(init: Callable[..., None], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise a TypeError if arguments do not fit a signature; it suggests the argument whose name is closest."""
    signature = inspect.signature(init)
    try:
        signature.bind(owner, *args, **kwargs)
    except TypeError as error:
        names = [name for name in signature.parameters if name not in ("self", *owner.rule.missing_options)]
        unknown = next((name for name in kwargs if name not in signature.parameters), "")
        similar = difflib.get_close_matches(unknown, names, n=1)
        hint = f". Did you mean {similar[0]!r}?" if similar else ""
        raise TypeError(f"{type(owner).__name__}.__init__() {error}{hint}") from None


def check_group(group: Group, rule: Rule, decoupled: bool, name: str) -> None:
    """Raise a ValueError if an option of a group is invalid for a cell; the message begins with the class's `name`."""
    check_missing_options(group, rule, name)
    for flag in FLAGS:
        if group.get(flag) not in (None, False, True):  # "False", from a command line, would be true
            raise ValueError(f"{name}: {flag}={group[flag]!r} is invalid; it must be True or False")
    _check_decay(group, decoupled, name)
    if group.get("lean") and group["beta_mean"] is not None:
        raise ValueError(f"{name}: {LEAN_WITH_BETA_MEAN}")
    _check_hyper(group, rule, name)
    _check_formats(group, name)
    enabled = [option for option in ("foreach", "fused", "differentiable") if group[option]]
    if len(enabled) > 1:
        raise ValueError(f"{name}: {enabled[0]}=True and {enabled[1]}=True exclude each other; choose one")


def check_missing_options(group: Group, rule: Rule, name: str) -> None:
    """Raise a ValueError if a group has an option that only other cells have."""
    for option in rule.missing_options:
        if option in group:
            owners = ", ".join(cell.name for cell in CELLS if option in cell.options)
            raise ValueError(f"{name} has no {option}={group[option]!r}; it belongs to {owners}")


def check_differentiable(group: Group, defaults: Mapping[str, Any], name: str) -> None:
    """Raise a ValueError if a group's `differentiable` is not the optimizer's."""
    if bool(group.get("differentiable", defaults["differentiable"])) != bool(defaults["differentiable"]):
        raise ValueError(
            f"{name}: differentiable={group['differentiable']} cannot be set for one group; pass it to the "
            "constructor, for all groups"
        )


def _check_decay(group: Group, decoupled: bool, name: str) -> None:
    if group["decoupled_weight_decay"] != decoupled:
        raise ValueError(f"{name}: decoupled_weight_decay cannot be set; use the class whose name ends in W")
    if not group["decouple_lr"]:
        return
    if not decoupled:
        raise ValueError(f"{name}: decouple_lr=True is for decoupled weight decay; use {name}W")
    check_number("weight_decay", group, name)
    max_lr: Any = group.get("max_lr")
    if not (hasattr(max_lr, "__float__") and 0 < max_lr < float("inf")):
        raise ValueError(
            f"{name}: max_lr={max_lr!r} is invalid; with decouple_lr=True it must be the largest lr of the schedule: "
            "name it in the group, or add the group with that lr"
        )


def check_number(option: str, group: Group, name: str) -> None:
    """Raise a ValueError if lr or weight_decay is not one number; `Rule.check` checks its range."""
    _check_one_element(option, group, name)
    if not hasattr(group[option], "__float__"):
        raise ValueError(f"{name}: {option}={group[option]!r} is invalid; it must be finite and >= 0")


def _check_one_element(option: str, group: Group, name: str) -> None:
    value = group.get(option)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name}: {option} has {value.numel()} elements; a tensor {option} must have one")


def _check_hyper(group: Group, rule: Rule, name: str) -> None:
    lr, betas = group["lr"], group["betas"]
    for option in ("lr", *TENSOR_OPTIONS):
        _check_one_element(option, group, name)
    pair = isinstance(betas, Sequence) and len(betas) == 2
    if not (pair and all(isinstance(beta, Real) for beta in betas)):
        tensors = pair and any(isinstance(beta, Tensor) for beta in betas)
        remedy = "not tensors: pass float(beta)" if tensors else "such as (0.9, 0.999)"
        raise ValueError(f"{name}: betas={betas!r} is invalid; it must be two numbers in [0, 1), {remedy}")
    values: list[Any] = [value.detach() if isinstance(value, Tensor) else value for value in make_hyper(group, lr)]
    rule.check(Hyper(*values), name)
    if rule.centered and (floor := make_hyper(group, 0.0).floor) >= 1:
        warnings.warn(
            f"{name}: eps_s={group['eps_s']:g} keeps sqrt(s) above {floor:.2g}, so gradients are barely "
            f"normalized; choose a smaller one, or did you mean weight_decay={group['eps_s']:g}?",
            stacklevel=_get_stacklevel(),
        )


def _get_stacklevel() -> int:
    """The `stacklevel` by which a warning of the calling function names the first line outside mvngrad and torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("mvngrad", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def _check_formats(group: Group, name: str) -> None:
    """Raise a ValueError if an option is invalid that says how state and parameters are stored and rounded."""
    if group["state_dtype"] not in STATE_DTYPES:
        raise ValueError(f"{name}: {invalid_state_dtype_message(group['state_dtype'])}")
    seed = group["rounding_seed"]
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**32):
        raise ValueError(f"{name}: rounding_seed={seed!r} is invalid; it must be an integer in [0, 2**32), or None")
    if group["differentiable"] and (group["state_dtype"] in ROUNDED_DTYPES or group["stochastic_rounding"]):
        raise ValueError(
            f"{name}: differentiable=True needs a step without rounding; leave state_dtype=None "
            "and stochastic_rounding=False"
        )
    if group["master_bits"] not in (None, *LOW_DTYPES):
        raise ValueError(f"{name}: master_bits={group['master_bits']!r} is invalid; it must be None, 24 or 32")
    if group["master_bits"]:
        for option in ("stochastic_rounding", "foreach", "differentiable"):
            if group[option]:
                raise ValueError(f"{name}: master_bits and {option}=True exclude each other; choose one")


def rounds_params(group: Group) -> bool:
    """Whether parameters, or their 24-bit masters, are rounded at random."""
    return bool(group["stochastic_rounding"] or group["master_bits"] == 24)


def check_param(param: Tensor, group: Group, name: str) -> None:
    """Raise a ValueError if a parameter cannot be stepped with the options of its group."""
    if param.is_floating_point() and param.dtype.itemsize < 2:
        raise ValueError(
            f"{name} steps parameters of 16 bits and more; here is one of {param.dtype}: step a bfloat16 or float32 "
            "copy of it"
        )
    if group["master_bits"] and param.dtype != torch.bfloat16:
        raise ValueError(
            f"{name}: master_bits is for bfloat16 parameters; here is one of {param.dtype}: cast it, or give it a "
            "group of its own with master_bits=None"
        )
    if group["stochastic_rounding"] and param.dtype == torch.float16:
        raise ValueError(
            f"{name}: stochastic_rounding=True rounds bfloat16 parameters; here is a float16 one: leave it out for "
            "this group, or train in bfloat16"
        )
    if is_flat_shard(param) and (group["state_dtype"] == "int8" or group["master_bits"]):
        option = "master_bits" if group["master_bits"] else "state_dtype"
        raise ValueError(
            f"{name}: FullyShardedDataParallel (FSDP1) cannot save {option}={group[option]!r}, whose state is "
            "integers: use fully_shard (FSDP2), or leave it out"
        )
