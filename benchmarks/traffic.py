"""What the tensor operations of a step read and write, and what they hold at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = {"detach", "alias", "view", "view_as_real", "_to_copy", "lift_fresh", "item", "_local_scalar_dense"}


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ in VIEWS:
            return result
        schema = func._schema.arguments
        given = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
        changed = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
        self.bytes += _size([given.get(a.name) for a in schema if not a.is_out])
        self.bytes += _size([given.get(name) for name in changed] if changed else result)
        return result


def _size(values: Any) -> int:
    """The bytes of all tensors in it, each once: g * g reads g once."""
    return sum({id(leaf): leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}.values())


def bytes_touched(step: Callable[[], Any]) -> int:
    with _Counter() as counter:
        step()
    return counter.bytes


class _Temporaries(TorchDispatchMode):
    """Counts the bytes of tensors that operations create, for as long as each lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in known and id(leaf) not in self.seen:
                self.seen.add(id(leaf))
                self.now += leaf.nbytes
                self.peak = max(self.peak, self.now)
                weakref.finalize(leaf, self.free, id(leaf), leaf.nbytes)
        return result

    def free(self, leaf: int, size: int) -> None:
        self.seen.discard(leaf)
        self.now -= size


def peak_of(step: Callable[[], Any]) -> int:
    """The most bytes that tensors created by a step hold at once."""
    with _Temporaries() as temporaries, torch.no_grad():
        step()
    return temporaries.peak
