"""The backends, each a function `step(inputs, hyper)`, and the choice between them.

| backend | where | how |
|---|---|---|
| eager | any device | the rule, tensor by tensor |
| foreach | accelerators | the rule, on lists of tensors, one launch for each operation |
| cpu | CPU, with fused=True | a C++ kernel, one call for all tensors of a dtype |
| cuda | CUDA | a Triton kernel, one launch for all tensors of a device and dtype |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from mvngrad.optim.backends import eager, foreach
from mvngrad.optim.inputs import Group, StepInputs
from mvngrad.optim.private import default_to_fused_or_foreach
from mvngrad.optim.tensors import get_local, owns_memory
from mvngrad.rule import Hyper

Backend = Literal["eager", "foreach", "cpu", "cuda"]
HAS_TRITON = find_spec("triton") is not None
CUDA_KERNEL_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64}


def allows_fused(group: Group) -> bool:
    """Whether the options allow a fused step. An explicit foreach disables it, unless fused=True."""
    wanted = group["fused"] if group["fused"] is not None else group["foreach"] is None
    return bool(wanted) and not (group["differentiable"] or torch.compiler.is_compiling())


def cuda_kernel_accepts(param: Tensor) -> bool:
    """Whether the CUDA kernel can step a parameter."""
    return param.is_cuda and param.dtype in CUDA_KERNEL_DTYPES and HAS_TRITON and owns_memory(get_local(param))


def share_memory(params: Sequence[Tensor]) -> bool:
    """Whether two parameters begin at the same address, as weights that were tied by their data."""
    addresses = [part.data_ptr() for part in map(get_local, params) if part.numel()]
    return len(set(addresses)) < len(addresses)


def choose_backend(group: Group) -> Backend:
    """The backend that steps a group; a ValueError if fused=True and no fused backend can."""
    if not group["params"]:
        return "eager"  # the checks below are true of no parameters, and would import triton
    fused = choose_fused(group) if allows_fused(group) else None
    return fused or ("foreach" if uses_foreach(group) else "eager")


def choose_fused(group: Group) -> Backend | None:
    """The fused backend that can step a group. If none can: None, or a ValueError if fused=True."""
    params = group["params"]
    accepted = all(map(cuda_kernel_accepts, params))
    if accepted and not share_memory(params):
        return "cuda"
    if not group["fused"]:
        return None
    if accepted:
        raise ValueError(
            "fused=True steps all parameters at once, and two of these have the same memory: give the optimizer one of "
            "them, or leave fused=None"
        )
    if all(param.is_cpu and owns_memory(get_local(param)) for param in params):
        return "cpu"
    refused = {_describe(param) for param in params if not cuda_kernel_accepts(param)}
    raise ValueError(
        "fused=True takes parameters on CUDA, with triton installed, or parameters on the CPU, of 16 bits and more "
        f"and with memory of their own; here are {', '.join(sorted(refused))}: leave fused=None"
    )


def uses_foreach(group: Group) -> bool:
    """Whether foreach steps a group: if it is set, or torch would choose it. It has no kernels for the CPU."""
    params, wanted = group["params"], group["foreach"]
    if group["master_bits"] or all(param.is_cpu for param in params):
        return False
    if not all(owns_memory(get_local(param)) for param in params):
        return False
    if wanted is None:
        _, wanted = default_to_fused_or_foreach(params, group["differentiable"], use_fused=False)
    return bool(wanted) and (torch.compiler.is_compiling() or not share_memory(params))


def _describe(param: Tensor) -> str:
    text = f"{param.dtype} on {param.device.type}"
    return text if owns_memory(get_local(param)) else f"{type(get_local(param)).__name__} of {text}"


def get_step(backend: Backend) -> Callable[[StepInputs, Hyper], None]:
    """The step function of a backend. Imports triton for cuda; compiles the kernel for cpu if it is not cached."""
    if backend == "cuda":
        from mvngrad.optim.backends.cuda import launch

        return launch.step
    if backend == "cpu":
        from mvngrad.optim.backends.cpu import launch as cpu_launch, library

        library.load()  # now, so that without a compiler no state is created
        return cpu_launch.step
    return foreach.step if backend == "foreach" else eager.step


def make_step_count(steps: float, param: Tensor, group: Group) -> Tensor:
    """A step count, on the host unless a graph must capture it or a kernel reads it."""
    on_device = group["capturable"] or (allows_fused(group) and cuda_kernel_accepts(param))
    return torch.tensor(float(steps), dtype=get_step_dtype(), device=param.device if on_device else "cpu")


def get_step_dtype() -> torch.dtype:
    """The dtype of step counts, as in torch.optim: float64 if that is the default dtype."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
