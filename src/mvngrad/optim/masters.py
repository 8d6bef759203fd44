"""Weights to and from the float32 masters of an optimizer with `master_bits`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mvngrad.optim.formats import join_master, split_master
from mvngrad.optim.optimizer import RuleOptimizer
from mvngrad.optim.tensors import get_local


def get_master_state_dict(model: torch.nn.Module, optimizer: RuleOptimizer) -> dict[str, Tensor]:
    """The model's state_dict with float32 masters in place of the bfloat16 parameters that `optimizer` has masters of.

    Load it into a float32 model, or by `load_master_state_dict`. Sharded parameters stay sharded.
    """
    state_dict: dict[str, Tensor] = dict(model.state_dict())
    for name, param in model.named_parameters(remove_duplicate=False):
        low = optimizer.state.get(param, {}).get("low")
        if low is not None:
            master = torch.empty_like(param, dtype=torch.float32)
            get_local(master).copy_(join_master(get_local(param.detach()), get_local(low)))
            state_dict[name] = master
    return state_dict


def load_master_state_dict(model: torch.nn.Module, optimizer: RuleOptimizer, state_dict: Mapping[str, Tensor]) -> None:
    """Load float32 weights into a bfloat16 model, with the bits that it lacks into the state of `optimizer`.

    With `master_bits=32` nothing is lost; with 24 masters are rounded to the nearest.
    """
    model.load_state_dict(state_dict)
    optimizer.init_state()
    with torch.no_grad():
        for name, param in model.named_parameters():
            low = optimizer.state.get(param, {}).get("low")
            if low is not None:
                value = get_local(state_dict[name]).to(get_local(param).device, torch.float32)
                split_master(value, get_local(param), get_local(low))
