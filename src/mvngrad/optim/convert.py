"""Conversion of a saved state between formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mvngrad.optim import checkpoint, formats
from mvngrad.optim.tensors import is_sharded


def convert_state_dict(
    state_dict: dict[str, Any], state_dtype: torch.dtype | str | list[torch.dtype | str | None] | None
) -> dict[str, Any]:
    """A copy of an optimizer's state_dict with its state in another dtype, rounded to the nearest.

    `state_dtype` is one for all groups, or a list with one for each group. "int8 as float32" is for optimizers with
    8-bit state and sharded parameters, which cannot load "int8". A state_dict of torch.optim.Adam or AdamW becomes one
    of `mvngrad.Adam` or `AdamW`, which continue as torch's would.

    >>> import mvngrad, torch
    >>> x = torch.nn.Parameter(torch.ones(3))
    >>> x.grad = torch.ones(3)
    >>> small, wide = (mvngrad.MVNGrad([x], state_dtype=dtype) for dtype in ("int8", torch.float32))
    >>> small.step()
    >>> wide.load_state_dict(convert_state_dict(small.state_dict(), torch.float32))
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"convert_state_dict: pass a state_dict, not a {type(state_dict).__name__}")
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "not an optimizer's state_dict: it has no state and param_groups; a flattened one cannot be converted, get "
            "it without flatten_optimizer_state_dict"
        )
    state_dict = checkpoint.rename_torch_state(state_dict)
    groups = state_dict["param_groups"]
    dtypes = state_dtype if isinstance(state_dtype, list) else [state_dtype] * len(groups)
    if len(dtypes) != len(groups):
        raise ValueError(f"state_dtype={state_dtype!r} has {len(dtypes)} dtypes for {len(groups)} groups")
    flat = checkpoint.unpack_states(state_dict["state"])
    sharded = any(is_sharded(value) for saved in flat.values() for value in saved.values())
    targets = [_parse_target(dtype, sharded) for dtype in dtypes]
    target_of = {key: target for group, target in zip(groups, targets, strict=True) for key in group["params"]}
    states = {key: _convert_state(saved, *target_of[key]) for key, saved in flat.items()}
    names = [checkpoint.get_dtype_name(*target) for target in targets]
    groups = [{**group, "state_dtype": name} for group, name in zip(groups, names, strict=True)]
    return {**state_dict, "state": states, "param_groups": groups}


def _parse_target(state_dtype: Any, sharded: bool) -> tuple[Any, bool]:
    """A dtype to convert to, and whether 8-bit state is to be saved as floats. Raises a ValueError if it is invalid."""
    state_dtype = formats.parse_state_dtype(state_dtype)
    as_floats = state_dtype == checkpoint.AS_FLOATS
    state_dtype = "int8" if as_floats else state_dtype
    if state_dtype not in formats.STATE_DTYPES:
        raise ValueError(formats.invalid_state_dtype_message(state_dtype))
    return state_dtype, as_floats or sharded


def _convert_state(saved: Mapping[str, Any], state_dtype: Any, as_floats: bool) -> dict[str, Any]:
    """A copy of the saved state of one parameter in another dtype; without averages if it has none yet."""
    names = checkpoint.get_state_names(saved)
    if not names:
        return checkpoint.clone_other_entries(saved)
    if not isinstance(saved[names[0]], Tensor):
        raise ValueError(
            f"{names[0]} is in 8-bit blocks, which were not read: torch.distributed.checkpoint reads them only into an "
            "optimizer with state_dtype='int8' whose parameters are not sharded; load the checkpoint there, and "
            "convert its state_dict"
        )
    values = checkpoint.load_wide(names, saved)
    first = values[names[0]]
    dtype = torch.float32 if state_dtype == "int8" and as_floats else state_dtype
    target = formats.get_format(dtype or first.dtype, first)
    stored = checkpoint.clone_other_entries(saved) | target.allocate(names, first)
    target.store(stored, values)
    return checkpoint.pack_blocks(names, stored) if target is formats.INT8 else stored
