"""The host's side of the fused CUDA step: one launch of `kernel.update` for all parameters of a device and dtype.

What the kernel must find (addresses, sizes, which block belongs to which tensor) stays on the device between steps. A
step compares and, when an address has changed, uploads; it never waits for the device.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from mvngrad.optim import kernel
from mvngrad.optim.eager import State, real
from mvngrad.rule import Hyper, Rule

BLOCK = 1024
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def blocks(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of a launch, the tensor it belongs to and its place in that tensor."""
    counts = (sizes + BLOCK - 1) // BLOCK
    owners = torch.arange(len(sizes)).repeat_interleave(counts)
    places = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
    return owners.to(torch.int32), places.to(torch.int32)


class Launch:
    """One launch: parameters of one device and dtype, their state, and gradients of one dtype."""

    def __init__(
        self, rule: Rule, params: list[Tensor], grads: list[Tensor], state: State, steps: list[Tensor]
    ) -> None:
        self.rule, self.params = rule, params
        self.layout = state[rule.slots[0]]
        self.dtypes = DTYPES[real(params[0]).dtype], DTYPES[real(grads[0]).dtype]
        sizes = torch.tensor([real(param).numel() for param in params])
        owners, places = blocks(sizes)
        self.kind = _kind(params[0], grads[0])
        self.device = params[0].device
        elsewhere = {str(tensor.device) for slot in state.values() for tensor in slot} - {str(self.device)}
        if elsewhere:
            raise ValueError(
                f"state is on {', '.join(elsewhere)} and its parameter on {self.device}: move the model before the "
                "first step, or load the state anew after moving it"
            )
        self.grid = (len(owners),)
        self.sizes, self.owners, self.places = (index.to(self.device) for index in (sizes, owners, places))
        self.counts = [count.data_ptr() for count in steps]
        self.kept = [tensor.data_ptr() for slot in rule.slots for tensor in state[slot]]
        self.pointed: list[int] = []
        self.spare: Tensor | None = None
        self.captured: list[Tensor] = []

    def point(self, grads: list[Tensor]) -> bool:
        """See that the table holds the addresses of these gradients, and of the parameters as they are now.

        False if they are no longer of the device and dtypes that this launch was made for.
        """
        pointed = [tensor.data_ptr() for tensor in self.params] + [tensor.data_ptr() for tensor in grads]
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if pointed == self.pointed and not capturing:
            return True
        if {_kind(param, grad) for param, grad in zip(self.params, grads, strict=True)} != {self.kind}:
            return False
        x = [_walkable(param, kept) for param, kept in zip(self.params, self.layout, strict=True)]
        g = [_walkable(grad, kept) for grad, kept in zip(grads, self.layout, strict=True)]
        self.loose = [(room, param) for room, param in zip(x, self.params, strict=True) if room is not param]
        self.loose_grads = [(room, grad) for room, grad in zip(g, grads, strict=True) if room is not grad]
        walked = [tensor.data_ptr() for tensor in (*x, *g)] + self.kept
        self.aligned = all(address % 16 == 0 for address in walked)
        host = torch.tensor(self.counts + walked)
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

    def run(self, hyper: Hyper, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        for room, tensor in (*self.loose, *self.loose_grads):
            room.copy_(tensor)
        lr_on_device = isinstance(hyper.lr, Tensor)
        clip, decayed = 1.0 if hyper.z_clip is None else hyper.z_clip, bool(hyper.weight_decay)
        beta1, beta2 = hyper.beta1, hyper.beta2
        averages = 1 - hyper.mean_decay, beta1, 1 - beta1, _log(beta1), beta2, 1 - beta2, _log(beta2)
        numbers = *averages, hyper.eps, hyper.eps_s, hyper.weight_decay, clip
        kernel.update[self.grid](
            self.table,
            self.sizes,
            self.owners,
            self.places,
            len(self.params),
            0.0 if lr_on_device else float(hyper.lr),
            hyper.lr if lr_on_device else self.table,
            self.table if grad_scale is None else grad_scale,
            self.table if found_inf is None else found_inf,
            *map(float, numbers),  # an int would be compiled in
            X=self.dtypes[0],
            G=self.dtypes[1],
            ALIGNED=self.aligned,
            BLOCK=BLOCK,
            VARIANCE=self.rule.variance,
            AFTER=self.rule.after,
            COUPLED=decayed and not hyper.decoupled,
            DECOUPLED=decayed and hyper.decoupled,
            MAXIMIZE=hyper.maximize,
            CLIP=hyper.z_clip is not None,
            SCALED=grad_scale is not None,
            CHECKED=found_inf is not None,
            LR_ON_DEVICE=lr_on_device,
        )
        torch.autograd.graph.increment_version(self.params)
        for room, param in self.loose:
            param.copy_(room)


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
            slots = {slot: [tensors[i] for i in batch] for slot, tensors in state.items()}
            x, g, counts = ([tensors[i] for i in batch] for tensors in (params, grads, steps))
            self.launches.append((batch, Launch(rule, x, g, slots, counts)))

    @property
    def captured(self) -> bool:
        """Whether a graph reads from these launches' memory."""
        return any(launch.captured for _, launch in self.launches)

    def point(self, grads: list[Tensor]) -> bool:
        """See that the kernel will find these gradients; False if these launches are not for them."""
        return all(launch.point([grads[i] for i in batch]) for batch, launch in self.launches)

    def run(self, hyper: Hyper, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """One step. Gradients are divided by `grad_scale`; where `found_inf` is not 0, nothing changes."""
        for _, launch in self.launches:
            on = launch.device
            scale = None if grad_scale is None else grad_scale.to(on, non_blocking=True)
            found = None if found_inf is None else found_inf.to(on, non_blocking=True)
            with torch.cuda.device(on) if on.type == "cuda" else nullcontext():
                launch.run(hyper, scale, found)
        torch._foreach_add_(self.steps, 1 if found_inf is None else 1 - found_inf)


def _kind(param: Tensor, grad: Tensor) -> tuple[Any, ...]:
    return param.device, param.dtype, grad.dtype


def _walkable(tensor: Tensor, kept: Tensor) -> Tensor:
    """The tensor itself where it lies in memory as its state does, else room for a copy that will."""
    return tensor if tensor.stride() == kept.stride() else torch.empty_like(kept, dtype=tensor.dtype)


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
