"""Every backend x cell x option x dtype against the rule in float64."""

from functools import partial

import numpy as np
import pytest
import torch
from family import oracle, tensors

from mvngrad.optim import compiled, eager, foreach
from mvngrad.rule import CELLS, Hyper


def kernel(rule, hyper, params, grads, state, steps):
    """The kernel's launches, kept from step to step as the optimizer keeps them."""
    from mvngrad.optim.launch import Launches

    if not LAUNCHES or LAUNCHES[0].steps is not steps:
        LAUNCHES[:] = [Launches(rule, params, grads, state, steps)]
    assert LAUNCHES[0].point(grads)
    LAUNCHES[0].run(hyper)


LAUNCHES = []
BACKENDS = {
    "eager": eager.step,
    "eager-capturable": partial(eager.step, capturable=True),
    "differentiable": partial(eager.step, differentiable=True),
    "foreach": foreach.step,
    "foreach-capturable": partial(foreach.step, capturable=True),
    "compiled": compiled.step,
    "kernel": kernel,
}
ON_DEVICE = {"eager-capturable", "foreach-capturable", "kernel"}
OPTIONS = {
    "defaults": {},
    "coupled": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "decoupled": True},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "low-betas": {"beta1": 0.3, "beta2": 0.6},
    "large-eps": {"eps": 1e-2},
    "eps_s": {"eps_s": 1e-3},
    "beta_mean": {"beta_mean": 0.5},
    "z_clip": {"z_clip": 0.7},
}
# For parameters kept in 16 bits: one rounding of the parameter may fall to the other side.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHAPES = [(33, 7), (5,), (), (0,), (1,), (2, 3, 4, 5)]
STEPS = 30


CASES = [
    pytest.param(rule, Hyper(lr=1e-2)._replace(**option), id=f"{rule.name}-{name}")
    for rule in CELLS
    for name, option in OPTIONS.items()
    if set(option) & {"eps_s", "beta_mean", "z_clip"} <= set(rule.options)
]


each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def array(tensor):
    return tensor.double().cpu().numpy()


@each_device
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rule", "hyper"), CASES)
def test_backend_equals_the_oracle(rule, hyper, backend, dtype, device, request):
    if backend == "compiled":
        request.getfixturevalue("cpp_compiler")
        if device != "cpu":
            pytest.skip("the CPU's path")
    if backend == "kernel":
        request.getfixturevalue("triton")
        if dtype == torch.float64:
            pytest.skip("the kernel computes in float32")
        if dtype == torch.bfloat16 and device == "cpu":
            pytest.skip("Triton's interpreter truncates to bfloat16, where a GPU rounds")
    params = tensors(*SHAPES, dtype=dtype, device=device)
    grads = [tensors(*SHAPES, dtype=dtype, device=device, seed=t) for t in range(1, STEPS + 1)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = {slot: [torch.zeros_like(p, dtype=wide) for p in params] for slot in rule.slots}
    steps = [torch.zeros((), device=device if backend in ON_DEVICE else "cpu") for _ in params]
    starts = [p.clone() for p in params]
    for g in grads:
        before = [tensor.clone() for tensor in g]
        BACKENDS[backend](rule, hyper, params, g, state, steps)
        assert all(torch.equal(a, b) for a, b in zip(g, before, strict=True)), "a gradient was modified"

    for i, (param, start) in enumerate(zip(params, starts, strict=True)):
        x, expected = oracle(
            rule,
            hyper,
            array(start),
            [array(g[i]) for g in grads],
            round_x=lambda x: torch.from_numpy(np.asarray(x)).to(dtype).double().numpy(),
        )
        assert param.dtype == dtype
        assert steps[i] == STEPS
        np.testing.assert_allclose(array(param), x, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        # With coupled decay the state sees the rounded parameters.
        loose = TOLERANCE[wide] * 10 if dtype == wide else 2e-2
        for slot in rule.slots:
            assert state[slot][i].dtype == wide
            np.testing.assert_allclose(array(state[slot][i]), expected[slot], rtol=loose, atol=loose)


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("rule", "hyper"), CASES)
def test_foreach_equals_eager(rule, hyper, dtype, device):
    """Bit for bit on the CPU; on CUDA, where torch's own two paths differ in the last place, to it."""
    runs = []
    for step in (eager.step, foreach.step):
        params = tensors(*SHAPES, dtype=dtype, device=device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        state = {slot: [torch.zeros_like(p, dtype=wide) for p in params] for slot in rule.slots}
        steps = [torch.tensor(float(i)) for i in range(len(params))]  # parameters of different ages
        for t in range(1, STEPS):
            step(rule, hyper, params, tensors(*SHAPES, dtype=dtype, device=device, seed=t), state, steps)
        runs.append([*params, *(tensor for slot in rule.slots for tensor in state[slot]), *steps])
    for a, b in zip(*runs, strict=True):
        exact = 0 if device == "cpu" else TOLERANCE[dtype]
        torch.testing.assert_close(a, b, rtol=exact, atol=exact)


@pytest.mark.usefixtures("cpp_compiler", "triton")
@pytest.mark.parametrize("backend", ["eager", "foreach", "compiled", "kernel"])
@pytest.mark.parametrize("rule", CELLS, ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    "layout",
    [
        lambda a: a.transpose(0, 1),
        lambda a: a[::2, 1:],
        lambda a: a.to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "channels_last"],
)
def test_memory_layout_does_not_matter(rule, backend, layout):
    hyper = Hyper(lr=1e-2, weight_decay=0.1)
    results = []
    for change in (layout, lambda a: layout(a).contiguous()):
        (param,) = tensors((4, 6, 5, 3))
        param = change(param)
        state = {slot: [torch.zeros_like(param)] for slot in rule.slots}
        steps = [torch.zeros(())]
        for t in range(1, 6):
            BACKENDS[backend](rule, hyper, [param], [layout(tensors((4, 6, 5, 3), seed=t)[0])], state, steps)
        results.append(param)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
