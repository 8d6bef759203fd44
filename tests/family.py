"""The eight optimizers, and the rule in float64 as their oracle."""

import numpy as np
import torch

import mvngrad
from mvngrad.rule import Arithmetic

NUMPY = Arithmetic(np.sqrt, np.maximum)
NAMES = sorted(name for name in mvngrad.__all__ if name != "convert_state_dict")
OPTIMIZERS = [getattr(mvngrad, name) for name in NAMES]
PLAIN = [optimizer for optimizer in OPTIMIZERS if not optimizer.decoupled]


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


def everything(optimizer):
    """All parameters and state of an optimizer, cloned, in order."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.detach().clone() for p in params] + [
        value.clone() for p in params for value in optimizer.state.get(p, {}).values()
    ]


def equal(left, right):
    """Bit for bit, NaN equal to NaN."""
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
