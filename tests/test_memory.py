"""The peak memory of the foreach backend beyond parameters, gradients and state."""

import pytest
import torch
from family import each_rule, new_state, parameters, step, tensors

from benchmarks.traffic import peak_bytes
from mvngrad.optim.backends import foreach
from mvngrad.rule import Hyper

OPTIONS = {
    "coupled": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "decoupled": True},
    "maximize": {"maximize": True},
    "z_clip": {"z_clip": 1.0},
}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@each_rule
def test_foreach_holds_at_most_one_model_more_than_torch(rule, options, dtype, capturable, monkeypatch):
    if "z_clip" in options and not rule.momentum_last:
        return
    monkeypatch.setattr(foreach, "BATCH", 4096)  # small, because these models are
    shapes = [(64, 64)] * 8 + [(1000,)] * 8
    params = parameters(*shapes, dtype=dtype)
    for p, g in zip(params, tensors(*shapes, dtype=dtype, seed=1), strict=True):
        p.grad = g
    model = sum(p.nbytes for p in params)
    torchs = torch.optim.AdamW(params, foreach=True)
    torchs.step()
    peak_bytes_torch = peak_bytes(torchs.step)
    assert peak_bytes_torch >= model, "the measurement misses memory that torch is known to hold"

    state = new_state(rule, None, params)
    hyper = Hyper(eps_s=1e-16 if rule.centered else 0.0)._replace(**options)
    steps = [torch.zeros(()) for _ in params]
    grads = [p.grad for p in params]
    peak = peak_bytes(lambda: step("foreach", rule, hyper, params, grads, state, steps, capturable=capturable))
    assert peak <= peak_bytes_torch + model


@each_rule
def test_one_large_tensor_needs_no_more_memory_than_in_torch(rule):
    (x,) = parameters((256, 256))
    x.grad = torch.ones_like(x)
    torchs = torch.optim.AdamW([x], foreach=True)
    torchs.step()
    state = new_state(rule, None, [x])
    hyper = Hyper(weight_decay=0.1, decoupled=True)
    peak = peak_bytes(lambda: step("foreach", rule, hyper, [x], [x.grad], state, [torch.zeros(())]))
    assert peak <= peak_bytes(torchs.step) + 1024
