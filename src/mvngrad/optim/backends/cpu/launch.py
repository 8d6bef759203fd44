"""The fused step on the CPU: one call of the C++ kernel for all parameters of a set of dtypes."""

from __future__ import annotations

import ctypes
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mvngrad.optim.backends.cpu import library
from mvngrad.optim.backends.cpu.library import Arguments, Dtype
from mvngrad.optim.backends.table import (
    KernelCall,
    Row,
    fill,
    get_mean_weight,
    make_kernel_calls,
    make_row,
    write_back,
)
from mvngrad.optim.formats import to_int32
from mvngrad.optim.inputs import StepInputs
from mvngrad.rule import Hyper, get_log

CHUNK = 2**14
"""Coordinates in the pieces that threads share: 400 KB of float32 with its state, which fit a core's cache."""
DTYPES = {getattr(torch, dtype.name.lower()): dtype for dtype in Dtype}


def step(inputs: StepInputs, hyper: Hyper) -> None:
    """One step. Gradients are divided by `inputs.grad_scale`; if `inputs.found_inf` is not 0, nothing changes."""
    if inputs.found_inf is not None and inputs.found_inf.item():
        return
    if inputs.plan is None:
        inputs.plan = make_kernel_calls(inputs, CpuCall)
    calls, empty = inputs.plan
    for call in calls:
        call.step(inputs, hyper)
    for i in empty:
        inputs.steps[i] += 1
    torch.autograd.graph.increment_version(inputs.params)
    inputs.addresses_changed = False


class CpuCall(KernelCall):
    """Parameters that one call of the kernel steps, and the arguments of the call."""

    def __init__(self, inputs: StepInputs, selection: list[int] | None) -> None:
        super().__init__(inputs, selection)
        params, grads, _, steps = self.select(inputs)
        dtypes = {"step": steps[0].dtype, "param": params[0].dtype, "grad": grads[0].dtype, "state": self.state_dtype}
        if unknown := {name: dtype for name, dtype in dtypes.items() if dtype not in DTYPES}:
            raise ValueError(f"fused=True on the CPU takes floats of 16 bits and more, not {unknown}: leave fused=None")
        # In Python: in a forked process, torch's parallel operations wait for the threads of the parent for ever.
        starts = list(accumulate((-(-size // CHUNK) for size in self.sizes.tolist()), initial=0))
        self.starts = torch.tensor(starts, device="cpu")
        self.table: Tensor | None = None
        self.step_chunks = library.load()
        self.hyper: tuple[Any, ...] = ()
        """The hyper-parameters in `arguments`, without lr."""
        self.arguments = Arguments(
            sizes=self.sizes.data_ptr(),
            starts=self.starts.data_ptr(),
            tensors=self.count,
            chunks=starts[-1],
            chunk_size=CHUNK,
            seed=to_int32(inputs.rounding.seed),
            centered=self.rule.centered,
            momentum_last=self.rule.momentum_last,
            lean=self.rule.lean,
            round_params=inputs.rounding.params,
            master_bits=self.master_bits,
            **{f"{name}_dtype": DTYPES[dtype] for name, dtype in dtypes.items()},
        )

    def step(self, inputs: StepInputs, hyper: Hyper) -> None:
        if self.table is not None:
            if inputs.addresses_changed:  # of gradients only: others begin a new plan
                self.table[Row.GRAD] = make_row(self.get_gradient_addresses(inputs))
            self.call_kernel(self.table, inputs, hyper)
            return
        self.table, copies = self.make_table(inputs)
        fill(copies)
        self.call_kernel(self.table, inputs, hyper)
        write_back(copies)
        if copies:
            self.table = None  # it has addresses of copies that are freed now

    def call_kernel(self, table: Tensor, inputs: StepInputs, hyper: Hyper) -> None:
        arguments, scale = self.arguments, inputs.grad_scale
        if self.hyper != hyper[1:]:
            self.set_hyper(hyper)
        arguments.table, arguments.lr, arguments.threads = table.data_ptr(), hyper.lr, torch.get_num_threads()
        arguments.scaled, arguments.grad_scale = scale is not None, 1.0 if scale is None else scale.item()
        self.step_chunks(ctypes.byref(arguments))

    def set_hyper(self, hyper: Hyper) -> None:
        arguments, decay = self.arguments, hyper.weight_decay
        arguments.beta1, arguments.beta2 = hyper.beta1, hyper.beta2
        arguments.log_beta1, arguments.log_beta2 = get_log(hyper.beta1), get_log(hyper.beta2)
        arguments.mean_weight, arguments.decay_at_most_half = get_mean_weight(hyper.mean_decay)
        arguments.eps, arguments.eps_s = hyper.eps, hyper.eps_s
        arguments.weight_decay = decay
        arguments.coupled = decay != 0 and not hyper.decoupled
        arguments.decoupled = decay != 0 and hyper.decoupled
        arguments.clipped, arguments.z_clip = hyper.z_clip is not None, hyper.z_clip or 1.0
        arguments.maximize = hyper.maximize
        self.hyper = hyper[1:]
