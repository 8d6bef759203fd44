"""Read optimizer state in the paper's letters m, v, s and u, from all coordinates or from a sample of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from mvngrad.optim import formats
from mvngrad.optim.inputs import Group, make_hyper
from mvngrad.optim.optimizer import RuleOptimizer
from mvngrad.optim.tensors import get_local, view_as_real
from mvngrad.rule import ADAM, Hyper, Rule

SAMPLE = 2**12
"""The default number of coordinates that are sampled from a group. It bounds the standard error of a share by 0.8%, and
a group of a billion coordinates costs no more than one of a million."""


Key = tuple[torch.device, torch.dtype]


class GroupView(NamedTuple):
    """The cell and hyper-parameters of a group, and the name of each letter in the optimizer's state."""

    rule: Rule
    hyper: Hyper
    names: dict[str, str]


def view_group(optimizer: Optimizer, group: Group) -> GroupView:
    """Get the cell, hyper-parameters and state names of a group; `hyper.lr` is a number or a tensor, as in the group.

    Raises:
        TypeError: the state of this optimizer is unknown.
    """
    if isinstance(optimizer, RuleOptimizer):
        rule = optimizer.get_rule(group)
        return GroupView(rule, _read_hyper(group), {letter: letter for letter in rule.state_names})
    if isinstance(optimizer, torch.optim.Adam):  # includes AdamW
        names = {"m": "exp_avg", "v": "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"}
        return GroupView(ADAM, _read_hyper(group), names)
    raise TypeError(
        f"{type(optimizer).__name__} is not an optimizer of mvngrad, nor torch.optim.Adam or AdamW: its state is "
        "unknown; if it wraps one of these, pass the inner optimizer"
    )


def _read_hyper(group: Group) -> Hyper:
    """The hyper-parameters of a group as Python numbers, which JSON takes; lr may be a tensor on a device."""
    hyper = make_hyper(group, group["lr"])
    numbers = {name: value.item() for name, value in hyper._asdict().items() if hasattr(value, "item") and name != "lr"}
    return hyper._replace(**numbers)  # NumPy's numbers have item() too


def count_coordinates(param: Tensor) -> int:
    """The number of real coordinates of a parameter's local part."""
    return view_as_real(get_local(param)).numel()


def get_extent(param: Tensor) -> tuple[int, torch.device]:
    """What a sample of a parameter depends on: the number of its coordinates and their device."""
    return count_coordinates(param), get_local(param).device


def load_values(state: dict[str, Any], name: str, dtype: torch.dtype) -> Tensor:
    """The local part of a state tensor as floats; the tensor itself if it has that dtype."""
    return formats.load_state((name,), {key: get_local(value) for key, value in state.items()}, dtype)[name]


def load_values_at(state: dict[str, Any], name: str, index: Tensor | None) -> Tensor:
    """The values of a state tensor at flat indices, or all values, as a row."""
    tensor, scale = view_as_real(get_local(state[name])), state.get(f"{name}_scale")
    if scale is not None and index is not None and tensor.is_contiguous():  # decode only the sampled codes
        return formats.INT8.decode(name, torch.take(tensor, index), scale[..., index // formats.BLOCK])
    if scale is not None:
        tensor = load_values(state, name, torch.float32)
    return tensor.reshape(-1) if index is None else torch.take(tensor, index)


def pick_large_params(params: Sequence[Tensor], count: int) -> list[Tensor]:
    """Cut the list of parameters into `count` parts and pick the largest of each, so that not all are embeddings.

    Only parameters on the device of the largest one count, so that their values can be concatenated.
    """
    if not params:
        return []
    device = get_local(max(params, key=count_coordinates)).device
    here = [param for param in params if get_local(param).device == device]
    length = -(-len(here) // count)
    return [max(here[i : i + length], key=count_coordinates) for i in range(0, len(here), length)]


class Piece(NamedTuple):
    """The sampled coordinates of one parameter: their indices in its local part (None: all), and their number."""

    param: Tensor
    indices: Tensor | None
    size: int


class Sample:
    """`size` random coordinates of a list of parameters, drawn with equal probability; all if there are no more."""

    def __init__(self, params: Sequence[Tensor], size: int, seed: int) -> None:
        counts = [count_coordinates(param) for param in params]
        self.population = sum(counts)
        self.pieces = list(self._draw(params, counts, size, seed))
        """One for each parameter that has sampled coordinates."""
        self._extents = [get_extent(piece.param) for piece in self.pieces]

    def _draw(self, params: Sequence[Tensor], counts: list[int], size: int, seed: int) -> Iterator[Piece]:
        """Draw the coordinates; `counts` are how many each parameter has."""
        if self.population <= size:
            yield from (Piece(param, None, count) for param, count in zip(params, counts, strict=True) if count)
            return
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(self.population, (size,), generator=generator, device="cpu").sort().values
        ends = torch.tensor(counts, device="cpu").cumsum(0)
        cuts = [0, *torch.searchsorted(drawn, ends).tolist()]
        for param, end, count, start, stop in zip(params, ends.tolist(), counts, cuts[:-1], cuts[1:], strict=True):
            if stop > start:
                index = (drawn[start:stop] - (end - count)).to(get_local(param).device)
                yield Piece(param, index, stop - start)

    def is_current(self, optimizer: Optimizer) -> bool:
        """Whether all sampled parameters have state, and were neither resized nor moved since."""
        return all(
            optimizer.state.get(piece.param) and get_extent(piece.param) == extent
            for piece, extent in zip(self.pieces, self._extents, strict=True)
        )

    def load_rows(self, optimizer: Optimizer, name: str) -> list[Tensor]:
        """The sampled values of a state tensor, one row for each sampled parameter."""
        return [load_values_at(optimizer.state[piece.param], name, piece.indices) for piece in self.pieces]

    def step_counts(self, optimizer: Optimizer) -> list[Tensor]:
        """The step counts of the sampled parameters."""
        return [optimizer.state[piece.param]["step"] for piece in self.pieces]

    def per_coordinate(self, values: Tensor) -> Tensor:
        """Expand a row of one value per sampled parameter to one per coordinate; a single value if all are equal."""
        if len(set(values.tolist())) == 1:  # usually all parameters have taken the same number of steps
            return values[:1]
        return values.repeat_interleave(torch.tensor([piece.size for piece in self.pieces], device="cpu"))


def copy_to_host(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The values of each list of tensors as one float64 row on the host, in one copy from each device.

    >>> copy_to_host([[torch.ones(2), torch.zeros(())], []])
    [tensor([1., 1., 0.], dtype=torch.float64), tensor([], dtype=torch.float64)]
    """
    rows: dict[Key, list[Tensor]] = {}
    sizes: dict[Key, list[int]] = {}
    keys: list[list[Key]] = []
    for tensors in lists:
        keys.append([])
        for key, run in groupby(tensors, lambda tensor: (tensor.device, tensor.dtype)):
            flat = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in run]
            rows.setdefault(key, []).extend(flat)
            sizes.setdefault(key, []).append(sum(map(Tensor.numel, flat)))
            keys[-1].append(key)
    copies: dict[Key, Iterator[Tensor]] = {}
    for device in {device for device, _ in rows}:
        here = [key for key in rows if key[0] == device]
        wide = torch.float32 if device.type == "mps" else torch.float64
        joined = [torch.cat(rows[key]) for key in here]  # by dtype: torch.cat is slow for several
        host = _join([row.to(wide) for row in joined]).cpu().double()
        for key, part in zip(here, host.split_with_sizes([row.numel() for row in joined]), strict=True):
            copies[key] = iter(part.split_with_sizes(sizes[key]))
    empty = torch.empty(0, dtype=torch.float64, device="cpu")
    return [_join([next(copies[key]) for key in each] or [empty]) for each in keys]


def _join(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)
