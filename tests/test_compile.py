"""Under torch.compile a step equals the uncompiled one, and a schedule does not recompile it."""

import subprocess
import sys
from functools import cache

import pytest
import torch
from family import each_cell, parameters
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import mvngrad


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


each_cell_with_a_decay = pytest.mark.parametrize(
    "make", [mvngrad.Adam, mvngrad.AdaBeliefW, mvngrad.LaProp, mvngrad.MVNGradW], ids=lambda make: make.__name__
)


def run_compiled(optimizer, backend, set_lr, steps=6):
    """Step through a schedule; return the number of compiled graphs after each step."""
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
@each_cell_with_a_decay
def test_a_tensor_lr_never_recompiles(make, foreach):
    optimizer = make(parameters((4, 3), (5,)), lr=torch.tensor(1e-2), foreach=foreach)
    assert run_compiled(optimizer, None, set_tensor) == [1] * 6


@pytest.mark.parametrize("foreach", [False, True])
@each_cell_with_a_decay
def test_a_float_lr_recompiles_once_when_it_first_changes(make, foreach):
    """As for torch.optim: at its second value torch.compile makes the number an input of the graph."""
    optimizer = make(parameters((4, 3), (5,)), lr=1e-2, foreach=foreach)
    assert run_compiled(optimizer, None, set_float) == [1] + [2] * 5


def count_graphs(make, foreach):
    """The graphs of a compiled optimizer whose lr and beta1 change at every step, as OneCycleLR does.

    Lowered ones: before, changing betas look like inputs of a graph, and then become constants.
    """
    torch._dynamo.reset()
    optimizer = make(parameters((4, 3), (5,)), foreach=foreach)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(optimizer.step, backend=counter)
    for _ in range(6):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        step()
        schedule.step()
    return counter.frame_count


@cache
def count_graphs_of_torch(foreach):
    return count_graphs(torch.optim.AdamW, foreach)


@pytest.mark.parametrize("foreach", [False, True])
@each_cell_with_a_decay
def test_a_schedule_of_betas_recompiles_no_more_than_torch(make, foreach):
    assert 0 < count_graphs(make, foreach) <= count_graphs_of_torch(foreach)


def test_the_first_optimizer_of_a_process_compiles_to_one_graph():
    """What is computed on first use must not break the graph."""
    code = """
import torch, mvngrad
from torch._dynamo.testing import CompileCounter

import mvngrad
x = torch.nn.Parameter(torch.ones(3)); x.grad = torch.ones(3)
counter = CompileCounter()
step = torch.compile(mvngrad.MVNGradW([x], lr=torch.tensor(0.1)).step, backend=counter)
for _ in range(3): step()
print("graphs:", counter.frame_count)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "graphs: 1\n" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("cpp_compiler")
@each_cell
def test_the_compiled_step_equals_the_eager_one(make):
    runs = []
    for compiled in (False, True):
        params = parameters((4, 3), (5,))
        optimizer = make(params, lr=1e-2, weight_decay=0.1)
        if compiled:
            run_compiled(optimizer, "inductor", set_float)
        else:
            for t in range(6):
                set_float(optimizer.param_groups[0], 1e-2 / (t + 1))
                for p in params:
                    p.grad = torch.full_like(p, 1.0 + t)
                optimizer.step()
        runs.append(params)
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("cpp_compiler")
def test_a_compiled_step_of_8_bits_steps_the_last_partial_block():
    """Inductor on a CPU left it out where it was cut by a slice."""
    runs = []
    for compiled in (False, True):
        params = parameters((300,), (1, 300))
        optimizer = mvngrad.MVNGradW(params, lr=1e-2, state_dtype="int8", fused=False)
        step = torch.compile(optimizer.step) if compiled else optimizer.step
        for t in range(2):
            for p in params:
                p.grad = torch.full_like(p, 1.0 + t)
            step()
        runs.append(params)
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)


def make_laid_out(case):
    """Parameters and gradients in memory orders of their own."""
    params = [torch.randn(8, 3, 2, 2).to(memory_format=torch.channels_last), torch.randn(5, 4).t(), torch.randn(4, 5)]
    params = [torch.nn.Parameter(param) for param in params]
    grads = [[torch.randn_like(param) for param in params[:2]] + [torch.randn(5, 4).t()] for _ in range(3)]
    return params, case(params), grads


LAYOUT_CASES = {
    "float32": lambda params: mvngrad.AdaBelief(params, lr=0.1, fused=False),
    "lean": lambda params: mvngrad.MVNGrad(params, lr=0.1, lean=True, fused=False),
    "int8": lambda params: mvngrad.MVNGrad(params, lr=0.1, betas=(0.4, 0.9), state_dtype="int8", fused=False),
}


@pytest.mark.parametrize("case", LAYOUT_CASES.values(), ids=LAYOUT_CASES)
def test_a_step_on_channels_last_and_transposed_tensors_is_one_graph(case):
    params, optimizer, grads = make_laid_out(case)
    counter = CompileCounter()
    step = torch.compile(optimizer.step, backend=counter)
    for param, grad in zip(params, grads[0], strict=True):
        param.grad = grad
    step()
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("case", LAYOUT_CASES.values(), ids=LAYOUT_CASES)
def test_a_compiled_step_on_channels_last_and_transposed_tensors(case):
    """A graph ended at out= of a tensor that is not contiguous, and 8-bit codes were stored in another order."""
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        params, optimizer, grads = make_laid_out(case)
        step = torch.compile(optimizer.step) if compiled else optimizer.step
        for each in grads:
            for param, grad in zip(params, each, strict=True):
                param.grad = grad
            step()
        runs.append(params)
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("make", [mvngrad.AdamW, mvngrad.MVNGradW], ids=lambda make: make.__name__)
def test_a_compiled_step_follows_a_schedule_of_betas(make, index, tmp_path, monkeypatch):
    """From the third step on, a graph from AOTAutograd's cache had the beta of the second in 1 - beta."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    params = parameters((4, 3)) + parameters((4, 3))
    optimizers = [make([param], lr=0.1) for param in params]
    steps = [optimizers[0].step, torch.compile(optimizers[1].step)]
    for t in range(5):
        gradient = torch.randn(4, 3, generator=torch.Generator().manual_seed(t))
        for param, optimizer, step in zip(params, optimizers, steps, strict=True):
            betas = [0.9, 0.99]
            betas[index] -= 0.1 * t
            optimizer.param_groups[0]["betas"] = tuple(betas)
            param.grad = gradient.clone()
            step()
        torch.testing.assert_close(*params)


def test_a_schedule_of_weight_decay_recompiles_no_more_than_torch():
    graphs = []
    for make in (mvngrad.MVNGradW, torch.optim.AdamW):
        torch._dynamo.reset()
        optimizer = make(parameters((4, 3), (5,)), foreach=False)

        def set_decay(group, lr):
            group["weight_decay"] = lr

        graphs.append(run_compiled(optimizer, None, set_decay)[-1])
    assert 0 < graphs[0] <= graphs[1]


@pytest.mark.slow
@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize(("make", "option"), [(mvngrad.AdamW, "weight_decay"), (mvngrad.MVNGrad, "eps_s")])
def test_a_compiled_step_with_an_option_that_is_a_tensor(make, option):
    """Reading its value ends the graph; inductor compiled the rest wrongly, from the third step on."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(2)]
    optimizers = [make([param], lr=0.01, **{option: torch.tensor(1e-4)}) for param in params]
    steps = [optimizers[0].step, torch.compile(optimizers[1].step)]
    for _ in range(5):
        gradient = torch.randn(5)
        for param, step in zip(params, steps, strict=True):
            param.grad = gradient.clone()
            step()
        torch.testing.assert_close(*params)


@pytest.mark.usefixtures("cpp_compiler")
def test_grad_scaler_unscales_for_a_compiled_step():
    """It leaves the scale to a fused step, which a compiled one is not; an overflow is skipped."""
    runs = []
    for compiled in (False, True):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = mvngrad.MVNGrad([weight], lr=0.1, eps=1.0, fused=True)
        if compiled:
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for t in range(4):
            optimizer.zero_grad()
            factor = torch.tensor([1.0, 2.0, 3.0, float("inf") if t == 2 else 4.0])
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.state[weight]["step"] == 3
        runs.append(weight)
    torch.testing.assert_close(*runs)


@pytest.mark.usefixtures("cpp_compiler")
def test_a_scale_that_is_left_to_the_step_is_never_ignored():
    """Where a compiled function would step without it, torch.compile falls back to the step as it is."""
    runs = []
    for scale in (1.0, 8.0):
        (weight,) = parameters((4,))
        optimizer = mvngrad.MVNGrad([weight], eps=1.0, fused=True)
        optimizer.grad_scale = None if scale == 1 else torch.tensor(scale)
        weight.grad = scale * torch.ones(4)
        torch.compile(lambda step=optimizer.step: step(), backend="aot_eager")()
        runs.append(weight)
    torch.testing.assert_close(*runs)
