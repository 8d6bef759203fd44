"""Private names of torch that the optimizers use, each with a fallback for a release that renamed it.

With a fallback a step is at worst slower; only `queue_callback`, which `release_gradients` needs, has none. Private
attributes of tensors are read in `tensors.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

try:
    from torch._C._dynamo.guards import TensorGuards as TensorGuards
except ImportError:  # without it every step collects its inputs again: slower, but correct
    TensorGuards = None  # type: ignore[assignment, misc]


def _use_grad(step: Callable[..., Any]) -> Callable[..., Any]:
    """Record gradients in a step only if `differentiable` is set."""

    @functools.wraps(step)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return wrapped


def _default_to_foreach(params: list[torch.Tensor], differentiable: bool, use_fused: bool) -> tuple[bool, bool]:
    return False, not differentiable and all(param.is_cuda for param in params)


use_grad_for_differentiable: Callable[..., Any] = getattr(torch_optimizer, "_use_grad_for_differentiable", _use_grad)
default_to_fused_or_foreach: Callable[..., tuple[bool, bool]] = getattr(
    torch_optimizer, "_default_to_fused_or_foreach", _default_to_foreach
)
UNKNOWN_HOOKS: Mapping[int, Any] = {0: None}
"""Not empty: so every step goes through torch's own wrapper, which calls all hooks."""
global_pre_hooks: Mapping[int, Any] = getattr(torch_optimizer, "_global_optimizer_pre_hooks", UNKNOWN_HOOKS)
global_post_hooks: Mapping[int, Any] = getattr(torch_optimizer, "_global_optimizer_post_hooks", {})
if not hasattr(torch_optimizer, "_global_optimizer_post_hooks"):
    global_pre_hooks = UNKNOWN_HOOKS
check_capture: Callable[[Any], None] = getattr(
    torch_optimizer.Optimizer,
    "_accelerator_graph_capture_health_check",
    # Its name in older releases. Without either, a step in a CUDA graph without capturable=True is not refused.
    getattr(torch_optimizer.Optimizer, "_cuda_graph_capture_health_check", lambda optimizer: None),
)
get_backward_id: Callable[[], int | None] = getattr(torch._C, "_current_graph_task_id", lambda: None)
"""The id of the backward pass that runs in this thread; None in a torch without this function."""


def queue_callback(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that runs in this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_compiled(function: Callable[..., Any]) -> bool:
    """Whether torch.compile returned the function. False if torch renamed this: steps with a scale are then eager."""
    return hasattr(function, "_torchdynamo_orig_callable")
