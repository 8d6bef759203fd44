"""Under torch.compile a step equals the step as it stands, and a schedule does not recompile it."""

import os
import shutil

import pytest
import torch
from family import NAMES, OPTIMIZERS, PLAIN, parameters
from torch._dynamo.testing import CompileCounter

each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_run(optimizer, backend, set_lr, steps=6):
    """The number of graphs compiled after each step of a schedule."""
    counter = CompileCounter()
    step = torch.compile(optimizer.step, backend=counter if backend is None else backend)
    graphs = []
    for t in range(steps):
        set_lr(optimizer.param_groups[0], 1e-2 / (t + 1))
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.full_like(p, 1.0 + t)
        step()
        graphs.append(counter.frame_count)
    return graphs


def set_float(group, lr):
    group["lr"] = lr


def set_tensor(group, lr):
    group["lr"].fill_(lr)


@pytest.mark.parametrize("foreach", [False, True])
@each_optimizer
def test_a_tensor_lr_never_recompiles(make, foreach):
    optimizer = make(parameters((4, 3), (5,)), lr=torch.tensor(1e-2), foreach=foreach)
    assert compiled_run(optimizer, None, set_tensor) == [1] * 6


@pytest.mark.parametrize("foreach", [False, True])
@each_optimizer
def test_a_float_lr_recompiles_once_when_it_first_moves(make, foreach):
    """As for torch.optim: at its second value torch.compile makes the number an input of the graph."""
    optimizer = make(parameters((4, 3), (5,)), lr=1e-2, foreach=foreach)
    assert compiled_run(optimizer, None, set_float) == [1] + [2] * 5


@pytest.mark.skipif(os.environ.get("CI") != "true" and not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.parametrize("make", PLAIN, ids=lambda make: make.__name__)
def test_the_compiled_step_computes_the_same(make):
    runs = []
    for compiled in (False, True):
        params = parameters((4, 3), (5,))
        optimizer = make(params, lr=1e-2, weight_decay=0.1)
        if compiled:
            compiled_run(optimizer, "inductor", set_float)
        else:
            for t in range(6):
                set_float(optimizer.param_groups[0], 1e-2 / (t + 1))
                for p in params:
                    p.grad = torch.full_like(p, 1.0 + t)
                optimizer.step()
        runs.append(params)
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)
