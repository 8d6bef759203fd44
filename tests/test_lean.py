"""Lean MVN-Grad, which rebuilds m from u and s: where it equals MVN-Grad, and where it does not."""

import math

import pytest
import torch
from family import OPTIMIZERS, equal, everything, parameters, tensors, train
from hypothesis import given, settings, strategies as st

import mvngrad
from mvngrad.rule import LEAN, MVNGRAD, SCALAR, Hyper

quick = settings(deadline=None, max_examples=100)
signs = st.sampled_from([-1.0, 1.0])
beta1s, beta2s = st.floats(0.05, 0.99), st.floats(0.0, 0.999)
LEANABLE = [mvngrad.MVNGrad, mvngrad.MVNGradW]
each_leanable = pytest.mark.parametrize("make", LEANABLE, ids=lambda make: make.__name__)


def positive(low, high):
    return st.floats(math.log10(low), math.log10(high)).map(lambda exponent: 10**exponent)


def rebuild_mean(state, t, hyper):
    """The m that step t + 1 starts from."""
    return LEAN.reconstruct_mean(state, t + 1, hyper, SCALAR)


# Compared with MVN-Grad


@quick
@given(st.lists(signs, min_size=2, max_size=20), positive(1e-6, 1e6), beta1s, st.floats(0.9, 0.999), st.floats(0, 1))
def test_lean_equals_mvn_grad_while_the_normalizer_is_constant(directions, spread, beta1, beta2, eps):
    """With g = m +- spread/beta1, the deviation from the new mean is +- spread, so s/c_v is spread^2 at every step.

    Then every gradient is divided by the same normalizer, and lean rebuilds m exactly, for every choice of signs.
    An error in the rebuilt m changes s, and through s the next m. The effect grows as beta2 falls and u grows. If beta2
    is far from 1 and the signs agree, rounding errors grow from step to step: hence few steps, and beta2 near 1.
    """
    hyper = Hyper(lr=0.1, beta1=beta1, beta2=beta2, eps=eps)
    x = y = 1.0
    full, lean = MVNGRAD.init(0.0), LEAN.init(0.0)
    for t, sign in enumerate(directions, start=1):
        g = full["m"] + sign * spread / beta1
        x, full = MVNGRAD.update(x, g, full, t, hyper, SCALAR)
        y, lean = LEAN.update(y, g, lean, t, hyper, SCALAR)
        assert math.sqrt(full["s"] / (1 - beta2**t)) == pytest.approx(spread, rel=1e-9)
        assert rebuild_mean(lean, t, hyper) == pytest.approx(full["m"], rel=1e-9, abs=1e-9 * spread)
        assert lean["s"] == pytest.approx(full["s"], rel=1e-9)
        assert lean["u"] == pytest.approx(full["u"], rel=1e-9, abs=1e-9)
        assert y == pytest.approx(x, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@each_leanable
def test_the_first_lean_step_equals_mvn_grad_bit_for_bit(make, dtype):
    runs = []
    for lean in (False, True):
        params = parameters((33, 7), (5,), (), dtype=dtype)
        optimizer = make(params, lr=0.1, lean=lean)
        train(optimizer, 1)
        runs.append([*(p.detach() for p in params), *(optimizer.state[p][name] for p in params for name in ("s", "u"))])
    assert equal(*runs)


def test_lean_differs_from_mvn_grad_after_the_normalizer_changes():
    """A large gradient raises s, and with it the rebuilt m of the earlier small gradients."""
    hyper = Hyper(beta1=0.5, beta2=0.5, eps=0.0)
    full, lean = MVNGRAD.init(0.0), LEAN.init(0.0)
    for t, g in enumerate([1.0, 2.0, 100.0], start=1):
        _, full = MVNGRAD.update(0.0, g, full, t, hyper, SCALAR)
        _, lean = LEAN.update(0.0, g, lean, t, hyper, SCALAR)
    assert full["m"] == 0.125 + 0.5 + 50
    assert rebuild_mean(lean, 3, hyper) > 1.2 * full["m"]


def test_lean_stores_s_and_u_only():
    (x,) = parameters((3,))
    optimizer = mvngrad.MVNGrad([x], lean=True)
    train(optimizer, 1)
    assert set(optimizer.state[x]) == {"step", "s", "u"}


# z_clip


gradients = st.lists(st.just(0.0) | st.builds(math.copysign, positive(1e-30, 1e30), signs), min_size=1, max_size=60)


@quick
@given(gradients, beta1s, beta2s, positive(1e-2, 1e2))
def test_with_z_clip_u_is_bounded_for_every_sequence_of_gradients(grads, beta1, beta2, clip):
    hyper = Hyper(lr=1.0, beta1=beta1, beta2=beta2, z_clip=clip)
    x, state = 0.0, LEAN.init(0.0)
    for t, g in enumerate(grads, start=1):
        before = x
        x, state = LEAN.update(x, g, state, t, hyper, SCALAR)
        assert abs(state["u"]) <= clip * (1 - beta1**t) * (1 + 1e-9)
        assert abs(x - before) <= clip * (1 + 1e-9) + 1e-12 * abs(x)


def test_without_z_clip_u_is_unbounded():
    hyper = Hyper(beta1=0.9, beta2=0.999)
    state = LEAN.init(0.0)
    for t, g in enumerate([1e-6] * 50 + [1.0], start=1):
        _, state = LEAN.update(0.0, g, state, t, hyper, SCALAR)
    assert abs(state["u"]) > 1


@quick
@given(st.lists(st.tuples(signs, st.floats(0, 20)), min_size=1, max_size=40), positive(1e-3, 1e3), st.floats(0.1, 5))
def test_with_z_clip_the_rebuilt_m_is_the_mean_of_clipped_gradients(drawn, root, clip):
    """An outlier is clipped to `clip` times the root; in MVN-Grad's m it is not clipped.

    s is reset after every step, as if beta2 were 1: the normalizer is constant for all gradients.
    """
    hyper = Hyper(beta1=0.7, beta2=0.9, eps=0.0, z_clip=clip)
    late = 10**6  # a step at which the bias corrections are 1
    state, mean = {"s": root**2, "u": 0.0}, 0.0
    for sign, size in drawn:
        g = sign * size * root
        _, new = LEAN.update(0.0, g, dict(state), late, hyper, SCALAR)
        # The step's own root is that of the new s.
        own = math.sqrt(new["s"])
        clipped = max(-clip * own, min(clip * own, g))
        mean = 0.7 * mean + 0.3 * clipped * root / own
        state = {"s": root**2, "u": new["u"]}
        assert rebuild_mean(state, late, hyper) == pytest.approx(mean, rel=1e-9, abs=1e-9 * root)
        assert abs(mean) <= clip * root * (1 + 1e-9)


def test_an_outlier_weighs_less_in_the_rebuilt_m_than_in_a_stored_m():
    hyper = Hyper(beta1=0.9, beta2=0.999, z_clip=2.0)
    full, lean = MVNGRAD.init(0.0), LEAN.init(0.0)
    for t in range(1, 41):
        g = 1e4 if t == 40 else (-1.0) ** t
        _, full = MVNGRAD.update(0.0, g, full, t, hyper, SCALAR)
        _, lean = LEAN.update(0.0, g, lean, t, hyper, SCALAR)
    assert full["m"] == pytest.approx(1e3, rel=1e-2)  # a tenth of the outlier
    root = math.sqrt(lean["s"] / (1 - 0.999**40))
    assert rebuild_mean(lean, 40, hyper) == pytest.approx(0.1 * 2 * root, rel=0.3)  # a tenth of two roots
    assert rebuild_mean(lean, 40, hyper) < full["m"] / 2


# Options, groups and checkpoints


@each_leanable
def test_lean_excludes_beta_mean(make):
    with pytest.raises(ValueError, match=r"lean=True rebuilds m from u.*leave beta_mean=None"):
        make(parameters((3,)), lean=True, beta_mean=0.5)
    with pytest.raises(ValueError, match=r"leave beta_mean=None"):
        make([{"params": parameters((3,)), "lean": True}], beta_mean=0.5)
    (param,) = parameters((3,))
    optimizer = make([param], lean=True)
    optimizer.param_groups[0]["beta_mean"] = 0.5  # by hand: the kernels obeyed it, and the other paths did not
    param.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"leave beta_mean=None"):
        optimizer.step()
    assert "beta_mean: 0.5" in repr(optimizer)


@pytest.mark.parametrize("make", [m for m in OPTIMIZERS if m not in LEANABLE], ids=lambda m: m.__name__)
def test_other_cells_have_no_lean(make):
    with pytest.raises(ValueError, match=rf"{make.__name__} has no lean=True; it belongs to MVN-Grad"):
        make(parameters((3,)), lean=True)
    with pytest.raises(ValueError, match="has no lean=True"):
        make([{"params": parameters((3,)), "lean": True}])


def test_lean_and_full_groups_do_not_affect_each_other():
    def run(*groups):
        optimizer = mvngrad.MVNGrad([{"params": parameters((30,)), "lean": lean} for lean in groups], lr=1e-2)
        for t in range(1, 6):
            for group in optimizer.param_groups:
                group["params"][0].grad = tensors((30,), seed=t)[0]
            optimizer.step()
        return [[p.detach(), *optimizer.state[p].values()] for group in optimizer.param_groups for p in group["params"]]

    for together, (alone,) in zip(run(True, False), (run(True), run(False)), strict=True):
        assert equal(together, alone)


@pytest.mark.parametrize("saved", [False, True])
@each_leanable
def test_lean_and_not_lean_refuse_each_others_state(make, saved):
    source, target = (make(parameters((4, 3)), lean=lean) for lean in (saved, not saved))
    train(source, 2)
    train(target, 2)
    before = everything(target)
    with pytest.raises(ValueError, match=rf"not a state_dict of {make.__name__}\(lean={not saved}\)"):
        target.load_state_dict(source.state_dict())
    assert equal(everything(target), before)
