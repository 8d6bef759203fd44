"""Every backend, cell, option, dtype and `state_dtype` against the rule in float64."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from family import NUMPY, each_device, each_narrow_dtype, each_rule, equal, new_state, oracle, step, tensors

from mvngrad.optim import formats
from mvngrad.optim.formats import Rounding, load_state
from mvngrad.optim.tensors import view_as_real
from mvngrad.rule import CELLS, LEAN, Hyper

BACKENDS = {
    "eager": partial(step, "eager"),
    "eager-capturable": partial(step, "eager", capturable=True),
    "differentiable": partial(step, "eager", differentiable=True),
    "foreach": partial(step, "foreach"),
    "foreach-capturable": partial(step, "foreach", capturable=True),
    "cpu": partial(step, "cpu"),
    "cuda": partial(step, "cuda"),
}
ON_DEVICE = {"eager-capturable", "foreach-capturable", "cuda"}
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
# 16-bit parameters may differ by one unit in the last place, if a rounding goes the other way.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHAPES = [(33, 7), (5,), (), (0,), (1,), (2, 3, 4, 5)]
STEPS = 30


CASES = [
    pytest.param(rule, Hyper(lr=1e-2)._replace(**option), id=f"{rule.name}-{name}")
    for rule in CELLS
    for name, option in OPTIONS.items()
    if set(option) & {"eps_s", "beta_mean", "z_clip"} <= set(rule.options)
]
# One case for lean, with every option that its own lines use.
CASES.append(pytest.param(LEAN, Hyper(lr=1e-2, eps=1e-2, eps_s=1e-3, z_clip=0.7), id="lean"))


def array(tensor):
    return tensor.double().cpu().numpy()


@each_device
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rule", "hyper"), CASES)
def test_backend_equals_the_oracle(rule, hyper, backend, dtype, device, request):
    if backend == "cpu":
        request.getfixturevalue("cpp_compiler")
        if device != "cpu":
            pytest.skip("this backend runs on the CPU only")
    if backend == "cuda":
        request.getfixturevalue("triton")
        if dtype == torch.bfloat16 and device == "cpu":
            pytest.skip("Triton's interpreter truncates to bfloat16, where a GPU rounds")
        if dtype == torch.float16 and device == "cpu" and hyper != Hyper(lr=1e-2, weight_decay=0.1):
            pytest.skip("the interpreter is slow, and options do not depend on the dtype of parameters")
    params = tensors(*SHAPES, dtype=dtype, device=device)
    count = 6 if backend == "cuda" and device == "cpu" else STEPS  # the interpreter is slow
    grads = [tensors(*SHAPES, dtype=dtype, device=device, seed=t) for t in range(1, count + 1)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = new_state(rule, None, params)
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
        assert steps[i] == count
        np.testing.assert_allclose(array(param), x, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        # With coupled decay the state depends on the rounded parameters.
        tolerance = TOLERANCE[wide] * 10 if dtype == wide else 2e-2
        for name in rule.state_names:
            assert state[name][i].dtype == wide
            np.testing.assert_allclose(array(state[name][i]), expected[name], rtol=tolerance, atol=tolerance)


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("rule", "hyper"), CASES)
def test_foreach_equals_eager(rule, hyper, dtype, device):
    """Bit for bit on the CPU; on CUDA, where torch's own two paths differ too, up to the last place."""
    runs = []
    for backend in ("eager", "foreach"):
        params = tensors(*SHAPES, dtype=dtype, device=device)
        state = new_state(rule, None, params)
        steps = [torch.tensor(float(i)) for i in range(len(params))]  # parameters with different step counts
        for t in range(1, STEPS):
            step(backend, rule, hyper, params, tensors(*SHAPES, dtype=dtype, device=device, seed=t), state, steps)
        runs.append([*params, *(tensor for name in rule.state_names for tensor in state[name]), *steps])
    for a, b in zip(*runs, strict=True):
        allowed = 0 if device == "cpu" else TOLERANCE[dtype]
        torch.testing.assert_close(a, b, rtol=allowed, atol=allowed)


@pytest.mark.usefixtures("cpp_compiler", "triton")
@pytest.mark.parametrize("backend", ["eager", "foreach", "cpu", "cuda"])
@each_rule
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
        state = new_state(rule, None, [param])
        steps = [torch.zeros(())]
        for t in range(1, 6):
            BACKENDS[backend](rule, hyper, [param], [layout(tensors((4, 6, 5, 3), seed=t)[0])], state, steps)
        results.append(param)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


# State in fewer bits

each_rule_and_lean = pytest.mark.parametrize("rule", [*CELLS, LEAN], ids=lambda rule: rule.name)
LR, FEW = 1e-2, 2


def make_hyper(rule):
    """The optimizers' defaults."""
    return Hyper(lr=LR, eps_s=1e-16 if rule.centered else 0.0)


def make_params(device="cpu"):
    """Tensors of one group: larger than one program, of size 1, 0-d, empty, complex, and not contiguous."""
    row, one, channels = tensors((2348,), (1,), (2, 3, 4, 5))
    zero_d, empty, other = tensors((), (0,), (5, 103), dtype=torch.bfloat16)
    (complexes,), (wide,) = tensors((7,), dtype=torch.complex64), tensors((300,), dtype=torch.float64)
    channels_last = channels.to(memory_format=torch.channels_last)
    mixed = [channels_last, channels_last.to(torch.bfloat16, copy=True), channels.mT, complexes, wide]
    group = [row, one, zero_d, empty, other, *mixed]
    strided = [other.to(device, copy=True)[::2, 1:], other.to(device, torch.float32, copy=True)[1:, ::3]]
    return [*(tensor.to(device) for tensor in group), *strided]


def make_gradients(params, t):
    """Gradients of every order of magnitude from 1e-4 to 1e4, with the strides of the parameters."""
    generator = torch.Generator().manual_seed(t)
    grads = []
    for param in params:
        size = 10 ** (2 * torch.randn(param.shape, generator=generator).clamp(-1.8, 1.8))
        grad = size * torch.randn(param.shape, generator=generator, dtype=torch.promote_types(size.dtype, param.dtype))
        grads.append(torch.empty_like(param).copy_(grad))
    return grads


def run_steps(backend, rule, state_dtype, device):
    """Parameters and state after a few steps; bfloat16 parameters are rounded at random too."""
    params = make_params(device)
    state = new_state(rule, state_dtype, params)
    steps = [torch.tensor(float(i), device=device if backend in ON_DEVICE else "cpu") for i in range(len(params))]
    random = {"rounding": Rounding(5, params=True), "indices": [2 * i + 1 for i in range(len(params))]}
    for t in range(1, FEW + 1):
        grads = make_gradients(params, t)
        BACKENDS[backend](rule, make_hyper(rule), params, grads, state, steps, **random)
    return params, state, steps


expected = cache(partial(run_steps, "eager"))


@each_device
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in ("eager", "differentiable")])
@each_narrow_dtype
@each_rule_and_lean
def test_every_backend_rounds_as_eager_does(rule, state_dtype, backend, device, request):
    """They use the same random bits, so values that differ in the last place are rarely rounded differently."""
    if backend == "cpu":
        request.getfixturevalue("cpp_compiler")
        if device != "cpu":
            pytest.skip("this backend runs on the CPU only")
    if backend == "cuda":
        request.getfixturevalue("triton")
    params, state, steps = run_steps(backend, rule, state_dtype, device)
    others, other_state, other_steps = expected(rule, state_dtype, device)
    assert steps == other_steps
    for param, other in zip(params, others, strict=True):
        coarse = 2**-7 if param.dtype == torch.bfloat16 else 0
        torch.testing.assert_close(param, other, rtol=coarse, atol=LR * FEW * 1e-2)
    same = total = 0
    for i, param in enumerate(params):
        mine, theirs = ({name: stored[i] for name, stored in each.items()} for each in (state, other_state))
        for name in rule.state_names:
            same += (mine[name] == theirs[name]).sum().item()
            total += view_as_real(param).numel()
            assert mine[name].dtype == (torch.uint8 if state_dtype == "int8" else state_dtype)
            if state_dtype == "int8" and name in formats.SQUARES:
                assert torch.equal(mine[f"{name}_scale"][1], theirs[f"{name}_scale"][1]), "blocks have different ranges"
        # Values that differ do so by a few steps at most.
        values, other_values = (load_state(rule.state_names, stored, torch.float32) for stored in (mine, theirs))
        for name in rule.state_names:
            largest = values[name].abs().max().item() if param.numel() else 0
            torch.testing.assert_close(values[name], other_values[name], rtol=0.3, atol=1e-5 * largest)
    assert same >= 0.99 * total


@pytest.mark.usefixtures("cpp_compiler", "triton")
@each_narrow_dtype
@each_rule_and_lean
def test_the_two_kernels_agree_bit_for_bit(rule, state_dtype):
    """The C++ kernel and the Triton kernel in its interpreter, which contracts no products and sums either."""
    optional = {"eps_s": 1e-12, "beta_mean": 0.4, "z_clip": 0.7}
    options = {name: value for name, value in optional.items() if name in rule.options}
    runs = []
    for backend in ("cpu", "cuda"):
        params = make_params()
        state, steps = new_state(rule, state_dtype, params), [torch.tensor(1.0 + i) for i in range(len(params))]
        for t in range(1, FEW + 1):
            # With beta1 = 0.97 no step needs exp for 1 - beta^t; its last bit differs between libraries.
            hyper = Hyper(lr=LR, beta1=0.97, weight_decay=0.1, decoupled=t == 1, maximize=t == 2)._replace(**options)
            grads = make_gradients(params, t)
            BACKENDS[backend](rule, hyper, params, grads, state, steps, rounding=Rounding(5, params=True))
        runs.append([*params, *steps, *(tensor for tensors in state.values() for tensor in tensors)])
    assert equal(*([view_as_real(tensor) for tensor in run] for run in runs))


def rounding_bound(name, value, stored, state_dtype):
    """The largest change of a value by one rounding: the distance to its neighbour in the format."""
    if state_dtype == torch.bfloat16 or value.size == 0:
        return 2**-7 * abs(value)  # 7 bits after the first
    if name in formats.SQUARES:
        cut = stored[f"{name}_scale"][1].max().item()
        assert formats.FINE <= cut <= formats.COARSE
        return 2.0 ** (cut - 23) * abs(value)  # from 4 to 128 steps an octave
    return abs(value) / 8 + 2**-18 * stored[f"{name}_scale"].max().item()  # 8 steps an octave, over 16 octaves


@each_narrow_dtype
@each_rule_and_lean
def test_a_rounded_step_differs_from_the_oracle_by_one_rounding(rule, state_dtype):
    params = [*make_params(), *tensors((300,), dtype=torch.float16)]
    state, steps = new_state(rule, state_dtype, params), [torch.zeros(()) for _ in params]
    for t in range(1, FEW + 1):
        stored = [{name: tensors[i] for name, tensors in state.items()} for i in range(len(params))]
        before = [load_state(rule.state_names, each, torch.float64) for each in stored]
        starts, grads = [array(view_as_real(param)).copy() for param in params], make_gradients(params, t)
        step("eager", rule, make_hyper(rule), params, grads, state, steps, rounding=Rounding(5, params=True))
        for param, start, grad, old, new in zip(params, starts, grads, before, stored, strict=True):
            old = {name: array(value) for name, value in old.items()}
            x, exact = rule.update(start, array(view_as_real(grad)), old, t, make_hyper(rule), NUMPY)
            ulp = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(param.dtype, 1e-6)
            np.testing.assert_allclose(array(view_as_real(param)), x, rtol=ulp, atol=1e-6)
            for name, value in load_state(rule.state_names, new, torch.float64).items():
                error = abs(array(value) - exact[name])
                bound = rounding_bound(name, exact[name], new, state_dtype)
                assert (error <= bound + 1e-6 * abs(exact[name]).max(initial=0)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@each_narrow_dtype
@each_rule_and_lean
def test_rounded_state_stays_close_to_the_oracle(rule, state_dtype, dtype):
    """A rounding changes a value by less than 2^-7 (bfloat16) or 2^-3 (int8) of it, and on average not at all.

    This fraction bounds the mean absolute error of state, and of the distance that parameters move; a tenth of it
    bounds the mean error. bfloat16 parameters also walk at random, by half a unit in the last place at each step.
    """
    params = tensors((3000,), dtype=dtype)
    start, grads = array(params[0]).copy(), [tensors((3000,), dtype=dtype, seed=t) for t in range(1, STEPS + 1)]
    state, steps = new_state(rule, state_dtype, params), [torch.zeros(())]
    for g in grads:
        step("eager", rule, make_hyper(rule), params, g, state, steps, rounding=Rounding(params=True))
    x, exact = oracle(rule, make_hyper(rule), start, [array(g) for (g,) in grads])
    fraction = 2**-7 if state_dtype == torch.bfloat16 else 2**-3
    walk = STEPS**0.5 * 2**-8 * abs(x).mean() if dtype == torch.bfloat16 else 0
    assert abs(array(params[0]) - x).mean() <= fraction * abs(x - start).mean() + walk
    stored = {name: tensors[0] for name, tensors in state.items()}
    for name, value in load_state(rule.state_names, stored, torch.float64).items():
        error, size = array(value) - exact[name], abs(exact[name]).mean()
        assert abs(error).mean() <= fraction * size
        assert abs(error.mean()) <= fraction * size / 10
