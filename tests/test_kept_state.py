"""State in fewer bits and lean MVN-Grad, as an optimizer's user meets them."""

import copy
import io

import numpy as np
import pytest
import torch
from family import NUMPY, OPTIMIZERS, equal, everything, parameters, tensors, train

import mvngrad
from mvngrad.optim import storage
from mvngrad.rule import CELLS, LEAN, MVNGRAD, Hyper

KINDS = [None, torch.float32, torch.bfloat16, "int8"]
NARROW = [torch.bfloat16, "int8"]
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
SHAPES = [(33, 17), (5,), (), (0,), (1,), (600,)]


@pytest.mark.parametrize("kind", NARROW, ids=str)
def test_quiet_bfloat16_state_decays_where_plain_rounding_freezes(kind):
    quiet = 5000
    x = torch.nn.Parameter(torch.ones(1024))
    optimizer = mvngrad.MVNGrad([x], lr=0.0, eps_s=0.0, state_dtype=kind)
    train(optimizer, 20)
    (kept,) = optimizer.state.values()
    before = storage.opened(["s"], kept, torch.float64)["s"].mean()
    frozen = torch.full((), before.item(), dtype=torch.bfloat16)
    for _ in range(quiet):
        x.grad = torch.zeros_like(x)
        optimizer.step()
        frozen = (frozen * 0.999).to(torch.bfloat16)
    after = storage.opened(["s"], kept, torch.float64)["s"].mean()
    assert after / before == pytest.approx(0.999**quiet, rel=0.2)
    assert frozen > 0.5 * before


@pytest.mark.parametrize(
    ("options", "limit"),
    [({"state_dtype": torch.bfloat16}, 6.1), ({"state_dtype": "int8"}, 3.3), ({"lean": True}, 8.1)],
)
def test_state_takes_no_more_bytes_than_promised(options, limit):
    (x,) = parameters((512, 512))
    optimizer = mvngrad.MVNGrad([x], **options)
    train(optimizer, 1)
    assert sum(value.nbytes for value in optimizer.state[x].values()) / x.numel() < limit


@each_kind
@each_optimizer
def test_a_saved_run_goes_on_bit_for_bit(make, kind):
    runs = []
    for interrupted in (False, True):
        params = parameters(*SHAPES)
        optimizer = make(params, lr=1e-2, state_dtype=kind, rounding_seed=3)
        train(optimizer, 4)
        if interrupted:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = make(params, state_dtype=kind)
            optimizer.load_state_dict(torch.load(file, weights_only=True))
            assert optimizer.param_groups[0]["rounding_seed"] == 3
        train(optimizer, 4, seed=2)
        runs.append(everything(optimizer))
    assert equal(*runs)


@pytest.mark.parametrize("kind", NARROW, ids=str)
def test_the_seed_decides_the_rounding(kind):
    runs = []
    for seed in (0, 0, 1):
        optimizer = mvngrad.MVNGrad(parameters(*SHAPES), state_dtype=kind, rounding_seed=seed)
        train(optimizer, 3)
        runs.append(everything(optimizer))
    assert equal(runs[0], runs[1])
    assert not equal(runs[0], runs[2])


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("kind", NARROW, ids=str)
def test_a_checkpoint_moves_between_paths(kind):
    source = mvngrad.MVNGradW(parameters(*SHAPES), fused=True, state_dtype=kind)
    train(source, 3)
    target = mvngrad.MVNGradW(parameters(*SHAPES, seed=7), state_dtype=kind)
    target.load_state_dict(source.state_dict())
    kept = [list(optimizer.state.values()) for optimizer in (source, target)]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(*kept, strict=True) for name in a)


@each_kind
def test_a_copy_of_an_optimizer_goes_on_as_it_does(kind):
    optimizer = mvngrad.MVNGrad(parameters(*SHAPES), state_dtype=kind, lean=True)
    train(optimizer, 3)
    other = copy.deepcopy(optimizer)
    for each in (optimizer, other):
        train(each, 3, seed=2)
    assert equal(everything(optimizer), everything(other))


@pytest.mark.parametrize("own", [*NARROW, torch.float32], ids=str)
@pytest.mark.parametrize("saved", [*NARROW, torch.float32], ids=str)
def test_state_of_another_dtype_is_loaded_when_it_is_converted(saved, own):
    source = mvngrad.MVNGradW(parameters(*SHAPES), state_dtype=saved)
    train(source, 3)
    target = mvngrad.MVNGradW(parameters(*SHAPES), state_dtype=own)
    if saved != own:
        with pytest.raises(ValueError, match="convert_state_dict"):
            target.load_state_dict(source.state_dict())
        assert not target.state
    target.load_state_dict(mvngrad.convert_state_dict(source.state_dict(), own))
    for kept, other in zip(source.state.values(), target.state.values(), strict=True):
        values = [storage.opened(MVNGRAD.slots, each, torch.float32) for each in (kept, other)]
        for slot in MVNGRAD.slots:
            a, b = values[0][slot], values[1][slot]
            torch.testing.assert_close(a, b, rtol=0.26, atol=1e-4 * a.abs().max().item() if a.numel() else 0)
    train(target, 2)


@pytest.mark.parametrize("wide", [torch.float32, None], ids=str)
def test_8_bits_survive_the_way_to_float32_and_back(wide):
    source = mvngrad.MVNGradW(parameters(*SHAPES), state_dtype="int8")
    train(source, 5)
    saved = source.state_dict()
    back = mvngrad.convert_state_dict(mvngrad.convert_state_dict(saved, wide), "int8")
    for key, kept in saved["state"].items():
        values = [storage.opened(MVNGRAD.slots, each, torch.float32) for each in (kept, back["state"][key])]
        assert all(torch.equal(values[0][slot], values[1][slot]) for slot in MVNGRAD.slots)


def test_8_bit_state_of_another_memory_layout_is_encoded_anew():
    (x,) = parameters((8, 6, 5, 3))
    source = mvngrad.MVNGrad([torch.nn.Parameter(x.detach().to(memory_format=torch.channels_last))], state_dtype="int8")
    train(source, 3)
    target = mvngrad.MVNGrad([x], state_dtype="int8")
    target.load_state_dict(source.state_dict())
    (kept,), (other,) = source.state.values(), target.state.values()
    assert other["m"].is_contiguous()
    values = [storage.opened(MVNGRAD.slots, each, torch.float32)["m"] for each in (kept, other)]
    torch.testing.assert_close(*values, rtol=0.13, atol=1e-4)


def test_lean_and_not_lean_refuse_each_others_state():
    lean, full = (mvngrad.MVNGrad(parameters((4,)), lean=lean) for lean in (True, False))
    for one, other in ((lean, full), (full, lean)):
        train(one, 1)
        with pytest.raises(ValueError, match=r"not a state_dict of MVNGrad\(lean="):
            other.load_state_dict(one.state_dict())


def test_a_kind_of_state_cannot_be_changed_on_the_way():
    optimizer = mvngrad.MVNGrad(parameters((4,)))
    train(optimizer, 1)
    optimizer.param_groups[0]["state_dtype"] = "int8"
    with pytest.raises(ValueError, match="from before lean or state_dtype changed"):
        train(optimizer, 1)


@pytest.mark.parametrize("kind", NARROW, ids=str)
@pytest.mark.parametrize("rule", [*CELLS, LEAN], ids=lambda rule: rule.name)
def test_overflow_leaves_codes_and_scales_as_they_were(rule, kind, triton):
    from mvngrad.optim.launch import Launches

    params = tensors((300,), (5, 7))
    each = [storage.empty(rule.slots, param, kind) for param in params]
    state = {name: [kept[name] for kept in each] for name in storage.names(rule.slots, kind)}
    steps = [torch.zeros(()) for _ in params]
    grads = tensors((300,), (5, 7), seed=1)
    launches = Launches(rule, params, grads, state, steps)
    for overflow in (0.0, 1.0):
        before = [x.clone() for x in (*params, *steps, *(x for kept in state.values() for x in kept))]
        assert launches.point(grads)
        launches.run(Hyper(lr=1e-2), None, torch.tensor(overflow))
        after = [*params, *steps, *(x for kept in state.values() for x in kept)]
        assert equal(after, before) == (overflow == 1)


@pytest.mark.parametrize("at_random", [False, True])
def test_small_steps_of_bfloat16_parameters_are_kept_only_when_rounded_at_random(at_random):
    x = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = mvngrad.Adam([x], lr=1e-5, stochastic_rounding=at_random)
    for _ in range(50):
        x.grad = torch.ones_like(x)
        optimizer.step()
    moved = 1 - x.double().mean().item()
    assert moved == (pytest.approx(5e-4, rel=0.2) if at_random else 0)


def test_lean_is_mvn_grad_while_the_normalizer_stands_still():
    """Gradients that keep s where it is: g = m +- d after every mean, as the rule centres with the new mean."""
    hyper = Hyper(beta1=0.9, beta2=0.8, eps=1e-3)
    s, x = np.full(5, 0.04), np.zeros(5)
    full = {"m": np.linspace(-1, 1, 5), "s": s, "u": np.zeros(5)}
    t = 10**6  # where the bias corrections are 1
    full["u"] = full["m"] / (np.sqrt(s) + hyper.eps)
    lean = {"s": full["s"], "u": full["u"]}
    y = x
    for step in range(50):
        g = full["m"] + (-1) ** step * np.sqrt(s) / hyper.beta1  # g - m_t = beta1 (g - m_{t-1}) = +- sqrt(s)
        x, full = MVNGRAD.update(x, g, full, t + step, hyper, NUMPY)
        y, lean = LEAN.update(y, g, lean, t + step, hyper, NUMPY)
        np.testing.assert_allclose(full["s"], s, rtol=1e-12)
        np.testing.assert_allclose(lean["s"], full["s"], rtol=1e-10)
        np.testing.assert_allclose(lean["u"], full["u"], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-12)


def test_the_first_step_of_lean_is_mvn_grads():
    runs = []
    for lean in (False, True):
        params = parameters(*SHAPES)
        train(mvngrad.MVNGrad(params, lr=0.1, lean=lean), 1)
        runs.append([p.detach() for p in params])
    assert equal(*runs)


def test_with_z_clip_lean_rebuilds_the_mean_of_clipped_gradients():
    hyper = Hyper(beta1=0.5, beta2=0.5, z_clip=1.0)
    root = 2.0
    state = {"s": np.array(root**2), "u": np.array(0.25)}
    rebuilt = LEAN._rebuilt(state, 10**6, hyper, NUMPY)
    assert rebuilt == pytest.approx(0.25 * root)
    for g in (100.0, -1e6, 3.0):
        _, state = LEAN.update(np.array(0.0), np.array(g), state, 10**6, hyper, NUMPY)
        assert abs(state["u"]) <= 1


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (mvngrad.Adam, {"lean": True}, r"Adam has no lean=True; it belongs to MVN-Grad"),
        (mvngrad.MVNGrad, {"lean": True, "beta_mean": 0.5}, r"lean=True rebuilds m from u.*leave beta_mean=None"),
        (mvngrad.Adam, {"state_dtype": torch.float16}, r"state_dtype=torch.float16 is invalid; it must be one of"),
        (mvngrad.Adam, {"state_dtype": "int4"}, r"state_dtype='int4' is invalid"),
        (mvngrad.Adam, {"rounding_seed": -1}, r"rounding_seed=-1 is invalid"),
        (mvngrad.Adam, {"state_dtype": "int8", "differentiable": True}, r"leave state_dtype=None"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(parameters((3,)), **options)


def test_float16_parameters_are_not_rounded_at_random():
    optimizer = mvngrad.Adam(parameters((3,), dtype=torch.float16), stochastic_rounding=True)
    with pytest.raises(ValueError, match="rounds bfloat16 parameters"):
        train(optimizer, 1)


def test_a_conversion_to_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="state_dtype='int4' is invalid"):
        mvngrad.convert_state_dict({"state": {}, "param_groups": []}, "int4")
