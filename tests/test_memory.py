"""The peak memory of the foreach backend beyond parameters, gradients and state."""

import pytest
import torch
from family import each_cell, each_rule, new_state, parameters, step

from benchmarks.traffic import peak_bytes
from mvngrad.optim.backends import foreach
from mvngrad.rule import Hyper

OPTIONS = {
    "plain": {},
    "coupled": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "decoupled": True},
    "maximize": {"maximize": True},
    "z_clip": {"z_clip": 1.0},
}


def get_peak_bytes(rule, options, params, capturable=False):
    state, steps = new_state(rule, None, params), [torch.zeros(()) for _ in params]
    hyper = Hyper(eps_s=1e-16 if rule.centered else 0.0)._replace(**options)
    grads = [p.grad for p in params]
    return peak_bytes(lambda: step("foreach", rule, hyper, params, grads, state, steps, capturable=capturable))


def get_peak_bytes_of_torch(options, params):
    options = {name: value for name, value in options.items() if name in ("weight_decay", "maximize")}
    optimizer = (torch.optim.AdamW if "weight_decay" in options else torch.optim.Adam)(params, foreach=True, **options)
    optimizer.step()
    return peak_bytes(optimizer.step)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@each_rule
def test_foreach_needs_no_more_memory_than_in_torch(rule, options, capturable):
    """As torch's own test_peak_memory_foreach: ten tensors of 512 bytes, whose temporaries count as one model."""
    if "z_clip" in options and not rule.momentum_last:
        return
    params = parameters(*[(16, 8)] * 10)
    for p in params:
        p.grad = torch.ones_like(p)
    numbers = 5 * len(params) * 4 if capturable else 0  # corrections and factors, a number for each tensor
    torchs = get_peak_bytes_of_torch(options, params)
    assert torchs >= sum(p.nbytes for p in params), "the measurement misses memory that torch is known to hold"
    assert get_peak_bytes(rule, options, params, capturable) <= torchs + numbers


@each_rule
def test_one_large_tensor_needs_no_more_memory_than_in_torch(rule):
    (x,) = parameters((256, 256))
    x.grad = torch.ones_like(x)
    options = {"weight_decay": 0.1, "decoupled": True}
    assert get_peak_bytes(rule, options, [x]) <= get_peak_bytes_of_torch(options, [x])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@each_rule
def test_the_batch_bounds_temporaries_of_16_bit_parameters(rule, options, monkeypatch):
    if "z_clip" in options and not rule.momentum_last:
        return
    monkeypatch.setattr(foreach, "MAX_COORDINATES", 4096)
    params = parameters(*[(64, 64)] * 8, *[(1000,)] * 8, dtype=torch.bfloat16)
    for p in params:
        p.grad = torch.ones_like(p)
    assert get_peak_bytes(rule, options, params) <= 4 * 4 * 4096  # parameter, gradient and two more in float32


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"maximize": True}, {"capturable": True}], ids=str)
@each_cell
def test_the_peak_on_a_device_is_that_of_torch_and_the_extra_state(make, options):
    peaks = []
    for optimizer_class in (torch.optim.Adam, make):
        params = parameters(*[(16, 8)] * 10, device="cuda")
        optimizer = optimizer_class(params, foreach=True, **options)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del params, optimizer, p
    numbers = 5 * 10 * 512 if options.get("capturable") else 0  # each number takes a block of the allocator
    assert peaks[1] <= peaks[0] + numbers
