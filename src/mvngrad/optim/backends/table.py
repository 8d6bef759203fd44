"""How the two kernels reach tensors: through a table of addresses.

The table has a `Row` for each kind of tensor and a column for each parameter. The Triton kernel and the C++ kernel read
the same table. A `KernelCall` is what one call of a kernel steps.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import torch
from torch import Tensor

from mvngrad.optim.inputs import State, StepInputs


class Row(IntEnum):
    """What the table has for each parameter: addresses, and its index in the group. M, R and U are adjacent."""

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


STATE_ROWS = {
    "m": Row.M, "v": Row.R, "s": Row.R, "u": Row.U,
    "m_scale": Row.M_SCALE, "v_scale": Row.R_SCALE, "s_scale": Row.R_SCALE, "u_scale": Row.U_SCALE,
    "low": Row.LOW,
}  # fmt: skip
COORDINATE_ROWS = (Row.PARAM, Row.GRAD, Row.M, Row.R, Row.U, Row.LOW)
"""The rows of tensors with one value for each coordinate, which step counts and scales do not have."""
Copy = tuple[Row, Tensor, Tensor]
"""A row, a copy with the strides that the kernel needs, and the tensor that was copied."""


def make_row(addresses: Sequence[int]) -> Tensor:
    """A row of the table, on the host, in a quarter of the time of torch.tensor."""
    return torch.frombuffer(array("q", addresses), dtype=torch.int64)


class KernelCall:
    """What one call of a kernel steps: parameters on one device, of one dtype, one of gradients and one of state.

    It outlives a step, so it keeps no reference to these tensors.
    """

    def __init__(self, inputs: StepInputs, selection: list[int] | None) -> None:
        """`selection` are indices into `inputs.params`; None is all of them."""
        self.rule, self.selection = inputs.rule, selection
        self.indices = inputs.indices if selection is None else [inputs.indices[i] for i in selection]
        params, grads, state, _ = self.select(inputs)
        self.device, self.count = params[0].device, len(params)
        first_state = state[self.rule.state_names[0]]
        self.state_dtype = first_state[0].dtype
        self.master_bits = 16 + 8 * state["low"][0].itemsize if "low" in state else 0
        self._check_tensors(params, grads, state)
        self.sizes = torch.tensor([param.numel() for param in params], device="cpu")
        # Kernels walk memory in order, so all tensors of a parameter need the strides of its state.
        self.strides = [get_dense_strides(tensor) for tensor in first_state]
        self.to_copy = [
            (row, i)
            for row, tensors in get_rows(params, grads, state).items()
            if row in COORDINATE_ROWS
            for i, (tensor, strides) in enumerate(zip(tensors, self.strides, strict=True))
            if tensor.stride() != strides
        ]
        """The tensors with other strides, by row and index: the kernel works on copies of them."""

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
        """Parameters, gradients, state and step counts of this call."""
        chosen = self.selection
        if chosen is None:
            return inputs.params, inputs.grads, inputs.state, inputs.steps
        params, grads, steps = ([each[i] for i in chosen] for each in (inputs.params, inputs.grads, inputs.steps))
        return params, grads, {name: [each[i] for i in chosen] for name, each in inputs.state.items()}, steps

    def get_gradient_addresses(self, inputs: StepInputs) -> list[int]:
        assert inputs.key is not None
        addresses = inputs.key.grads.addresses or []
        return addresses if self.selection is None else [addresses[i] for i in self.selection]

    def make_table(self, inputs: StepInputs) -> tuple[Tensor, list[Copy]]:
        """The table, on the host, and the copies whose addresses it has. The copies are not filled yet."""
        tensors = {row: list(each) for row, each in get_rows(*self.select(inputs)).items()}
        copies = []
        for row, i in self.to_copy:
            tensor = tensors[row][i]
            copy = torch.empty_strided(tensor.shape, self.strides[i], dtype=tensor.dtype, device=self.device)
            tensors[row][i] = copy
            copies.append((row, copy, tensor))
        addresses = [list(map(Tensor.data_ptr, tensors.get(row, ()))) for row in Row]
        addresses[Row.INDEX] = self.indices
        return torch.tensor([each or [0] * self.count for each in addresses], device="cpu"), copies


AnyCall = TypeVar("AnyCall", bound=KernelCall)


def make_kernel_calls(
    inputs: StepInputs, make: Callable[[StepInputs, list[int] | None], AnyCall]
) -> tuple[list[AnyCall], list[int]]:
    """One call for each device and set of dtypes, and the indices of the empty parameters, which need none.

    Parameters with the same memory are in different calls, because a kernel steps those of a call at the same time.
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
    """For each block of a call, the index of its tensor and its position in that tensor."""
    counts = (sizes + block - 1) // block
    owners = torch.arange(len(sizes), device=sizes.device).repeat_interleave(counts)
    positions = torch.arange(len(owners), device=sizes.device) - (counts.cumsum(0) - counts)[owners]
    return owners.to(torch.int32), positions.to(torch.int32)


def get_rows(
    params: list[Tensor], grads: list[Tensor], state: State, steps: Sequence[Tensor] = ()
) -> dict[Row, Sequence[Tensor]]:
    """The tensors whose addresses are in each row."""
    rows = {Row.STEP: steps, Row.PARAM: params, Row.GRAD: grads}
    return rows | {STATE_ROWS[name]: tensors for name, tensors in state.items()}


def get_dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor or, if it has gaps in memory, of a dense tensor like it."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.stride() if tensor.numel() == 1 + span else torch.empty_like(tensor, device="meta").stride()


def get_mean_weight(decay: float) -> tuple[float, bool]:
    """The smaller of decay and 1 - decay, by which torch.lerp multiplies, and whether it is the decay."""
    return (decay, True) if decay <= 0.5 else (1 - decay, False)


def fill(copies: list[Copy]) -> None:
    """Copy tensors into their copies, before a step."""
    for _, copy, tensor in copies:
        copy.copy_(tensor)


def write_back(copies: list[Copy]) -> None:
    """Copy what a step changed back into the tensors."""
    for row, copy, tensor in copies:
        if row != Row.GRAD:
            tensor.copy_(copy)
