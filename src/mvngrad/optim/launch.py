"""The host's side of the fused CUDA step: one launch of `kernel.update` for all parameters of a device and dtype.

What the kernel must find (addresses, sizes, which block belongs to which tensor) stays on the device between steps. A
step compares and, when an address has changed, uploads; it never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from mvngrad.optim import kernel
from mvngrad.optim.eager import LOG_OF_ZERO
from mvngrad.optim.rounding import DEFAULT, Rounding, wrapped
from mvngrad.optim.state import State, real
from mvngrad.rule import Hyper, Rule

DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
}
SHAPES = {torch.float32: (1024, 1, 4), torch.bfloat16: (1024, 2, 4), torch.uint8: (256, 8, 1)}
"""How many coordinates a program steps at once, how often, and with how many warps, by how state is kept."""
REGISTERS = {torch.uint8: 96}
"""The most registers a thread may have; left to itself, the compiler takes so many that few threads run at once."""


def blocks(sizes: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """For each block of a launch, the tensor it belongs to and its place in that tensor."""
    counts = (sizes + block - 1) // block
    owners = torch.arange(len(sizes), device=sizes.device).repeat_interleave(counts)
    places = torch.arange(len(owners), device=sizes.device) - (counts.cumsum(0) - counts)[owners]
    return owners.to(torch.int32), places.to(torch.int32)


class Launch:
    """One launch: parameters of one device and dtype, their state, and gradients of one dtype."""

    def __init__(
        self,
        rule: Rule,
        places: list[int],
        params: list[Tensor],
        grads: list[Tensor],
        state: State,
        steps: list[Tensor],
    ) -> None:
        """`places` are those of the parameters in their group, which tell their random numbers apart."""
        self.rule, self.params = rule, params
        self.layout = state[rule.state_names[0]]
        kept = real(self.layout[0]).dtype
        self.block, self.loops, warps = SHAPES[kept]
        self.options = {"num_warps": warps}
        self.dtypes = DTYPES[real(params[0]).dtype], DTYPES[real(grads[0]).dtype], DTYPES[kept]
        sizes = torch.tensor([real(param).numel() for param in params], device="cpu")
        owners, spots = blocks(sizes, self.block * self.loops)
        self.kind = _kind(params[0], grads[0])
        self.device = params[0].device
        elsewhere = {str(tensor.device) for kept in state.values() for tensor in kept} - {str(self.device)}
        if elsewhere:
            raise ValueError(
                f"state is on {', '.join(elsewhere)} and its parameter on {self.device}: move the model before the "
                "first step, or load the state anew after moving it"
            )
        self.grid = (len(owners), 1, 1)
        self.sizes, self.owners, self.spots = (index.to(self.device) for index in (sizes, owners, spots))
        self.counts = [count.data_ptr() for count in steps]
        self.kept = places + [tensor.data_ptr() for kept in state.values() for tensor in kept]
        self.slots_aligned = all(tensor.data_ptr() % 16 == 0 for slot in rule.state_names for tensor in state[slot])
        self.shared = torch.empty(4 * len(params), device=self.device)
        nvidia = self.device.type == "cuda" and torch.version.cuda is not None
        self.fast = nvidia and kept != torch.float32
        if nvidia and kept in REGISTERS:
            self.options["maxnreg"] = REGISTERS[kept]
        self.pointed: list[int] = []
        self.ready: dict[Any, Any] = {}
        self.spare: Tensor | None = None
        self.captured: list[Tensor] = []

    def point(self, grads: list[Tensor]) -> bool:
        """See that the table holds the addresses of these gradients, and of the parameters as they are now.

        False if they are no longer of the device and dtypes that this launch was made for. Where only dtypes or strides
        have changed, it has to be told before, by `Launches.forget`.
        """
        pointed = list(map(Tensor.data_ptr, self.params)) + list(map(Tensor.data_ptr, grads))
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if pointed == self.pointed and not capturing:
            return True
        if {_kind(param, grad) for param, grad in zip(self.params, grads, strict=True)} != {self.kind}:
            return False
        x, self.loose = _walkable(self.params, self.layout)
        g, self.loose_grads = _walkable(grads, self.layout)
        walked = [tensor.data_ptr() for tensor in (*x, *g)]
        self.aligned = self.slots_aligned and all(address % 16 == 0 for address in walked)
        host = torch.tensor(self.counts + walked + self.kept, device="cpu")
        if capturing:
            # At every replay the graph uploads its own addresses, from memory that nobody else writes to. Pinned
            # memory cannot be had during a capture: the step before laid it by.
            if self.spare is None:
                raise RuntimeError("take one step before capturing one in a graph, as torch's optimizers need too")
            host, self.spare = self.spare.copy_(host), None
        elif self.device.type == "cuda":
            host = host.pin_memory()
            if self.spare is None:
                self.spare = torch.empty_like(host).pin_memory()
        self.table = host.to(self.device, non_blocking=True)
        self.pointed = [] if capturing else pointed
        if capturing:
            self.captured += [host, self.table]
        return True

    def run(self, hyper: Hyper, grad_scale: Tensor | None, found_inf: Tensor | None, rounding: Rounding) -> None:
        for room, tensor in (*self.loose, *self.loose_grads):
            room.copy_(tensor)
        lr, beta1, beta2 = hyper.lr, float(hyper.beta1), float(hyper.beta2)
        on_device = isinstance(lr, Tensor)
        decay, clip = float(hyper.weight_decay), hyper.z_clip
        given = lr if on_device else None, grad_scale, found_inf
        tensors = [self.table if tensor is None else tensor for tensor in given]
        many = len(self.params)
        short = hyper.mean_decay <= 0.5  # a mean of little memory goes from g, by the smaller of its two weights
        numbers = (  # floats: an integer would be compiled in
            float(hyper.mean_decay if short else 1 - hyper.mean_decay), beta1, 1 - beta1, beta2, 1 - beta2,
            float(hyper.eps), float(hyper.eps_s), decay, 1.0 if clip is None else float(clip),
        )  # fmt: skip
        constants = (
            *self.dtypes, self.aligned, self.block, self.loops,
            self.rule.centered, self.rule.momentum_last, self.rule.lean,
            decay != 0 and not hyper.decoupled, decay != 0 and hyper.decoupled, hyper.maximize, clip is not None,
            grad_scale is not None, found_inf is not None, on_device,
            rounding.params and self.dtypes[0] == tl.bfloat16, self.fast, short,
        )  # fmt: skip
        logs = _log(beta1), _log(beta2)
        self._launch(
            kernel.advance, (-(-many // kernel.LANES.value), 1, 1), {}, found_inf is not None,
            self.table, self.shared, many, tensors[2], wrapped(rounding.seed), *logs, found_inf is not None,
        )  # fmt: skip
        self._launch(
            kernel.update, self.grid, self.options, (constants, *(tensor.dtype for tensor in tensors)),
            self.table, self.shared, self.sizes, self.owners, self.spots, many, 0.0 if on_device else float(lr),
            *tensors, *numbers, *constants,
        )  # fmt: skip
        torch.autograd.graph.increment_version(self.params)
        for room, param in self.loose:
            param.copy_(room)
        if self.loose_grads:  # not kept: zero_grad is to free them
            self.loose_grads, self.pointed = [], []

    def _launch(
        self, function: Any, grid: tuple[int, int, int], options: dict[str, int], kind: Any, *arguments: Any
    ) -> None:
        again = self.ready.get((function, kind))
        if again is not None:  # past the compiler's look at every argument, which takes longer than all else here
            again(*arguments)
        elif compiled := function[grid](*arguments, **options):  # the interpreter returns nothing
            self.ready[function, kind] = compiled[grid]


class Launches:
    """All launches of a group's step: `point` them to the gradients, then `run`."""

    def __init__(
        self, rule: Rule, params: list[Tensor], grads: list[Tensor], state: State, steps: list[Tensor]
    ) -> None:
        self.steps = steps
        batches: dict[tuple[Any, ...], list[int]] = {}
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if param.numel():
                batches.setdefault(_kind(param, grad), []).append(i)
        self.launches = []
        for batch in batches.values():
            kept = {name: [tensors[i] for i in batch] for name, tensors in state.items()}
            x, g, counts = ([tensors[i] for i in batch] for tensors in (params, grads, steps))
            self.launches.append((batch, Launch(rule, batch, x, g, kept, counts)))
        self.empty = [count for count, param in zip(steps, params, strict=True) if not param.numel()]
        self.alone = len(batches) == 1 and not self.empty

    @property
    def captured(self) -> bool:
        """Whether a graph reads from these launches' memory."""
        return any(launch.captured for _, launch in self.launches)

    def forget(self) -> None:
        """Look at gradients and parameters anew, also where they have their addresses of before."""
        for _, launch in self.launches:
            launch.pointed = []

    def point(self, grads: list[Tensor]) -> bool:
        """See that the kernel will find these gradients; False if these launches are not for them."""
        if self.alone:
            return self.launches[0][1].point(grads)
        return all(launch.point([grads[i] for i in batch]) for batch, launch in self.launches)

    def run(
        self,
        hyper: Hyper,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        rounding: Rounding = DEFAULT,
    ) -> None:
        """One step. Gradients are divided by `grad_scale`; where `found_inf` is not 0, nothing changes."""
        for _, launch in self.launches:
            on = launch.device
            scale = None if grad_scale is None else grad_scale.to(on, non_blocking=True)
            found = None if found_inf is None else found_inf.to(on, non_blocking=True)
            elsewhere = on.type == "cuda" and on.index != torch.cuda.current_device()
            with torch.cuda.device(on) if elsewhere else nullcontext():
                launch.run(hyper, scale, found, rounding)
        if self.empty:
            torch._foreach_add_(self.empty, 1 if found_inf is None else 1 - found_inf)


def _kind(param: Tensor, grad: Tensor) -> tuple[Any, ...]:
    return param.device, param.dtype, grad.dtype


def _walkable(tensors: list[Tensor], layout: Sequence[Tensor]) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Tensors that lie in memory as their state does: themselves, or room for a copy; and those rooms with whose."""
    walked, loose = [], []
    for tensor, kept in zip(map(real, tensors), map(real, layout), strict=True):
        fits = tensor.stride() == kept.stride()
        walked.append(tensor if fits else torch.empty_like(kept, dtype=tensor.dtype))
        if not fits:
            loose.append((walked[-1], tensor))
    return walked, loose


def _log(beta: float) -> float:
    return math.log(beta) if beta else LOG_OF_ZERO
