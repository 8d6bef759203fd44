"""Bytes that a step must read and write, that its tensor operations touch, and that they hold at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = {"detach", "alias", "view", "view_as_real", "_to_copy", "lift_fresh", "item", "_local_scalar_dense"}


class _Counter(TorchDispatchMode):
    """Counts the bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ in VIEWS:
            return result
        schema = func._schema.arguments
        values = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
        changed = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
        self.bytes += _size([values.get(a.name) for a in schema if not a.is_out])
        self.bytes += _size([values.get(name) for name in changed] if changed else result)
        return result


def _size(values: Any) -> int:
    """The bytes of all tensors in `values`, each counted once: g * g reads g once."""
    return sum({id(leaf): leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}.values())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state tensors, each counted once: parameters may share one table of 8-bit codes."""
    tensors = {
        (part.device, part.data_ptr(), part.nbytes)
        for leaf in tree_leaves([dict(state) for state in optimizer.state.values()])
        if isinstance(leaf, torch.Tensor)
        for part in _parts(leaf)
    }
    return sum(size for _, _, size in tensors)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a subclass consists of; its own nbytes are those of the tensor it represents."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))


def bytes_needed(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that no step can avoid: gradients read, parameters and state read and written."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = sum(param.grad.nbytes for param in params if param.grad is not None)
    return gradients + 2 * sum(param.nbytes for param in params) + 2 * state_bytes(optimizer)


def bytes_touched(step: Callable[[], Any]) -> int:
    """Bytes that the operations of a step read and write."""
    with _Counter() as counter:
        step()
    return counter.bytes


class _Temporaries(TorchDispatchMode):
    """Counts the bytes of tensors that operations created and that are not freed yet."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in inputs and id(leaf) not in self.seen:
                self.seen.add(id(leaf))
                self.now += leaf.nbytes
                self.peak = max(self.peak, self.now)
                weakref.finalize(leaf, self.free, id(leaf), leaf.nbytes)
        return result

    def free(self, leaf: int, size: int) -> None:
        self.seen.discard(leaf)
        self.now -= size


def held_bytes(step: Callable[[], Any], device: str) -> int:
    """Bytes that a step allocates at its peak beyond those allocated before it."""
    if device == "cpu":
        return peak_bytes(step)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_bytes(step: Callable[[], Any]) -> int:
    """The most bytes that tensors created by a step hold at once."""
    with _Temporaries() as temporaries, torch.no_grad():
        step()
    return temporaries.peak
