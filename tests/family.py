"""What many tests share: the eight optimizers, marks, small helpers, and the rule in float64 as the oracle."""

import io

import numpy as np
import pytest
import torch

import mvngrad
from mvngrad.optim.backends import get_step
from mvngrad.optim.formats import get_format, get_stored_names
from mvngrad.optim.inputs import StepInputs
from mvngrad.rule import CELLS, Arithmetic

NUMPY = Arithmetic(np.sqrt, np.maximum)
NAMES = sorted(name for name in mvngrad.__all__ if name[0].isupper())
OPTIMIZERS = [getattr(mvngrad, name) for name in NAMES]
PLAIN = [optimizer for optimizer in OPTIMIZERS if not optimizer.decoupled]
NARROW = {"bfloat16": torch.bfloat16, "int8": "int8"}

each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
each_cell = pytest.mark.parametrize("make", PLAIN, ids=lambda make: make.__name__)
each_rule = pytest.mark.parametrize("rule", CELLS, ids=lambda rule: rule.name)
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
each_narrow_dtype = pytest.mark.parametrize("state_dtype", NARROW.values(), ids=NARROW)

torch.ones(1).sqrt()  # in MKL, if several threads take the first root at once, one may get only 12 correct bits


def oracle(rule, hyper, x, grads, round_x=lambda x: x):
    """The parameters and state after stepping through `grads` in float64; `round_x` is how parameters are stored."""
    x, state = np.array(x, np.float64), rule.init(np.zeros_like(x, np.float64))
    for t, g in enumerate(grads, start=1):
        x, state = rule.update(x, np.array(g, np.float64), state, t, hyper, NUMPY)
        x = round_x(x)
    return x, state


def tensors(*shapes, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype).to(device) for shape in shapes]


def step(backend, rule, hyper, params, grads, state, steps, scale=None, found_inf=None, **options):
    """One step by a backend, without an optimizer."""
    inputs = StepInputs(rule, params, grads, state, steps, **options)
    inputs.grad_scale, inputs.found_inf = scale, found_inf
    inputs.view_complex_as_real()
    get_step(backend)(inputs, hyper)


def new_state(rule, state_dtype, params):
    """The state of parameters before their first step, as lists by name."""
    each = [get_format(state_dtype, param).allocate(rule.state_names, param) for param in params]
    return {name: [state[name] for state in each] for name in get_stored_names(rule.state_names, state_dtype)}


def parameters(*shapes, **options):
    return [torch.nn.Parameter(tensor) for tensor in tensors(*shapes, **options)]


def train(optimizer, steps, seed=1):
    """Step on random gradients, the same for the same seed, skipping frozen parameters."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                g = torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device)
                p.grad = g if p.requires_grad else None
        optimizer.step()


def through_disk(state_dict):
    """The state_dict after torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def everything(optimizer):
    """All parameters and state of an optimizer, cloned, in order."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.detach().clone() for p in params] + [
        value.clone() for p in params for value in optimizer.state.get(p, {}).values()
    ]


def equal(left, right):
    """Whether two lists of tensors are equal bit for bit, with NaN equal to NaN."""
    return len(left) == len(right) and all(
        a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(a != a, b != b)
        for a, b in zip(left, right, strict=True)
    )


def jax_in_float64():
    """A context in which JAX computes in float64. The newest jax for Python 3.10 has it only in jax.experimental."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64(True)
