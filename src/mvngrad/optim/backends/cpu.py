"""The rule, compiled by torch's compiler: the fused step on the CPU, which reads and writes every tensor once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from mvngrad.optim.backends import eager
from mvngrad.optim.backends.eager import OutOfPlace
from mvngrad.optim.formats import INT8, Noise, arithmetic_dtype, find_format, write
from mvngrad.optim.inputs import StepInputs
from mvngrad.optim.tensors import is_dense
from mvngrad.rule import Hyper, Rule

LARGE = 2**20
NUMBERS = ("lr", "beta1", "beta2", "eps", "eps_s", "weight_decay", "beta_mean", "z_clip")
COMPILER = Lock()
"""Held while compiling: torch's tracer is not thread-safe."""


class Corrected(OutOfPlace):
    """Out of place, with the bias corrections computed beforehand and passed as `t`."""

    def corrections(self, hyper: Hyper, t: Any) -> tuple[Any, Any]:
        return t[0], t[1]

    def previous_correction(self, hyper: Hyper, t: Any) -> Any:
        return t[2]


CORRECTED = Corrected()
NO_KEY = torch.zeros((), dtype=torch.int32, device="cpu")


@cache
def compile_update(
    rule: Rule,
    input_names: tuple[str, ...],
    decoupled: bool,
    maximize: bool,
    rounding: tuple[bool, bool],
    names: tuple[str, ...],
    dtypes: tuple[torch.dtype, ...],
) -> Callable[..., Any]:
    """Compile `rule.update` for rows of any size and any values of the hyper-parameters in `input_names`.

    `rounding` says whether state is rounded at random, and whether parameters are. Hold `COMPILER` while calling.
    """
    fixed = Hyper(lr=0.0, beta1=0.0, beta2=0.0, eps=0.0, decoupled=decoupled, maximize=maximize)

    def update(numbers: Tensor, key: Tensor, param: Tensor, grad: Tensor, *rows: Tensor) -> tuple[()]:
        values = numbers.unbind()
        hyper = fixed._replace(**dict(zip(input_names, values[3:], strict=True)))  # type: ignore[arg-type]
        stored = dict(zip(names, rows, strict=True))
        dtype, state_format = arithmetic_dtype(param), find_format(rule.state_names, stored)
        old = state_format.load(rule.state_names, stored, dtype)
        x, new = rule.update(param.to(dtype), grad.to(dtype), old, values[:3], hyper, CORRECTED)
        noise = Noise(key, param.numel(), param.device) if any(rounding) else None
        state_format.store(stored, new, noise if rounding[0] else None)
        write(param, x, noise["x"] if noise and rounding[1] else None)
        return ()

    from torch._inductor import standalone_compile
    from torch.fx.experimental.proxy_tensor import make_fx

    # Not torch.compile: its checks at every call take longer than the step of a small tensor. The first size that the
    # compiler sees decides whether its loop runs on one thread or on all, for every size.
    count = len(rule.state_names)
    param, grad, *state = (torch.ones(LARGE, dtype=dtype, device="cpu") for dtype in dtypes[: 2 + count])
    scales = [tensor for name, tensor in INT8.allocate(rule.state_names, param).items() if name in names[count:]]
    numbers = torch.ones(3 + len(input_names), dtype=torch.float64, device="cpu")
    key = torch.ones((), dtype=torch.int32, device="cpu")
    example: list[Any] = [numbers, key, param, grad, *state, *scales]
    try:
        return standalone_compile(
            make_fx(update, tracing_mode="symbolic")(*example), example, dynamic_shapes="from_graph"
        )
    except Exception as error:  # the compiler's own classes are slow to import
        if "InvalidCxxCompiler" not in str(error):
            raise
        remedy = "install g++ or clang++ (or name one in CXX), or use fused=False"
        raise RuntimeError(f"fused=True on the CPU needs a C++ compiler: {remedy}") from error


def step(inputs: StepInputs, hyper: Hyper) -> None:
    """As the eager step, compiled. A tensor whose strides differ from its state's is stepped eagerly."""
    rule, rounding, count = inputs.rule, inputs.rounding, len(inputs.rule.state_names)
    if inputs.plan is None:
        inputs.plan = {}, [_can_compile(inputs, i) for i in range(len(inputs.params))]
    functions, compilable = inputs.plan
    values = hyper._asdict()
    input_names = tuple(name for name in NUMBERS if values[name] or name == "lr")  # a warm-up may start at lr = 0
    fixed = input_names, hyper.decoupled, hyper.maximize
    numbers: dict[float, Tensor] = {}
    for i, (param, grad, steps) in enumerate(zip(inputs.params, inputs.grads, inputs.steps, strict=True)):
        stored = [tensors[i] for tensors in inputs.state.values()]
        if not compilable[i]:
            one = {name: [tensor] for name, tensor in zip(inputs.names, stored, strict=True)}
            index = inputs.indices[i : i + 1]
            eager.step(StepInputs(rule, [param], [grad], one, [steps], rounding=rounding, indices=index), hyper)
            continue
        steps += 1
        t = steps.item()
        if t not in numbers:
            corrections = [1 - hyper.beta1**t, 1 - hyper.beta2**t, 1 - hyper.beta2 ** (t - 1)]
            all_numbers = [*corrections, *(values[name] for name in input_names)]
            numbers[t] = torch.tensor(all_numbers, dtype=torch.float64, device="cpu")
        size = param.numel()
        rows = [tensor.as_strided((size,), (1,)) for tensor in (param, grad, *stored[:count])]
        rounded = stored[0].itemsize < 4, rounding.params and param.dtype == torch.bfloat16
        dtypes = param.dtype, grad.dtype, stored[0].dtype
        update = functions.get((fixed, rounded, dtypes))
        if update is None:
            with COMPILER:
                update = compile_update(
                    rule, *fixed, rounded, inputs.names, (*dtypes[:2], *(tensor.dtype for tensor in stored[:count]))
                )
            functions[fixed, rounded, dtypes] = update
        key = rounding.make_key(inputs.indices[i], t) if any(rounded) else NO_KEY
        update(numbers[t], key, *rows, *stored[count:])
    torch.autograd.graph.increment_version(inputs.params)


def _can_compile(inputs: StepInputs, i: int) -> bool:
    """Whether the tensors are dense, of equal strides and larger than 1: the compiler specializes on sizes 0 and 1."""
    stored = [inputs.state[name][i] for name in inputs.rule.state_names]
    strides = {tensor.stride() for tensor in (inputs.params[i], inputs.grads[i], *stored)}
    return inputs.params[i].numel() > 1 and len(strides) == 1 and is_dense(stored[0])
