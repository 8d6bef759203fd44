"""The host's side of the fused CUDA step: one launch of `kernel.update` for all parameters of a device and dtype.

What the kernel needs (addresses, sizes, which block belongs to which tensor) stays on the device between steps. When an
address changes, the table of addresses is uploaded again. A step never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from mvngrad.optim.backends.cuda import kernel
from mvngrad.optim.backends.cuda.kernel import AdvanceArguments, UpdateArguments
from mvngrad.optim.backends.table import (
    COORDINATE_ROWS,
    KernelCall,
    Row,
    fill,
    get_mean_weight,
    make_kernel_calls,
    make_row,
    map_blocks,
    write_back,
)
from mvngrad.optim.formats import to_int32
from mvngrad.optim.inputs import StepInputs
from mvngrad.rule import Hyper, get_log

DTYPES = {getattr(torch, name): getattr(tl, name) for name in ("float64", "float32", "bfloat16", "float16", "uint8")}
SHAPES = {
    torch.float64: (1024, 1, 4),
    torch.float32: (1024, 1, 4),
    torch.bfloat16: (1024, 2, 4),
    torch.uint8: (256, 8, 1),
}
"""By the dtype of the state: coordinates in a block, blocks in a program, and warps."""
REGISTERS = {torch.uint8: 96}
"""The most registers a thread may have; without a limit the compiler takes so many that few threads run at once."""


def step(inputs: StepInputs, hyper: Hyper) -> None:
    """One step. Gradients are divided by `inputs.grad_scale`; if `inputs.found_inf` is not 0, nothing changes."""
    if inputs.plan is None:
        inputs.plan = make_kernel_calls(inputs, CudaCall)
    calls, empty = inputs.plan
    inputs.sums = []
    for call in calls:
        device = call.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            call.step(inputs, hyper)
        else:
            with torch.cuda.device(device):
                call.step(inputs, hyper)
    torch.autograd.graph.increment_version(inputs.params)
    for count in (inputs.steps[i] for i in empty):
        # ShardedGradScaler's found_inf has one dimension, and is the number of processes with an overflow.
        count += 1 if inputs.found_inf is None else (inputs.found_inf.squeeze() == 0).to(count)
    inputs.addresses_changed = False


class StepSums:
    """Sums that the CUDA kernel writes at each step: of squared gradients, and of squared changes of x over lr.

    Each program of the kernel writes two partial sums to the row of the step. They are added up, in a fixed order, when
    the rows are used up or when `get_totals` reads them; later steps need another `StepSums`.
    """

    def __init__(self, programs: int, coordinates: int, dtype: torch.dtype, device: torch.device) -> None:
        self.coordinates = coordinates
        steps = max(1, min(64, 2**20 // programs))  # a few megabytes
        even = programs + programs % 2  # so that every row is aligned to 16 bytes
        self._partial: Tensor | None = torch.zeros(steps, even, 2, dtype=dtype, device=device)
        self._address, self._row_bytes = self._partial.data_ptr(), self._partial[0].nbytes
        self._totals: Tensor | None = None
        self._used, self._steps = 0, steps

    def close_if_full(self) -> bool:
        """Add up the sums if all rows are used; return True if later steps need another `StepSums`."""
        if self._used == self._steps:
            self.get_totals()
        return self._partial is None

    def reserve(self) -> int:
        """Take the next row and return its index."""
        self._used += 1
        return self._used - 1

    def get_address(self, row: int) -> int:
        return self._address + row * self._row_bytes

    def get_row(self, row: int) -> Tensor:
        assert self._partial is not None
        return self._partial[row]

    def __len__(self) -> int:
        """The number of steps that wrote their sums."""
        return self._used

    def get_totals(self) -> Tensor:
        """The two sums of each step, on the device; no further step can write its sums here."""
        if self._partial is not None:
            self._totals = self._partial[: self._used].sum(1, dtype=torch.float64)
            self._partial = None
        assert self._totals is not None
        return self._totals


class CachedLaunches(NamedTuple):
    """The launches of a step that differs from the one before only in lr and in where it writes sums."""

    key: tuple[Any, ...]
    """Whether it writes sums, and the hyper-parameters other than lr."""
    advance: Callable[..., None]
    advance_arguments: tuple[Any, ...]
    update: Callable[..., None]
    update_arguments: tuple[Any, ...]
    """All but the first two, lr and the address of the sums."""
    unused: int
    """A valid address where none is needed."""


class CudaCall(KernelCall):
    """Parameters that one launch steps, and their tables on the device."""

    def __init__(self, inputs: StepInputs, selection: list[int] | None) -> None:
        super().__init__(inputs, selection)
        params, grads, _, steps = self.select(inputs)
        self.block, self.loops, warps = SHAPES[self.state_dtype]
        self.compile_options = {"num_warps": warps}
        self.dtypes = DTYPES[params[0].dtype], DTYPES[grads[0].dtype], DTYPES[self.state_dtype]
        self.step_dtype = DTYPES[steps[0].dtype]
        self.wide = params[0].dtype == torch.float64
        compute_dtype = torch.float64 if self.wide else torch.float32
        self.compute_dtype = DTYPES[compute_dtype]
        owners, positions = map_blocks(self.sizes, self.block * self.loops)
        self.grid = (len(owners), 1, 1)
        self.sizes, self.owners, self.positions = (index.to(self.device) for index in (self.sizes, owners, positions))
        self.per_tensor = torch.empty(4 * self.count, dtype=compute_dtype, device=self.device)
        """What `kernel.advance` writes for `kernel.update`."""
        nvidia = self.device.type == "cuda" and torch.version.cuda is not None
        self.fast = nvidia and self.state_dtype.itemsize < 4
        if nvidia and self.state_dtype in REGISTERS:
            self.compile_options["maxnreg"] = REGISTERS[self.state_dtype]
        self.seed = to_int32(inputs.rounding.seed)
        self.table: Tensor | None = None
        self.aligned = self.others_aligned = False
        """Whether all addresses of coordinates in the table, or all but those of gradients, are multiples of 16."""
        self.spare: Tensor | None = None
        """Pinned memory for a table that is uploaded while a graph is captured, when none can be allocated."""
        self.compiled: dict[Any, Callable[..., None]] = {}
        self.cached: CachedLaunches | None = None
        self.coordinates = sum(param.numel() for param in params)
        self.sums: StepSums | None = None

    def step(self, inputs: StepInputs, hyper: Hyper) -> None:
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        sums = self.reserve_sums() if inputs.writes_sums and not capturing else None
        if sums is not None:
            inputs.sums.append(sums)
        if self.table is not None and not capturing:
            if inputs.addresses_changed:
                self.upload_gradient_addresses(inputs)
            self.launch_kernels(inputs, hyper, sums)
            return
        table, copies = self.make_table(inputs)
        self.upload_table(table, inputs.captured if capturing else None)
        fill(copies)
        self.launch_kernels(inputs, hyper, sums)
        write_back(copies)
        if capturing:
            inputs.captured.append((self.table, self.per_tensor, self.sizes, self.owners, self.positions))
            params, _, state, steps = self.select(inputs)
            inputs.captured.append((params, state, steps, copies))
        if capturing or copies:
            self.table = None  # it belongs to the graph, or has addresses of copies that are freed now

    def reserve_sums(self) -> tuple[StepSums, int]:
        """Where this step writes its sums."""
        if self.sums is None or self.sums.close_if_full():
            self.sums = StepSums(self.grid[0], self.coordinates, self.per_tensor.dtype, self.device)
        return self.sums, self.sums.reserve()

    def upload_table(self, host: Tensor, captured: list[Any] | None) -> None:
        """Upload the table to the device.

        `captured` collects what the graph being captured needs; it is None outside of a capture.
        """
        self.others_aligned = not (host[[row for row in COORDINATE_ROWS if row != Row.GRAD]] % 16).any()
        self.aligned = self.others_aligned and not (host[Row.GRAD] % 16).any()
        if captured is not None:
            # At every replay the graph uploads the table from this memory, so nothing else may write to it. Pinned
            # memory cannot be allocated during a capture: the step before allocated it.
            if self.spare is None:
                raise RuntimeError(
                    "a step cannot be captured in a CUDA graph before a first step outside: call optimizer.step() once "
                    "before the capture, as for torch's optimizers"
                )
            host, self.spare = self.spare.copy_(host), None
            captured.append(host)
        elif self.device.type == "cuda":
            host = host.pin_memory()
            if self.spare is None:
                self.spare = torch.empty_like(host).pin_memory()
        self.table = host.to(self.device, non_blocking=True)
        self.cached = None

    def upload_gradient_addresses(self, inputs: StepInputs) -> None:
        """Upload the row of the table that often changes: zero_grad frees gradients, and backward makes new ones."""
        assert self.table is not None
        addresses = self.get_gradient_addresses(inputs)
        aligned = self.others_aligned and not any(map((15).__and__, addresses))
        if aligned != self.aligned:
            self.aligned, self.cached = aligned, None
        host = make_row(addresses)
        if self.device.type == "cuda":
            host = host.pin_memory()
        self.table[Row.GRAD].copy_(host, non_blocking=True)

    def launch_kernels(self, inputs: StepInputs, hyper: Hyper, sums: tuple[StepSums, int] | None) -> None:
        """Launch the two kernels, with the arguments of the step before if only lr and the row of sums have changed."""
        cached, scaled = self.cached, not (inputs.grad_scale is None and inputs.found_inf is None)
        key = sums is not None, *hyper[1:]
        if cached and cached.key == key and isinstance(hyper.lr, float) and not scaled:
            cached.advance(*cached.advance_arguments)
            sums_at = cached.unused if sums is None else sums[0].get_address(sums[1])
            cached.update(hyper.lr, sums_at, *cached.update_arguments)
            return
        advance, update = (kernel.wide_advance, kernel.wide_update) if self.wide else (kernel.advance, kernel.update)
        to_advance, to_update = self._make_arguments(inputs, hyper, sums)
        programs = -(-self.count // kernel.LANES.value)
        run_advance = self._launch_kernel(advance, (programs, 1, 1), {}, to_advance.HAS_FOUND_INF, to_advance)
        constants = to_update[UpdateArguments._fields.index("X") :]
        pointer_dtypes = to_update.lr_at.dtype, to_update.grad_scale_at.dtype, to_update.found_inf_at.dtype
        signature = constants, pointer_dtypes
        run_update = self._launch_kernel(update, self.grid, self.compile_options, signature, to_update)
        if run_advance and run_update and not (to_update.LR_ON_DEVICE or scaled):
            self.cached = CachedLaunches(
                key,
                advance=run_advance,
                advance_arguments=replace_tensors(to_advance),
                update=run_update,
                update_arguments=replace_tensors(to_update[2:]),  # without lr and sums_at
                unused=to_advance.table.data_ptr(),
            )

    def _make_arguments(
        self, inputs: StepInputs, hyper: Hyper, sums: tuple[StepSums, int] | None
    ) -> tuple[AdvanceArguments, UpdateArguments]:
        """The arguments of the two kernels."""
        rule, lr, clip, decay = self.rule, hyper.lr, hyper.z_clip, float(hyper.weight_decay)
        beta1, beta2 = float(hyper.beta1), float(hyper.beta2)
        mean_weight, decay_at_most_half = get_mean_weight(float(hyper.mean_decay))
        grad_scale, found_inf = (
            None if value is None else value.to(self.device, non_blocking=True)
            for value in (inputs.grad_scale, inputs.found_inf)
        )
        lr_on_device = isinstance(lr, Tensor)
        assert self.table is not None
        unused = self.table
        advance = AdvanceArguments(
            table=self.table,
            per_tensor=self.per_tensor,
            tensors=self.count,
            found_inf_at=unused if found_inf is None else found_inf,
            seed=self.seed,
            log1=get_log(beta1),
            log2=get_log(beta2),
            T=self.step_dtype,
            C=self.compute_dtype,
            HAS_FOUND_INF=found_inf is not None,
        )
        update = UpdateArguments(  # floats, because an integer would be compiled in
            lr=0.0 if lr_on_device else float(lr),
            sums_at=unused if sums is None else sums[0].get_row(sums[1]),
            table=self.table,
            per_tensor=self.per_tensor,
            sizes=self.sizes,
            owners=self.owners,
            positions=self.positions,
            tensors=self.count,
            lr_at=lr if lr_on_device else unused,
            grad_scale_at=unused if grad_scale is None else grad_scale,
            found_inf_at=unused if found_inf is None else found_inf,
            mean_weight=mean_weight,
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
            HAS_FOUND_INF=found_inf is not None,
            LR_ON_DEVICE=lr_on_device,
            ROUND_X=inputs.rounding.params and self.dtypes[0] == tl.bfloat16,
            MASTER=self.master_bits,
            FAST=self.fast,
            DECAY_AT_MOST_HALF=decay_at_most_half,
            WRITES_SUMS=sums is not None,
        )
        return advance, update

    def _launch_kernel(
        self,
        function: Any,
        grid: tuple[int, int, int],
        compile_options: dict[str, int],
        signature: Any,
        arguments: Sequence[Any],
    ) -> Callable[..., None] | None:
        """Launch a kernel and return a function that launches it again; None in Triton's interpreter.

        Arguments of a `signature` that was compiled before skip Triton's own checks.
        """
        run: Callable[..., None] | None = self.compiled.get((function, signature))
        if run is not None:
            run(*arguments)
        elif compiled := function[grid](*arguments, **compile_options):
            run = self.compiled[function, signature] = compiled[grid]
        return run


def replace_tensors(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with addresses instead of tensors: Triton would ask the driver about each tensor at each launch."""
    return tuple(each.data_ptr() if isinstance(each, Tensor) else each for each in arguments)
