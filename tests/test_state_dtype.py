"""Optimizers with state in bfloat16 and 8 bits, and with bfloat16 parameters: steps, checkpoints and copies."""

import copy
import pickle
from itertools import chain

import numpy as np
import pytest
import torch
from family import (
    NARROW,
    PLAIN,
    each_cell,
    each_device,
    each_narrow_dtype,
    each_optimizer,
    equal,
    everything,
    new_state,
    oracle,
    parameters,
    step,
    tensors,
    through_disk,
    train,
)
from torch._dynamo.testing import CompileCounter

import mvngrad
from mvngrad.optim.formats import Rounding, load_state
from mvngrad.rule import LEAN, MVNGRAD, Hyper

STATE_DTYPES = {"None": None, "float32": torch.float32, **NARROW}
each_state_dtype = pytest.mark.parametrize("state_dtype", STATE_DTYPES.values(), ids=STATE_DTYPES)
SHAPES = [(33, 17), (300,), (), (0,), (1,)]


def load_values(optimizer, param):
    """The state of a parameter as float64."""
    return load_state(optimizer.get_rule(optimizer.param_groups[0]).state_names, optimizer.state[param], torch.float64)


# Steps


@each_narrow_dtype
def test_slow_averages_keep_decaying_where_rounding_to_nearest_freezes_them(state_dtype):
    """A few noisy gradients, then 5000 that are 0: s must fall to 0.999^5000 = 0.0067 of itself.

    It does on average; each coordinate is a random walk. In bfloat16 a change of up to 2^-7 happens with probability
    0.001 / 2^-7, so log(s) has a variance of up to 5000 * 0.001 * 2^-7 = 0.04, and the mean of 2048 coordinates an
    error of 0.4%. In 8 bits, with 8 steps an octave as here, the variance is at most 5000 * 0.001 / 8, and the error
    2%. The test allows 5 times these errors.
    """
    size, quiet = 2048, 5000
    noisy = [tensors((size,), seed=t)[0] for t in range(1, 6)]
    x = torch.nn.Parameter(torch.ones(size))
    optimizer = mvngrad.MVNGrad([x], lr=1e-3, eps_s=0.0, state_dtype=state_dtype)
    zeros = torch.zeros_like(x)
    for g in [*noisy, *[zeros] * quiet]:
        x.grad = g
        optimizer.step()
    exact = {}
    for silent in (0, quiet):
        grads = [*(g.numpy() for g in noisy), *[np.zeros(size)] * silent]
        exact[silent] = oracle(MVNGRAD, Hyper(), np.ones(size), grads)[1]["s"]
    assert exact[quiet].mean() == pytest.approx(0.999**quiet * exact[0].mean(), rel=0.25)  # m needs some steps to decay
    after = load_values(optimizer, x)["s"]
    assert after.mean().item() == pytest.approx(exact[quiet].mean(), rel=0.02 if state_dtype == torch.bfloat16 else 0.1)
    assert (after > 0).all()
    assert x.isfinite().all()

    nearest = torch.from_numpy(exact[0]).to(torch.bfloat16)
    for _ in range(quiet):
        nearest = (nearest * 0.999).to(torch.bfloat16)
    assert nearest.double().mean() > 100 * exact[quiet].mean(), (
        "rounding to nearest also decays, so this test shows nothing"
    )


@pytest.mark.parametrize(
    ("options", "low", "high"),
    [
        ({"state_dtype": torch.bfloat16}, 6, 6.1),
        ({"state_dtype": "int8"}, 3, 3.3),
        ({"lean": True}, 8, 8.001),
        ({"lean": True, "state_dtype": torch.bfloat16}, 4, 4.001),
        ({"lean": True, "state_dtype": "int8"}, 2, 2.1),
        ({"state_dtype": torch.float32}, 12, 12.001),
    ],
    ids=str,
)
def test_state_has_the_documented_bytes_per_parameter(options, low, high):
    (x,) = parameters((512, 512))
    optimizer = mvngrad.MVNGrad([x], **options)
    train(optimizer, 1)
    assert low <= sum(value.nbytes for value in optimizer.state[x].values()) / x.numel() < high


@pytest.mark.parametrize(
    ("make", "start"),
    [*((make, 1.25) for make in PLAIN), (mvngrad.Adam, 1.0), (mvngrad.Adam, -1.0), (mvngrad.Adam, 1.5 * 2**-30)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_stochastic_rounding_accumulates_steps_far_below_half_a_unit(make, start):
    """Each step is about 1/300 of a unit in the last place; 100 steps must move parameters by a third of a unit.

    Each of the 2048 coordinates moves by a unit or not at all, so their mean has an error of 3% of that distance.
    """
    unit = 2.0**-8 * 2.0 ** np.floor(np.log2(abs(start)))  # the unit below a power of 2 is the smaller one
    steps, size = 100, 2048
    grads = [1 + 0.3 * tensors((size,), seed=t)[0] for t in range(1, steps + 1)]
    hyper = Hyper(lr=1.0, eps_s=1e-16 if make.rule.centered else 0.0)
    full, _ = oracle(make.rule, hyper, np.zeros(size), [g.bfloat16().double().numpy() for g in grads])
    lr = unit / 3 / abs(full.mean())
    moved = {}
    for at_random in (False, True):
        x = torch.nn.Parameter(torch.full((size,), start, dtype=torch.bfloat16))
        optimizer = make([x], lr=lr, stochastic_rounding=at_random)
        for g in grads:
            x.grad = g.bfloat16()
            optimizer.step()
        moved[at_random] = (x.double() - start).mean().item()
    assert moved[False] == 0
    assert moved[True] == pytest.approx(lr * full.mean(), rel=0.15)


def test_stochastic_rounding_changes_bfloat16_parameters_only():
    runs = []
    for at_random in (False, True):
        params = [*parameters((300,)), *parameters((300,), dtype=torch.float64)]
        optimizer = mvngrad.MVNGrad(params, stochastic_rounding=at_random)
        train(optimizer, 3)
        runs.append(everything(optimizer))
    assert equal(*runs)


@each_state_dtype
@each_optimizer
def test_a_group_of_mixed_dtypes_and_layouts_stores_state_in_its_state_dtype(make, state_dtype):
    params = [p for dtype in (torch.float32, torch.bfloat16, torch.float16) for p in parameters(*SHAPES, dtype=dtype)]
    params += [*parameters((7,), dtype=torch.float64), *parameters((7,), dtype=torch.complex64)]
    params.append(torch.nn.Parameter(parameters((4, 6, 5, 3))[0].detach().to(memory_format=torch.channels_last)))
    params.append(torch.nn.Parameter(torch.ones(8, 8)[::2, 1:]))
    starts = [p.detach().clone() for p in params]
    optimizer = make(params, lr=0.1, state_dtype=state_dtype)
    train(optimizer, 3)
    for param, start in zip(params, starts, strict=True):
        assert param.isfinite().all()
        assert param.numel() == 0 or not torch.equal(param, start)
        dtypes = {optimizer.state[param][name].dtype for name in make.rule.state_names}
        wide = torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype
        assert dtypes == {torch.uint8 if state_dtype == "int8" else wide if state_dtype is None else state_dtype}


@pytest.mark.parametrize("lean", [False, True], ids=["full", "lean"])
@each_state_dtype
def test_torch_compile_traces_the_step_into_one_graph(state_dtype, lean):
    counter = CompileCounter()
    optimizer = mvngrad.MVNGrad(parameters((20, 30), (5,)), lr=torch.tensor(1e-2), state_dtype=state_dtype, lean=lean)
    twin = copy.deepcopy(optimizer)
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend=counter)
    for t in range(1, 4):
        for each, stepped in ((optimizer, step), (twin, twin.step)):
            for p, g in zip(each.param_groups[0]["params"], tensors((20, 30), (5,), seed=t), strict=True):
                p.grad = g
            stepped()
    torch._dynamo.reset()
    assert counter.frame_count == 1
    torch.testing.assert_close(everything(optimizer)[:2], everything(twin)[:2], rtol=0, atol=1e-4)


@each_state_dtype
def test_what_torch_compile_traces_can_be_lowered(state_dtype):
    """Lowering also rejects writes to views of blocks, which tracing accepts."""
    optimizer = mvngrad.MVNGrad(parameters((3, 4), (5,), ()), lr=1e-2, state_dtype=state_dtype)
    twin = copy.deepcopy(optimizer)
    torch._dynamo.reset()
    for each, take in ((optimizer, torch.compile(optimizer.step, backend="aot_eager")), (twin, twin.step)):
        for p, g in zip(each.param_groups[0]["params"], tensors((3, 4), (5,), (), seed=1), strict=True):
            p.grad = g
        take()
    torch._dynamo.reset()
    torch.testing.assert_close(everything(optimizer)[:3], everything(twin)[:3], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("alias", "dtype"), [("float32", torch.float32), ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16)]
)
def test_state_dtype_accepts_names(alias, dtype):
    """In the constructor, in a group and in a conversion."""
    named = mvngrad.MVNGrad(
        [{"params": parameters((3,)), "state_dtype": alias}, {"params": parameters((3,))}], state_dtype=alias
    )
    assert [group["state_dtype"] for group in named.param_groups] == [dtype, dtype]
    train(named, 1)
    assert {value.dtype for state in named.state.values() for name, value in state.items() if name != "step"} == {dtype}
    same = [mvngrad.convert_state_dict(named.state_dict(), state_dtype)["state"][0] for state_dtype in (alias, dtype)]
    assert all(torch.equal(same[0][name], same[1][name]) for name in same[1])
    named.load_state_dict(mvngrad.convert_state_dict(named.state_dict(), alias))


# Errors

INVALID = [
    (
        {"state_dtype": torch.float16},
        r"state_dtype=torch.float16 is invalid; .* torch.bfloat16, 'int8', 'float32', 'bf16'",
    ),
    ({"state_dtype": torch.int8}, r"state_dtype=torch.int8 is invalid"),
    ({"state_dtype": "float16"}, r"state_dtype='float16' is invalid"),
    ({"state_dtype": ["bf16"]}, r"state_dtype=\['bf16'\] is invalid"),
    ({"rounding_seed": -1}, r"rounding_seed=-1 is invalid; .* \[0, 2\*\*32\)"),
    ({"rounding_seed": 2**32}, r"rounding_seed=4294967296 is invalid"),
    ({"rounding_seed": 0.5}, r"rounding_seed=0.5 is invalid; it must be an integer"),
    ({"differentiable": True, "state_dtype": torch.bfloat16}, r"differentiable=True .* leave state_dtype=None"),
    ({"differentiable": True, "state_dtype": "int8"}, r"differentiable=True .* leave state_dtype=None"),
    ({"differentiable": True, "stochastic_rounding": True}, r"differentiable=True"),
]


@pytest.mark.parametrize(("options", "message"), INVALID, ids=[str(options) for options, _ in INVALID])
@each_cell
def test_invalid_options_are_named(make, options, message):
    with pytest.raises(ValueError, match=f"{make.__name__}: .*{message}|{make.__name__}: {message}"):
        make(parameters((3,)), **options)
    with pytest.raises(ValueError, match=message):
        make([{"params": parameters((3,)), **options}])


def test_every_32_bit_seed_is_accepted():
    runs = []
    for seed in (0, 1, 2**31 - 1, 2**31, 2**32 - 1):
        optimizer = mvngrad.MVNGrad(parameters((300,)), state_dtype="int8", rounding_seed=seed)
        train(optimizer, 3)
        runs.append(everything(optimizer))
    assert not any(equal(a, b) for i, a in enumerate(runs) for b in runs[:i])


# Checkpoints


def resume(make, optimizer, **options):
    """A new optimizer on copies of the parameters, with the state loaded from a file."""
    params = [p.detach().clone().requires_grad_() for group in optimizer.param_groups for p in group["params"]]
    new = make(params, **options)
    new.load_state_dict(through_disk(optimizer.state_dict()))
    return new


def make_trained(make, steps=5, shapes=SHAPES, **options):
    optimizer = make(parameters(*shapes), lr=1e-2, **options)
    train(optimizer, steps)
    return optimizer


@each_state_dtype
@each_optimizer
def test_a_resumed_run_equals_an_uninterrupted_one(make, state_dtype):
    original = make_trained(make, state_dtype=state_dtype, rounding_seed=7)
    other = resume(make, original, state_dtype=state_dtype)
    assert equal(everything(other), everything(original))
    assert other.param_groups[0]["rounding_seed"] == 7
    assert other.param_groups[0]["state_dtype"] == state_dtype
    for each in (original, other):
        train(each, 5, seed=2)
    assert equal(everything(other), everything(original))


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("fused", [False, True])
@each_narrow_dtype
def test_a_checkpoint_moves_between_eager_and_fused_bit_for_bit(state_dtype, fused):
    original = make_trained(mvngrad.MVNGrad, state_dtype=state_dtype, fused=fused)
    there = resume(mvngrad.MVNGrad, original, state_dtype=state_dtype)
    there.param_groups[0]["fused"] = not fused
    assert equal(everything(there), everything(original))
    back = resume(mvngrad.MVNGrad, there, state_dtype=state_dtype)
    back.param_groups[0]["fused"] = fused
    for each in (original, there, back):
        train(each, 5, seed=2)
    assert equal(everything(back), everything(original))
    # The other backend continues in the same way, except for rare roundings.
    for param, other in zip(*(each.param_groups[0]["params"] for each in (original, there)), strict=True):
        torch.testing.assert_close(param, other, rtol=0, atol=1e-4)
        for name in MVNGRAD.state_names:
            differs = original.state[param][name] != there.state[other][name]
            assert differs.sum() <= max(1, 0.01 * param.numel())


@each_narrow_dtype
def test_the_seed_decides_the_rounding_of_state(state_dtype):
    runs = [
        everything(make_trained(mvngrad.MVNGrad, state_dtype=state_dtype, rounding_seed=seed)) for seed in (0, 0, 1)
    ]
    assert equal(runs[0], runs[1])
    assert not equal(runs[0], runs[2])


def run_with_gradients(which, fused=None, one_group=True):
    """The state of three equal parameters, those in `which`, after steps in which only they have gradients."""
    params = [torch.nn.Parameter(torch.linspace(1, 2, 300)) for _ in range(3)]
    options = {"lr": 1e-2, "state_dtype": torch.bfloat16, "stochastic_rounding": True, "fused": fused}
    optimizer = mvngrad.MVNGrad(params if one_group else [{"params": [param]} for param in params], **options)
    for t in range(1, 4):
        for i, param in enumerate(params):
            param.grad = torch.linspace(-1, t, 300) if i in which else None
        optimizer.step()
    return [[optimizer.state[params[i]][name] for name in "msu"] for i in sorted(which)]


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("fused", [False, True])
def test_random_bits_do_not_depend_on_which_parameters_have_gradients(fused):
    """Replicas stay equal, also if a parameter has a gradient in one process and none in another."""
    everyone, last = run_with_gradients({0, 1, 2}, fused), run_with_gradients({2}, fused)
    assert equal(everyone[-1], last[-1])
    assert not equal(everyone[-1], everyone[0])


def test_parameters_of_different_groups_draw_different_random_bits():
    first, second, third = run_with_gradients({0, 1, 2}, one_group=False)
    assert not equal(first, second)
    assert not equal(second, third)


def test_optimizers_with_one_parameter_each_draw_different_random_bits():
    values = [torch.linspace(1, 2, 300), torch.linspace(2, 3, 300), torch.linspace(1, 2, 300)]
    made = [mvngrad.MVNGrad([torch.nn.Parameter(value)], state_dtype="int8") for value in values]
    for optimizer in made:
        train(optimizer, 3)
    first, second, again = [everything(optimizer)[1:] for optimizer in made]
    assert not equal(first, second)
    assert equal(first, again)  # a run that is repeated rounds as before
    resumed = resume(mvngrad.MVNGrad, made[1], state_dtype="int8")
    for optimizer in (made[1], resumed):
        train(optimizer, 3, seed=2)
    assert equal(everything(resumed), everything(made[1]))


def test_the_seed_decides_the_rounding_of_parameters():
    runs = []
    for seed in (0, 0, 1):
        (x,) = parameters((300,), dtype=torch.bfloat16)
        optimizer = mvngrad.Adam([x], lr=1e-4, stochastic_rounding=True, rounding_seed=seed)
        train(optimizer, 5)
        runs.append([x.detach()])
    assert equal(runs[0], runs[1])
    assert not equal(runs[0], runs[2])


PAIRS = [("None", "bfloat16"), ("None", "int8"), ("float32", "int8"), ("bfloat16", "int8")]


@pytest.mark.parametrize(("one", "other"), [*PAIRS, *(pair[::-1] for pair in PAIRS)])
def test_state_of_another_dtype_is_refused_with_the_remedy(one, other):
    source, target = (
        make_trained(mvngrad.MVNGrad, state_dtype=STATE_DTYPES[state_dtype]) for state_dtype in (one, other)
    )
    before = everything(target)
    with pytest.raises(ValueError, match=r"mvngrad.convert_state_dict\(state_dict, .*\)"):
        target.load_state_dict(source.state_dict())
    assert equal(everything(target), before)


def test_groups_of_different_state_dtypes_load_what_the_error_names():
    a, b = parameters((4,), (3,))
    source = mvngrad.MVNGradW([{"params": [a]}, {"params": [b]}])
    target = mvngrad.MVNGradW([{"params": [a], "state_dtype": "int8"}, {"params": [b]}])
    source.init_state()
    with pytest.raises(ValueError, match=r"convert_state_dict\(state_dict, \['int8', None\]\)$"):
        target.load_state_dict(source.state_dict())
    target.load_state_dict(mvngrad.convert_state_dict(source.state_dict(), ["int8", None]))
    assert (target.state[a]["m"].dtype, target.state[b]["m"].dtype) == (torch.uint8, torch.float32)
    target.step()
    with pytest.raises(ValueError, match="has 1 dtypes for 2 groups"):
        mvngrad.convert_state_dict(source.state_dict(), ["int8"])


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(("before", "after"), [*PAIRS, *(pair[::-1] for pair in PAIRS)])
def test_changing_the_state_dtype_of_a_group_with_state_is_refused(before, after, lean):
    optimizer = make_trained(mvngrad.MVNGrad, state_dtype=STATE_DTYPES[before], lean=lean)
    optimizer.param_groups[0]["state_dtype"] = STATE_DTYPES[after]
    with pytest.raises(ValueError, match=r"changed in its group; set it back"):
        train(optimizer, 1)
    optimizer.param_groups[0]["state_dtype"] = STATE_DTYPES[before]
    train(optimizer, 1)


def test_none_and_float32_load_each_other():
    for one, other in ((None, torch.float32), (torch.float32, None)):
        source = make_trained(mvngrad.MVNGrad, state_dtype=one)
        target = resume(mvngrad.MVNGrad, source, state_dtype=other)
        assert equal(everything(target), everything(source))
        assert target.param_groups[0]["state_dtype"] == other


@pytest.mark.parametrize("options", [{}, {"lean": True}], ids=["full", "lean"])
@pytest.mark.parametrize("own", STATE_DTYPES)
@pytest.mark.parametrize("saved", STATE_DTYPES)
def test_a_converted_state_dict_loads_and_trains(saved, own, options):
    source = make_trained(mvngrad.MVNGrad, state_dtype=STATE_DTYPES[saved], **options)
    before = everything(source)
    converted = mvngrad.convert_state_dict(through_disk(source.state_dict()), STATE_DTYPES[own])
    params = [p.detach().clone().requires_grad_() for p in source.param_groups[0]["params"]]
    target = mvngrad.MVNGrad(params, state_dtype=STATE_DTYPES[own], **options)
    target.load_state_dict(through_disk(converted))
    # Rounded to the nearest: half a step.
    relative = {"bfloat16": 2**-8, "int8": 2**-4}.get(own, 0) if saved != own else 0
    for p, q in zip(source.param_groups[0]["params"], params, strict=True):
        assert target.state[q]["step"] == source.state[p]["step"]
        for name, value in load_values(source, p).items():
            near_zero = 2**-19 * value.abs().max().item() if own == "int8" and value.numel() else 0
            torch.testing.assert_close(load_values(target, q)[name], value, rtol=1.01 * relative, atol=near_zero)
    train(target, 3)
    assert all(param.isfinite().all() for param in params)
    assert equal(everything(source), before), "the source was changed"


@pytest.mark.parametrize("wide", [None, torch.float32], ids=str)
def test_converting_8_bit_state_to_floats_and_back_changes_nothing(wide):
    source = make_trained(mvngrad.MVNGrad, state_dtype="int8", shapes=[(2000,), (3, 5)])
    saved = source.state_dict()
    back = mvngrad.convert_state_dict(mvngrad.convert_state_dict(saved, wide), "int8")
    again = mvngrad.MVNGrad(parameters((2000,), (3, 5)), state_dtype="int8")
    again.load_state_dict(back)
    for param, other in zip(*(each.param_groups[0]["params"] for each in (source, again)), strict=True):
        assert equal(load_values(source, param).values(), load_values(again, other).values())


def test_conversion_skips_parameters_without_state():
    a, b = parameters((3,), (3,))
    optimizer = mvngrad.MVNGrad([a, b])
    b.requires_grad_(False)
    train(optimizer, 2)
    assert not optimizer.state[b]  # reading it creates an empty entry
    converted = mvngrad.convert_state_dict(optimizer.state_dict(), "int8")
    target = mvngrad.MVNGrad(parameters((3,), (3,)), state_dtype="int8")
    target.load_state_dict(converted)
    train(target, 1)


def test_8_bit_state_of_channels_last_loads_into_a_contiguous_parameter():
    (x,) = parameters((8, 6, 5, 3))
    tall = torch.nn.Parameter(x.detach().to(memory_format=torch.channels_last))
    source = mvngrad.MVNGrad([tall], state_dtype="int8")
    train(source, 5)
    target = mvngrad.MVNGrad([x], state_dtype="int8")
    target.load_state_dict(through_disk(source.state_dict()))
    assert not source.state[tall]["m"].is_contiguous()
    assert target.state[x]["m"].is_contiguous()
    for name, value in load_values(source, tall).items():  # blocks have other coordinates, so values are rounded again
        top = value.abs().max().item()
        torch.testing.assert_close(load_values(target, x)[name], value, rtol=2**-3, atol=2**-18 * top)
    train(target, 2)


@each_optimizer
def test_a_checkpoint_without_the_newer_options_loads(make):
    original = make_trained(make)
    old = through_disk(original.state_dict())
    for group in old["param_groups"]:
        for name in ("state_dtype", "stochastic_rounding", "rounding_seed", "lean"):
            group.pop(name, None)
    params = [p.detach().clone().requires_grad_() for p in original.param_groups[0]["params"]]
    twin = make(params)
    twin.load_state_dict(old)
    for each in (original, twin):
        train(each, 3, seed=2)
    assert equal(everything(twin), everything(original))


def pickle_copy(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("options", [{}, {"lean": True}], ids=["full", "lean"])
@pytest.mark.parametrize("clone", [copy.deepcopy, pickle_copy])
@each_state_dtype
def test_copied_optimizers_with_rounded_state_continue_bit_for_bit(clone, state_dtype, options):
    original = make_trained(mvngrad.MVNGrad, state_dtype=state_dtype, rounding_seed=3, **options)
    twin = clone(original)
    for each in (original, twin):
        train(each, 5, seed=2)
    assert equal(everything(twin), everything(original))
    assert repr(twin) == repr(original)


# The kernels


@each_device
@pytest.mark.parametrize("rule", [MVNGRAD, LEAN], ids=lambda rule: rule.name)
@each_narrow_dtype
def test_overflow_changes_no_rounded_state_and_the_scale_is_divided_out(state_dtype, rule, device, kernel):
    shapes, hyper, rounding = [(2348,), (5,), (), (0,)], Hyper(lr=1e-2, eps_s=1e-16), Rounding(9)
    sides = []
    for _ in range(2):
        params = tensors(*shapes, device=device)
        state, steps = new_state(rule, state_dtype, params), [torch.zeros((), device=device) for _ in params]
        sides.append((params, state, steps))
    ours, twins = ([*params, *chain.from_iterable(state.values()), *steps] for params, state, steps in sides)
    first = [1.0] if device == "cuda" else []  # with a step count of 0 the interpreter warns
    for t, overflow in enumerate([*first, 0.0, 1.0, 0.0, 1.0]):
        g = tensors(*shapes, device=device, seed=t + 1)
        before = [x.clone() for x in ours]
        scale, found_inf = torch.tensor(4.0, device=device), torch.tensor(overflow, device=device)
        (params, state, steps), twin = sides
        step(kernel, rule, hyper, params, [4 * x for x in g], state, steps, scale, found_inf, rounding=rounding)
        if overflow:
            assert equal(ours, before)
        else:
            assert not equal(ours, before)
            step(kernel, rule, hyper, twin[0], g, *twin[1:], rounding=rounding)
    assert equal(ours, twins)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(
    ("state_dtype", "size"), [("int8", 1e-20), ("int8", 1e18), (torch.bfloat16, 1e-15), (torch.bfloat16, 1e15)], ids=str
)
def test_kernels_store_state_of_every_magnitude_as_eager_does(state_dtype, size, device, kernel):
    """Squares from denormal numbers to 1e36, with one block of zeros and one with a single number."""
    grads = [size * tensors((1200,), seed=t)[0] for t in range(1, 4)]
    for g in grads:
        g[256:512] = 0
        g[513:768] = 0
    runs = []
    for backend in ("eager", kernel):
        params, steps = tensors((1200,)), [torch.zeros(())]
        state = new_state(MVNGRAD, state_dtype, params)
        for g in grads:
            step(backend, MVNGRAD, Hyper(lr=1e-2), params, [g], state, steps)
        runs.append({name: stored for name, (stored,) in state.items()})
    for name in MVNGRAD.state_names:
        assert (runs[0][name] == runs[1][name]).float().mean() > 0.99
        values = [load_state(MVNGRAD.state_names, stored, torch.float32)[name] for stored in runs]
        assert values[1].isfinite().all()
        assert not values[1][256:512].any()


def test_state_that_is_a_view_with_gaps_is_converted_by_value():
    (param,) = parameters((4, 8))
    optimizer = mvngrad.MVNGrad([param])
    param.grad = torch.arange(1.0, 33.0).reshape(4, 8)
    optimizer.step()
    state_dict = optimizer.state_dict()
    state_dict["state"][0] = {k: v[:, :4] if v.dim() else v for k, v in state_dict["state"][0].items()}
    again = mvngrad.convert_state_dict(mvngrad.convert_state_dict(state_dict, "int8"), torch.float32)
    for name in ("m", "s", "u"):
        torch.testing.assert_close(again["state"][0][name], state_dict["state"][0][name], rtol=0.1, atol=0)
