"""How the two kernels reach tensors: through a table of addresses, with a row for each `Column`.

The Triton kernel and the C++ kernel read the same table. A `Batch` is what one call of a kernel steps.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import torch
from torch import Tensor

from mvngrad.optim.inputs import State, StepInputs
from mvngrad.rule import LOG_OF_ZERO


class Column(IntEnum):
    """What the table has for each tensor: addresses, and the index in its group. M, R and U are adjacent."""

    STEP = 0
    PARAM = 1
    GRAD = 2
    INDEX = 3
    M = 4
    R = 5  # v or s
    U = 6
    M_SCALE = 7
    R_SCALE = 8
    U_SCALE = 9
    LOW = 10  # the bits of masters that bfloat16 parameters lack


COLUMNS = {
    "m": Column.M, "v": Column.R, "s": Column.R, "u": Column.U,
    "m_scale": Column.M_SCALE, "v_scale": Column.R_SCALE, "s_scale": Column.R_SCALE, "u_scale": Column.U_SCALE,
    "low": Column.LOW,
}  # fmt: skip
COORDINATE_COLUMNS = (Column.PARAM, Column.GRAD, Column.M, Column.R, Column.U, Column.LOW)
"""The columns of tensors with a value for each coordinate."""
Copy = tuple[Column, Tensor, Tensor]
"""A column, a copy in the strides that the kernel needs, and the tensor that was copied."""


def make_row(addresses: Sequence[int]) -> Tensor:
    """A row of the table, on the host, in a quarter of the time of torch.tensor."""
    return torch.frombuffer(array("q", addresses), dtype=torch.int64)


class Batch:
    """Parameters of one device, all of one dtype, as their gradients are and their state. It holds none of them."""

    def __init__(self, inputs: StepInputs, selection: list[int] | None) -> None:
        """`selection` are indices into `inputs.params`; None is all of them."""
        self.rule, self.selection = inputs.rule, selection
        self.indices = inputs.indices if selection is None else [inputs.indices[i] for i in selection]
        params, grads, state, _ = self.select(inputs)
        self.device, self.count = params[0].device, len(params)
        self._check_tensors(params, grads, state)
        self.sizes = torch.tensor([param.numel() for param in params], device="cpu")
        # Kernels walk memory in order, so all tensors of a parameter need the strides of its state.
        self.strides = [get_dense_strides(tensor) for tensor in state[self.rule.state_names[0]]]
        self.copied = [
            (column, i)
            for column, tensors in get_columns(params, grads, state).items()
            if column in COORDINATE_COLUMNS
            for i, (tensor, strides) in enumerate(zip(tensors, self.strides, strict=True))
            if tensor.stride() != strides
        ]
        """The tensors with other strides; the kernel works on copies of them."""

    def _check_tensors(self, params: list[Tensor], grads: list[Tensor], state: State) -> None:
        """Raise a ValueError for state on another device, and for tensors that a kernel would read beyond their end."""
        other_devices = {str(tensor.device) for tensors in state.values() for tensor in tensors} - {str(self.device)}
        if other_devices:
            raise ValueError(
                f"state is on {', '.join(other_devices)} and its parameter on {self.device}: move the model before the "
                "first step, or load the state again after moving it"
            )
        wholes = {"gradient": grads} | {name: state[name] for name in (*self.rule.state_names, "low") if name in state}
        for name, tensors in wholes.items():
            for tensor, param in zip(tensors, params, strict=True):
                if tensor.shape != param.shape:
                    raise ValueError(
                        f"{name} has the shape {tuple(tensor.shape)} and its parameter {tuple(param.shape)}: a "
                        "parameter that was resized needs a gradient and a state of its own; remove the old state "
                        "(del optimizer.state[param]), or make a new optimizer"
                    )
        dtypes = {tensor.dtype for name in self.rule.state_names for tensor in state[name]}
        if len(dtypes) > 1:
            raise ValueError(
                f"the state of a parameter is in {', '.join(sorted(map(str, dtypes)))}; all of it must have one dtype"
            )

    def select(self, inputs: StepInputs) -> tuple[list[Tensor], list[Tensor], State, list[Tensor]]:
        """Parameters, gradients, state and step counts of this batch."""
        chosen = self.selection
        if chosen is None:
            return inputs.params, inputs.grads, inputs.state, inputs.steps
        params, grads, steps = ([each[i] for i in chosen] for each in (inputs.params, inputs.grads, inputs.steps))
        return params, grads, {name: [each[i] for i in chosen] for name, each in inputs.state.items()}, steps

    def get_gradient_addresses(self, inputs: StepInputs) -> list[int]:
        addresses = inputs.grad_key.addresses or []
        return addresses if self.selection is None else [addresses[i] for i in self.selection]

    def make_table(self, inputs: StepInputs) -> tuple[Tensor, list[Copy]]:
        """The table, on the host, and the copies whose addresses it has. The copies are not filled yet."""
        columns = {column: list(each) for column, each in get_columns(*self.select(inputs)).items()}
        copies = []
        for column, i in self.copied:
            tensor = columns[column][i]
            columns[column][i] = torch.empty_strided(
                tensor.shape, self.strides[i], dtype=tensor.dtype, device=self.device
            )
            copies.append((column, columns[column][i], tensor))
        rows = [list(map(Tensor.data_ptr, columns[column])) if column in columns else [] for column in Column]
        rows[Column.INDEX] = self.indices
        return torch.tensor([row or [0] * self.count for row in rows], device="cpu"), copies


AnyBatch = TypeVar("AnyBatch", bound=Batch)


def make_batches(
    inputs: StepInputs, make: Callable[[StepInputs, list[int] | None], AnyBatch]
) -> tuple[list[AnyBatch], list[int]]:
    """One batch for each device and set of dtypes, and the indices of the empty parameters, which need none.

    Parameters with the same memory are in different batches, because a kernel steps those of a batch at the same time.
    """
    selections: dict[tuple[Any, ...], list[int]] = {}
    empty = []
    at_address: Counter[int] = Counter()
    stored = inputs.state[inputs.rule.state_names[0]]
    for i, tensors in enumerate(zip(inputs.params, inputs.grads, stored, strict=True)):
        if tensors[0].numel():
            address = tensors[0].data_ptr()
            key = tensors[0].device, at_address[address], *(tensor.dtype for tensor in tensors)
            at_address[address] += 1
            selections.setdefault(key, []).append(i)
        else:
            empty.append(i)
    everything = list(range(len(inputs.params)))
    return [make(inputs, None if chosen == everything else chosen) for chosen in selections.values()], empty


def map_blocks(sizes: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """For each block of a batch, the index of its tensor and its position in that tensor."""
    counts = (sizes + block - 1) // block
    owners = torch.arange(len(sizes), device=sizes.device).repeat_interleave(counts)
    positions = torch.arange(len(owners), device=sizes.device) - (counts.cumsum(0) - counts)[owners]
    return owners.to(torch.int32), positions.to(torch.int32)


def get_columns(
    params: list[Tensor], grads: list[Tensor], state: State, steps: Sequence[Tensor] = ()
) -> dict[Column, Sequence[Tensor]]:
    """The tensors of each column."""
    columns = {Column.STEP: steps, Column.PARAM: params, Column.GRAD: grads}
    return columns | {COLUMNS[name]: tensors for name, tensors in state.items()}


def get_dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor or, if it has gaps in memory, of a dense tensor like it."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.stride() if tensor.numel() == 1 + span else torch.empty_like(tensor, device="meta").stride()


def get_log(beta: float) -> float:
    """log(beta); finite for 0, so that its product with 0 steps is 0."""
    return math.log(beta) if beta else LOG_OF_ZERO


def get_mean_weight(decay: float) -> tuple[float, bool]:
    """The smaller of decay and 1 - decay, by which torch.lerp multiplies, and whether it is the decay."""
    return (decay, True) if decay <= 0.5 else (1 - decay, False)


def fill(copies: list[Copy]) -> None:
    """Copy tensors into their copies, before a step."""
    for _, copy, tensor in copies:
        copy.copy_(tensor)


def write_back(copies: list[Copy]) -> None:
    """Copy what a step changed back into the tensors."""
    for column, copy, tensor in copies:
        if column != Column.GRAD:
            tensor.copy_(copy)
