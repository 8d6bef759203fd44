"""The host's side of the fused CUDA step: one launch of `kernel.update` for all parameters of a device and dtype.

What the kernel needs (addresses, sizes, which block belongs to which tensor) stays on the device between steps. When an
address changes, the table of addresses is uploaded again. A step never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from mvngrad.optim.backends.cuda import kernel
from mvngrad.optim.backends.cuda.kernel import AdvanceArguments, Column, UpdateArguments
from mvngrad.optim.backends.eager import LOG_OF_ZERO
from mvngrad.optim.formats import to_int32
from mvngrad.optim.inputs import StepInputs
from mvngrad.optim.tensors import is_dense
from mvngrad.rule import Hyper

DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
}
SHAPES = {
    torch.float64: (1024, 1, 4),
    torch.float32: (1024, 1, 4),
    torch.bfloat16: (1024, 2, 4),
    torch.uint8: (256, 8, 1),
}
"""By the dtype of the state: coordinates in a block, blocks in a program, and warps."""
REGISTERS = {torch.uint8: 96}
"""The most registers a thread may have; without a limit the compiler takes so many that few threads run at once."""
COLUMNS = {
    "m": Column.M, "v": Column.R, "s": Column.R, "u": Column.U,
    "m_scale": Column.M_SCALE, "v_scale": Column.R_SCALE, "s_scale": Column.R_SCALE, "u_scale": Column.U_SCALE,
}  # fmt: skip
COORDINATE_COLUMNS = (Column.PARAM, Column.GRAD, Column.M, Column.R, Column.U)
"""The columns of tensors with a value for each coordinate."""


def step(inputs: StepInputs, hyper: Hyper) -> None:
    """One step. Gradients are divided by `inputs.grad_scale`; if `inputs.found_inf` is not 0, nothing changes."""
    if inputs.plan is None:
        inputs.plan = make_launches(inputs)
    launches, empty = inputs.plan
    for launch in launches:
        device = launch.device
        other = device.type == "cuda" and device.index != torch.cuda.current_device()
        with torch.cuda.device(device) if other else nullcontext():
            launch.run(inputs, hyper)
    if empty:
        counts = [inputs.steps[i] for i in empty]
        torch._foreach_add_(counts, 1 if inputs.found_inf is None else 1 - inputs.found_inf)
    inputs.addresses_changed = False


def make_launches(inputs: StepInputs) -> tuple[list[Launch], list[int]]:
    """One launch for each device and set of dtypes, and the indices of the empty parameters, which need none."""
    batches: dict[tuple[Any, ...], list[int]] = {}
    empty = []
    stored = inputs.state[inputs.rule.state_names[0]]
    for i, tensors in enumerate(zip(inputs.params, inputs.grads, stored, strict=True)):
        if tensors[0].numel():
            batches.setdefault((tensors[0].device, *(tensor.dtype for tensor in tensors)), []).append(i)
        else:
            empty.append(i)
    everything = list(range(len(inputs.params)))
    return [Launch(inputs, None if batch == everything else batch) for batch in batches.values()], empty


def map_blocks(sizes: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """For each block of a launch, the index of its tensor and its position in that tensor."""
    counts = (sizes + block - 1) // block
    owners = torch.arange(len(sizes), device=sizes.device).repeat_interleave(counts)
    positions = torch.arange(len(owners), device=sizes.device) - (counts.cumsum(0) - counts)[owners]
    return owners.to(torch.int32), positions.to(torch.int32)


class Launch:
    """One launch: parameters of one device, all of one dtype, as their gradients are and their state. It holds none."""

    def __init__(self, inputs: StepInputs, batch: list[int] | None) -> None:
        """`batch` are positions in `inputs.params`; None is all of them."""
        self.rule, self.batch = inputs.rule, batch
        self.indices = inputs.indices if batch is None else [inputs.indices[i] for i in batch]
        params, grads, state, steps = self.select(inputs)
        state_dtype = state[self.rule.state_names[0]][0].dtype
        self.block, self.loops, warps = SHAPES[state_dtype]
        self.options = {"num_warps": warps}
        self.dtypes = DTYPES[params[0].dtype], DTYPES[grads[0].dtype], DTYPES[state_dtype]
        self.step_dtype = DTYPES[steps[0].dtype]
        self.wide = params[0].dtype == torch.float64
        compute_dtype = torch.float64 if self.wide else torch.float32
        self.compute_dtype = DTYPES[compute_dtype]
        self.device, self.count = params[0].device, len(params)
        other_devices = {str(tensor.device) for tensors in state.values() for tensor in tensors} - {str(self.device)}
        if other_devices:
            raise ValueError(
                f"state is on {', '.join(other_devices)} and its parameter on {self.device}: move the model before the "
                "first step, or load the state again after moving it"
            )
        # Kernels walk memory in order, so all tensors of a parameter need the strides of its state.
        self.strides = [get_dense_strides(tensor) for tensor in state[self.rule.state_names[0]]]
        self.copied = [
            (column, i)
            for column, tensors in self._get_columns(params, grads, state).items()
            if column in COORDINATE_COLUMNS
            for i, (tensor, strides) in enumerate(zip(tensors, self.strides, strict=True))
            if tensor.stride() != strides
        ]
        """The tensors with other strides; the kernel works on copies of them."""
        sizes = torch.tensor([param.numel() for param in params], device="cpu")
        owners, positions = map_blocks(sizes, self.block * self.loops)
        self.grid = (len(owners), 1, 1)
        self.sizes, self.owners, self.positions = (index.to(self.device) for index in (sizes, owners, positions))
        self.shared = torch.empty(4 * self.count, dtype=compute_dtype, device=self.device)
        nvidia = self.device.type == "cuda" and torch.version.cuda is not None
        self.fast = nvidia and state_dtype.itemsize < 4
        if nvidia and state_dtype in REGISTERS:
            self.options["maxnreg"] = REGISTERS[state_dtype]
        self.seed = to_int32(inputs.rounding.seed)
        self.table: Tensor | None = None
        self.spare: Tensor | None = None
        """Pinned memory for a table that is uploaded while a graph is captured, when none can be allocated."""
        self.compiled: dict[Any, Any] = {}

    def select(self, inputs: StepInputs) -> tuple[list[Tensor], list[Tensor], dict[str, list[Tensor]], list[Tensor]]:
        """Parameters, gradients, state and step counts of this launch."""
        if self.batch is None:
            return inputs.params, inputs.grads, inputs.state, inputs.steps
        params, grads, steps = ([each[i] for i in self.batch] for each in (inputs.params, inputs.grads, inputs.steps))
        return params, grads, {name: [each[i] for i in self.batch] for name, each in inputs.state.items()}, steps

    def run(self, inputs: StepInputs, hyper: Hyper) -> None:
        params, grads, state, steps = self.select(inputs)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        copies = []
        if inputs.addresses_changed or capturing or self.table is None:
            columns = {column: list(each) for column, each in self._get_columns(params, grads, state, steps).items()}
            for column, i in self.copied:
                tensor = columns[column][i]
                columns[column][i] = torch.empty_strided(
                    tensor.shape, self.strides[i], dtype=tensor.dtype, device=self.device
                )
                copies.append((column, columns[column][i], tensor))
            self.upload_table(columns, inputs.captured if capturing else None)
        for _, copy, tensor in copies:
            copy.copy_(tensor)
        self.launch(inputs, hyper)
        torch.autograd.graph.increment_version(params)
        for column, copy, tensor in copies:
            if column != Column.GRAD:
                tensor.copy_(copy)
        if capturing:
            inputs.captured.append((self.table, self.shared, self.sizes, self.owners, self.positions))
            inputs.captured.append((params, state, steps, copies))
        if capturing or copies:
            self.table = None  # it belongs to the graph, or has addresses of copies that are freed now

    @staticmethod
    def _get_columns(
        params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], steps: Sequence[Tensor] = ()
    ) -> dict[Column, Sequence[Tensor]]:
        columns = {Column.STEP: steps, Column.PARAM: params, Column.GRAD: grads}
        return columns | {COLUMNS[name]: tensors for name, tensors in state.items()}

    def upload_table(self, columns: dict[Column, list[Tensor]], captured: list[Any] | None) -> None:
        """Write the addresses of all tensors, and the indices of the parameters in their group, to the device.

        `captured` collects what the graph being captured needs; it is None outside of a capture.
        """
        rows = [list(map(Tensor.data_ptr, columns[column])) if column in columns else [] for column in Column]
        self.aligned = all(address % 16 == 0 for column in COORDINATE_COLUMNS for address in rows[column])
        rows[Column.INDEX] = self.indices
        host = torch.tensor([row or [0] * self.count for row in rows], device="cpu")
        if captured is not None:
            # At every replay the graph uploads the table from this memory, so nothing else may write to it. Pinned
            # memory cannot be allocated during a capture: the step before allocated it.
            if self.spare is None:
                raise RuntimeError("take one step before capturing one in a graph, as torch's optimizers need too")
            host, self.spare = self.spare.copy_(host), None
            captured.append(host)
        elif self.device.type == "cuda":
            host = host.pin_memory()
            if self.spare is None:
                self.spare = torch.empty_like(host).pin_memory()
        self.table = host.to(self.device, non_blocking=True)

    def launch(self, inputs: StepInputs, hyper: Hyper) -> None:
        """Launch the two kernels."""
        rule, lr, clip, decay = self.rule, hyper.lr, hyper.z_clip, float(hyper.weight_decay)
        beta1, beta2 = float(hyper.beta1), float(hyper.beta2)
        mean_decay = beta1 if hyper.beta_mean is None else float(hyper.beta_mean)
        grad_scale, found_inf = (
            None if value is None else value.to(self.device, non_blocking=True)
            for value in (inputs.grad_scale, inputs.found_inf)
        )
        lr_on_device = isinstance(lr, Tensor)
        decay_at_most_half = mean_decay <= 0.5
        unused = self.table
        advance = AdvanceArguments(
            table=self.table,
            shared=self.shared,
            tensors=self.count,
            found_at=unused if found_inf is None else found_inf,
            seed=self.seed,
            log1=_log(beta1),
            log2=_log(beta2),
            T=self.step_dtype,
            C=self.compute_dtype,
            CHECKED=found_inf is not None,
        )
        update = UpdateArguments(  # floats, because an integer would be compiled in
            table=self.table,
            shared=self.shared,
            sizes=self.sizes,
            owners=self.owners,
            positions=self.positions,
            tensors=self.count,
            lr=0.0 if lr_on_device else float(lr),
            lr_at=lr if lr_on_device else unused,
            scale_at=unused if grad_scale is None else grad_scale,
            found_at=unused if found_inf is None else found_inf,
            mean_weight=mean_decay if decay_at_most_half else 1 - mean_decay,
            beta1=beta1,
            weight1=1 - beta1,
            beta2=beta2,
            weight2=1 - beta2,
            eps=float(hyper.eps),
            eps_s=float(hyper.eps_s),
            decay=decay,
            z_clip=1.0 if clip is None else float(clip),
            X=self.dtypes[0],
            G=self.dtypes[1],
            S=self.dtypes[2],
            C=self.compute_dtype,
            ALIGNED=self.aligned,
            BLOCK=self.block,
            LOOPS=self.loops,
            CENTERED=rule.centered,
            MOMENTUM_LAST=rule.momentum_last,
            LEAN=rule.lean,
            COUPLED=decay != 0 and not hyper.decoupled,
            DECOUPLED=decay != 0 and hyper.decoupled,
            MAXIMIZE=hyper.maximize,
            CLIP=clip is not None,
            SCALED=grad_scale is not None,
            CHECKED=found_inf is not None,
            LR_ON_DEVICE=lr_on_device,
            ROUND_X=inputs.rounding.params and self.dtypes[0] == tl.bfloat16,
            FAST=self.fast,
            DECAY_AT_MOST_HALF=decay_at_most_half,
        )
        programs = -(-self.count // kernel.LANES.value)
        functions = (kernel.wide_advance, kernel.wide_update) if self.wide else (kernel.advance, kernel.update)
        self._launch(functions[0], (programs, 1, 1), {}, advance.CHECKED, advance)
        pointer_dtypes = update.lr_at.dtype, update.scale_at.dtype, update.found_at.dtype
        constants = update[UpdateArguments._fields.index("X") :]
        self._launch(functions[1], self.grid, self.options, (constants, pointer_dtypes), update)

    def _launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        options: dict[str, int],
        signature: Any,
        arguments: Sequence[Any],
    ) -> None:
        """Launch a kernel. Arguments of a `signature` that was compiled before skip Triton's own checks."""
        run = self.compiled.get((function, signature))
        if run is not None:
            run(*arguments)
        elif compiled := function[grid](*arguments, **options):  # the interpreter returns nothing
            self.compiled[function, signature] = compiled[grid]


def get_dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor or, if it has gaps in memory, of a dense tensor like it."""
    return tensor.stride() if is_dense(tensor) else torch.empty_like(tensor, device="meta").stride()


def _log(beta: float) -> float:
    return math.log(beta) if beta else LOG_OF_ZERO
