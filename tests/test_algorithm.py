"""The public optimizers against Algorithm 1 and the related ones, written out here line by line."""

import numpy as np
import pytest
import torch
from family import NAMES, OPTIMIZERS

import mvngrad

OPTIONS = {
    "defaults": {},
    "decay": {"weight_decay": 0.1},
    "eps_s": {"eps_s": 1e-4},
    "beta_mean": {"beta_mean": 0.7},
    "z_clip": {"z_clip": 0.9},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "low betas": {"betas": (0.6, 0.8)},
}


def run_literally(name, x, gradients, lrs, betas=(0.9, 0.999), eps=1e-8, eps_s=1e-16, weight_decay=None, **options):
    """Section 2 of the paper, with weight decay and our two options, line by line."""
    cell, decoupled = name.removesuffix("W"), name.endswith("W")
    decay = (0.01 if decoupled else 0.0) if weight_decay is None else weight_decay
    beta1, beta2 = betas
    m = v = s = u = np.zeros_like(x)
    for t, (g, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        g = -g if options.get("maximize") else g
        if decoupled:
            x = x - lr * decay * x
        else:
            g = g + decay * x
        beta_mean = options.get("beta_mean", beta1)
        m = beta_mean * m + (1 - beta_mean) * g
        v = beta2 * v + (1 - beta2) * g**2
        s = beta2 * s + (1 - beta2) * (g - m) ** 2 + eps_s
        r = v if cell in ("Adam", "LaProp") else s
        root = np.sqrt(r / (1 - beta2**t)) + eps
        z = np.clip(g / root, -options.get("z_clip", np.inf), options.get("z_clip", np.inf))
        u = beta1 * u + (1 - beta1) * z
        direction = u / (1 - beta1**t) if cell in ("LaProp", "MVNGrad") else m / (1 - beta1**t) / root
        x = x - lr * direction
    return x


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_steps_equal_the_literal_algorithm(name, options, fused, request):
    make = getattr(mvngrad, name)
    if set(options) & {"eps_s", "beta_mean", "z_clip"} - set(make.rule.options):
        pytest.skip(f"{name} has no such option")
    if fused:
        request.getfixturevalue("cpp_compiler")
    rng = np.random.default_rng(0)
    start, gradients = rng.standard_normal(40), rng.standard_normal((100, 40)) * 10.0 ** rng.integers(-3, 3, 40)
    x = torch.nn.Parameter(torch.tensor(start))
    optimizer = make([x], lr=0.02, fused=fused, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
    lrs = []
    for g in gradients:
        lrs.append(optimizer.param_groups[0]["lr"])
        x.grad = torch.tensor(g)
        optimizer.step()
        schedule.step()
    expected = run_literally(name, start, gradients, lrs, **options)
    np.testing.assert_allclose(x.detach().numpy(), expected, rtol=1e-11, atol=1e-12)


def test_every_public_optimizer_is_tested():
    public = {name for name in mvngrad.__all__ if name[0].isupper()}
    assert {optimizer.__name__ for optimizer in OPTIMIZERS} == set(NAMES) == public
