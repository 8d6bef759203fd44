"""Weights from and to the float32 masters of an optimizer with `master_bits`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mvngrad.optim import formats
from mvngrad.optim.inputs import Group
from mvngrad.optim.tensors import get_local, get_local_like

if TYPE_CHECKING:
    from mvngrad.optim.optimizer import RuleOptimizer


def get_master_state_dict(model: torch.nn.Module, optimizer: RuleOptimizer) -> dict[str, Tensor]:
    """The model's state_dict with float32 masters in place of the bfloat16 parameters that `optimizer` has masters of.

    Load it into a float32 model, or by `load_master_state_dict`. Sharded parameters stay sharded.
    """
    state_dict: dict[str, Tensor] = model.state_dict()  # with the versions of the modules, which a plain dict lacks
    for name, (param, group) in _find_masters(model, optimizer).items():
        master = state_dict[name] = param.detach().float()
        if optimizer.state.get(param):  # before the first step the masters are the parameters
            low = optimizer.get_or_create_state(param, group)["low"]
            get_local(master).copy_(formats.join_master(get_local(param.detach()), get_local(low)))
    return state_dict


def _find_masters(model: torch.nn.Module, optimizer: RuleOptimizer) -> dict[str, tuple[Tensor, Group]]:
    """The model's parameters that have masters, each with its group, by their names in the model's state_dict.

    Raises a TypeError if the optimizer is a wrapper, and a ValueError if it steps another model.
    """
    if not hasattr(optimizer, "get_or_create_state"):
        raise TypeError(
            f"master weights: pass an optimizer of mvngrad; {type(optimizer).__name__} has none of their state. If it "
            "wraps one, pass that: optimizer.optimizer in accelerate, optimizer.optim in ZeroRedundancyOptimizer"
        )
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    # named_parameters may have other names, and extra state of a module may be any object
    named = {name: param for name, param in model.state_dict(keep_vars=True).items() if isinstance(param, Tensor)}
    trained = [param for param in named.values() if param.requires_grad]
    if trained and groups and not any(param in groups for param in trained):
        raise ValueError(
            "master weights: the optimizer steps none of this model's parameters; pass the model that it steps, not a "
            "copy of it (FullyShardedDataParallel makes copies: use fully_shard, FSDP2)"
        )
    return {name: (p, groups[p]) for name, p in named.items() if p in groups and groups[p]["master_bits"]}


class _LoadedValues(TorchFunctionMode):
    """Collects what a model's `load_state_dict` copies into each parameter: modules may rename and change weights."""

    def __init__(self) -> None:
        super().__init__()
        self.by_param: dict[Tensor, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.copy_, Tensor.module_load) and len(args) > 1:
            self.by_param[args[0]] = args[1]
        return func(*args, **(kwargs or {}))


def load_master_state_dict(model: torch.nn.Module, optimizer: RuleOptimizer, state_dict: Mapping[str, Tensor]) -> None:
    """Load float32 weights into a bfloat16 model, with the bits that it lacks into the state of `optimizer`.

    With `master_bits=32` nothing is lost; with 24 masters are rounded to the nearest.
    """
    masters = _find_masters(model, optimizer)
    with _LoadedValues() as loaded:
        model.load_state_dict(state_dict)
    optimizer.init_state()
    with torch.no_grad():
        for name, (param, group) in masters.items():  # frozen ones too: they may be trained later
            low, part = optimizer.get_or_create_state(param, group)["low"], get_local(param)
            source = loaded.by_param.get(param, state_dict.get(name, param))
            value = get_local_like(source, param).to(part.device)
            is_loaded = value.to(part.dtype) == part  # else the model changed it after loading
            formats.split_master(torch.where(is_loaded, value.float(), part.float()), part, get_local(low))
