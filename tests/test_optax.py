"""`mvngrad.optax` against the torch classes, and with the wrappers of optax and JAX."""

import collections
import math
import os
import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from family import jax_in_float64

import mvngrad
from mvngrad import optax as ours, rule

STEPS = 1000


@pytest.fixture
def float64():
    with jax_in_float64():
        yield


def gradients():
    """Independent of the parameters: on a loss, rounding differences would grow along a chaotic path."""
    return np.random.default_rng(0).normal(size=(STEPS, 3)) * np.array([1.0, 0.1, 1e-3]) + np.array([0.3, 0.0, 1e-3])


def torch_path(make, schedule=lambda t: 0.01):
    """Parameters after every step."""
    x = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer, path = make([x]), []
    for t, gradient in enumerate(torch.tensor(gradients())):
        optimizer.param_groups[0]["lr"] = schedule(t)
        x.grad = gradient
        optimizer.step()
        path.append(x.detach().clone())
    return torch.stack(path).numpy()


def jax_path(transformation):
    def step(carry, gradient):
        x, state = carry
        updates, state = transformation.update(gradient, state, x)
        x = optax.apply_updates(x, updates)
        return (x, state), x

    x = jnp.array([1.0, -2.0, 3.0])
    return np.asarray(jax.lax.scan(step, (x, transformation.init(x)), jnp.array(gradients()))[1])


def make_transformation(cell, **hyper):
    return optax.chain(ours.scale_by_rule(cell, rule.Hyper(**hyper)), optax.scale_by_learning_rate(0.01))


PAIRS = {
    "adam": (lambda p: mvngrad.Adam(p), lambda: make_transformation(rule.ADAM)),
    "adabelief": (
        lambda p: mvngrad.AdaBelief(p, eps_s=1e-10),
        lambda: make_transformation(rule.ADABELIEF, eps_s=1e-10),
    ),
    "laprop": (lambda p: mvngrad.LaPropW(p, weight_decay=0), lambda: ours.laprop(0.01)),
    "laprop with decay": (lambda p: mvngrad.LaPropW(p, weight_decay=0.1), lambda: ours.laprop(0.01, weight_decay=0.1)),
    "laprop with z_clip": (
        lambda p: mvngrad.LaPropW(p, weight_decay=0, z_clip=0.5),
        lambda: ours.laprop(0.01, z_clip=0.5),
    ),
    "mvn_grad": (lambda p: mvngrad.MVNGradW(p, weight_decay=0), lambda: ours.mvn_grad(0.01)),
    "mvn_grad with decay": (
        lambda p: mvngrad.MVNGradW(p, weight_decay=0.1),
        lambda: ours.mvn_grad(0.01, weight_decay=0.1),
    ),
    "mvn_grad with decouple_lr": (
        lambda p: mvngrad.MVNGradW(p, lr=0.01, weight_decay=1e-3, decouple_lr=True),
        lambda: ours.mvn_grad(0.01, weight_decay=0.1),
    ),
    "mvn_grad with coupled decay": (
        lambda p: mvngrad.MVNGrad(p, weight_decay=0.1),
        lambda: optax.chain(optax.add_decayed_weights(0.1), ours.mvn_grad(0.01)),
    ),
    "mvn_grad with all options": (
        lambda p: mvngrad.MVNGrad(p, betas=(0.95, 0.9), eps=1e-6, eps_s=1e-8, beta_mean=0.5, z_clip=2.0),
        lambda: ours.mvn_grad(0.01, 0.95, 0.9, 1e-6, 1e-8, b_mean=0.5, z_clip=2.0),
    ),
    "lean": (lambda p: mvngrad.MVNGrad(p, lean=True), lambda: ours.mvn_grad(0.01, lean=True)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equals_the_torch_class_over_1000_steps(float64, name):
    make, transformation = PAIRS[name]
    np.testing.assert_allclose(jax_path(transformation()), torch_path(make), rtol=1e-12, atol=1e-12)


def test_follows_a_schedule_as_the_torch_class_does(float64):
    schedule = optax.cosine_decay_schedule(0.02, STEPS)
    path = torch_path(lambda p: mvngrad.MVNGradW(p, weight_decay=0.1), lambda t: float(schedule(t)))
    np.testing.assert_allclose(jax_path(ours.mvn_grad(schedule, weight_decay=0.1)), path, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("b2", [0.0, 0.1, 0.49, 0.5, 0.999])
def test_lean_is_finite_in_float32_under_jit(b2):
    """XLA may add TINY to the 1 of 1 - b2^0 first, which leaves a divisor of 0."""
    transformation = ours.mvn_grad(0.1, b2=b2, lean=True)
    x = jnp.ones(3)
    updates, state = jax.jit(transformation.update)(x, transformation.init(x))
    np.testing.assert_allclose(updates, -0.1 / 0.9, rtol=1e-4)
    assert state[0].m is None


def test_bias_correction_is_accurate_in_float32():
    for t in (0, 1, 3, 1000, 2**31 - 1):
        for beta in (0.0, 1e-3, 0.49, 0.5, 0.9, 0.999, 0.9999999):
            correction = ours.JAX.correction(beta, jnp.asarray(t, jnp.float32))
            expected = -math.expm1(t * math.log(beta)) if beta else float(t > 0)
            assert float(correction) == pytest.approx(expected, rel=1e-6)


def test_compiles_once_across_steps_and_schedule():
    transformation, traces = ours.mvn_grad(optax.linear_schedule(0.1, 0.0, 10), weight_decay=0.1), []

    @jax.jit
    def step(x, state):
        traces.append(1)
        updates, state = transformation.update(x, state, x)
        return optax.apply_updates(x, updates), state

    x = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
    state = transformation.init(x)
    for _ in range(5):
        x, state = step(x, state)
    assert len(traces) == 1


def test_inject_hyperparams_changes_a_beta_between_steps(float64):
    injected = optax.inject_hyperparams(ours.mvn_grad)(learning_rate=0.01, b1=0.9, z_clip=1.0)
    x = jnp.array([1.0, -2.0, 3.0])
    state = injected.init(x)
    update = jax.jit(injected.update)
    _, state = update(x, state, x)
    state.hyperparams["b1"] = jnp.asarray(0.5)
    changed, _ = update(x, state, x)
    state.hyperparams["b1"] = jnp.asarray(0.9)
    same, _ = update(x, state, x)
    assert not np.allclose(changed, same)


@pytest.mark.parametrize("mu_dtype", ["bf16", 16, torch.bfloat16], ids=str)
def test_a_mu_dtype_that_is_no_dtype_of_jax_is_named(mu_dtype):
    with pytest.raises(TypeError, match=rf"mu_dtype={mu_dtype!r} is no dtype of JAX; pass jnp\.bfloat16"):
        ours.mvn_grad(0.1, mu_dtype=mu_dtype)
    injected = optax.inject_hyperparams(ours.mvn_grad)(0.1, mu_dtype=jnp.bfloat16)
    with pytest.raises(TypeError, match=r"mu_dtype=.* static_args=\('mask', 'mu_dtype'\)"):
        injected.init(jnp.ones(2))


@pytest.mark.parametrize("make", [ours.mvn_grad, optax.adamw])
def test_inject_hyperparams_needs_static_args_for_a_mask(make):
    x = {"w": jnp.ones(2), "b": jnp.ones(())}
    options = {"weight_decay": 0.5, "mask": lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 0, tree)}
    zeros = jax.tree.map(jnp.zeros_like, x)
    for static, decayed in (((), 0.0), (("mask", "mu_dtype"), -0.05)):
        injected = optax.inject_hyperparams(make, static_args=static)(0.1, **options)
        updates, _ = injected.update(zeros, injected.init(x), x)
        assert updates["w"] == pytest.approx(decayed)
        assert updates["b"] == 0
    with pytest.raises(TypeError):
        optax.inject_hyperparams(make)(0.1, mu_dtype=jnp.bfloat16).init(x)


def test_multi_steps_averages_the_gradients_of_micro_batches(float64):
    x, (a, b) = jnp.array([1.0, 2.0]), jnp.array([[1.0, -1.0], [3.0, 5.0]])
    whole = ours.mvn_grad(0.1)
    expected, _ = whole.update((a + b) / 2, whole.init(x))
    split = optax.MultiSteps(whole, every_k_schedule=2)
    first, state = split.update(a, split.init(x), x)
    second, _ = split.update(b, state, x)
    assert not np.asarray(first).any()
    np.testing.assert_allclose(second, expected, rtol=1e-14)


def test_masked_leaves_other_leaves_alone():
    x = {"w": jnp.ones(2), "frozen": jnp.ones(2)}
    transformation = optax.masked(ours.scale_by_mvn_grad(), {"w": True, "frozen": False})
    updates, _ = transformation.update(x, transformation.init(x))
    assert updates["frozen"].tolist() == [1.0, 1.0]
    assert updates["w"].tolist() != [1.0, 1.0]


def test_weight_decay_mask_selects_parameters():
    x = {"w": jnp.ones(2), "b": jnp.ones(2)}
    transformation = ours.mvn_grad(0.1, weight_decay=0.5, mask={"w": True, "b": False})
    zero = jax.tree.map(jnp.zeros_like, x)
    updates, _ = transformation.update(zero, transformation.init(x), x)
    assert updates["w"] == pytest.approx(-0.05)
    assert not updates["b"].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_state_and_update_dtypes_are_stable_under_cond_and_apply_if_finite(dtype):
    transformation = optax.apply_if_finite(ours.mvn_grad(0.1), 3)
    x = jnp.ones(4, dtype)
    state = transformation.init(x)

    @jax.jit
    def step(skip, state):
        return jax.lax.cond(skip, lambda s: (jnp.zeros_like(x), s), lambda s: transformation.update(x, s, x), state)

    updates, after = step(False, state)
    assert updates.dtype == x.dtype
    assert jax.tree.map(lambda a: a.dtype, after) == jax.tree.map(lambda a: a.dtype, state)
    assert after.inner_state[0].s.dtype == jnp.float32
    unchanged, _ = transformation.update(x * jnp.nan, after, x)
    assert not np.asarray(unchanged, dtype=np.float32).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_gradients_are_computed_with_in_float32(dtype):
    transformation = ours.scale_by_mvn_grad()  # an eps of 1e-8 is 0 in float16
    narrow, wide = (jnp.array([1e-3, -2.0, 0.0], d) for d in (dtype, "float32"))
    states = [transformation.init(g) for g in (narrow, wide)]
    for _ in range(3):
        (a, states[0]), (b, states[1]) = (
            transformation.update(g, s) for g, s in zip((narrow, narrow.astype("float32")), states, strict=True)
        )
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b.astype(dtype), np.float32))


def test_float32_gradients_of_float64_parameters_are_computed_with_in_float64(float64):
    """As the averages are: those of optax.adam are not rounded to float32 at every step either."""
    x, transformation = jnp.zeros(3), ours.mvn_grad(0.01)
    states, updates = [transformation.init(x)] * 2, [None] * 2
    for gradient in jnp.array(gradients()[:50], "float32"):
        for i, dtype in enumerate(("float32", "float64")):
            updates[i], states[i] = transformation.update(gradient.astype(dtype), states[i], x)
    assert updates[0].dtype == jnp.float64
    np.testing.assert_array_equal(*updates)
    np.testing.assert_array_equal(states[0][0].s, states[1][0].s)


def test_state_in_numpy_float64_steps_without_x64():
    """As torch's state in float64 is copied."""
    x, transformation = jnp.ones(2), ours.scale_by_mvn_grad()
    state = transformation.init(x)
    copied = state._replace(**{name: np.zeros(2) for name in ("m", "s", "u")})
    expected, _ = transformation.update(x, state)
    updates, after = transformation.update(x, copied)  # warnings are errors
    np.testing.assert_array_equal(updates, expected)
    assert after.s.dtype == jnp.float32


def test_mu_dtype_stores_m_and_u_narrow_and_s_wide():
    transformation = ours.scale_by_mvn_grad(mu_dtype="bfloat16")
    _, state = transformation.update(jnp.ones(2), transformation.init(jnp.ones(2)))
    assert [state.m.dtype, state.u.dtype, state.s.dtype] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize(("b1", "ratio"), [(0.99, 1.0), (0.999, 0.05)])
def test_a_slow_average_in_bfloat16_freezes(b1, ratio):
    """JAX rounds to the nearest: what one step adds to the average is less than half a unit in its last place."""
    gradients = 1 + 0.1 * np.random.default_rng(0).normal(size=(8000, 64)).astype("float32")

    def get_mean_update(mu_dtype):
        transformation = ours.scale_by_mvn_grad(b1, mu_dtype=mu_dtype)

        def step(state, gradient):
            updates, state = transformation.update(gradient, state)
            return state, updates.mean()

        return jax.lax.scan(step, transformation.init(gradients[0]), gradients)[1][-1]

    assert get_mean_update("bfloat16") / get_mean_update(None) == pytest.approx(ratio, abs=0.05)


def test_state_of_nan_parameters_is_zero():
    state = ours.scale_by_mvn_grad().init(jnp.array([jnp.nan, 1.0]))
    assert not state.m.any()


@pytest.mark.parametrize("dtype", ["complex64", "int32"])
def test_complex_and_integer_arrays_are_refused(dtype):
    remedy = "split_real_and_imaginary" if dtype == "complex64" else "set_to_zero"
    with pytest.raises(TypeError, match=rf"not {dtype}; .*{remedy}"):
        ours.mvn_grad(0.1).init(jnp.ones(2, dtype))


def test_the_remedies_for_complex_and_integer_arrays_work():
    x = {"c": jnp.array([1 + 1j]), "w": jnp.ones(2)}
    split = optax.contrib.split_real_and_imaginary(ours.mvn_grad(0.1))
    updates, _ = split.update(x, split.init(x), x)
    np.testing.assert_allclose(updates["c"], [-0.1 / 0.9 * (1 + 1j)], rtol=1e-6)
    x = {"n": jnp.array([3]), "w": jnp.ones(2)}
    transformation = optax.partition(
        {"ours": ours.mvn_grad(0.1), "none": optax.set_to_zero()}, {"n": "none", "w": "ours"}
    )
    updates, _ = transformation.update(x, transformation.init(x), x)
    assert updates["n"].tolist() == [0]
    assert updates["w"].tolist() != [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"b1": 0.0}, "b1=0.0 is invalid; it must be > 0 here"),
        ({"b2": 1.0}, "b2=1.0 is invalid"),
        ({"b_mean": 2.0}, "b_mean=2.0 is invalid"),
        ({"eps_root": -1.0}, "eps_root=-1.0 is invalid"),
        ({"z_clip": np.inf}, "z_clip=inf is invalid; it must be finite and > 0"),
        ({"eps": -1.0}, "eps=-1.0 is invalid"),
        ({"mu_dtype": "int8"}, "mu_dtype=int8 is invalid"),
    ],
)
@pytest.mark.parametrize("is_traced", [False, True], ids=["", "beside a traced value"])
def test_invalid_hyper_parameters_are_refused(options, message, is_traced):
    def make(traced):
        return ours.scale_by_mvn_grad(**({"eps": traced, "z_clip": traced} if is_traced else {}) | options).init(1.0)

    with pytest.raises(ValueError, match=message):
        (jax.jit(make) if is_traced else make)(1.0)


@pytest.mark.parametrize(
    ("cell", "options"),
    [(rule.ADAM, {"z_clip": 1.0}), (rule.ADAM, {"eps_s": 1e-8}), (rule.ADAM, {"beta_mean": 0.0}),
     (rule.ADABELIEF, {"beta_mean": 0.5}),
     (rule.LAPROP, {"beta_mean": 0.5}), (rule.LEAN, {"beta_mean": 0.5})],
)  # fmt: skip
def test_scale_by_rule_refuses_options_that_the_cell_does_not_have(cell, options):
    with pytest.raises(ValueError, match=f"{cell.name} has no {next(iter(options))}; leave it out"):
        ours.scale_by_rule(cell, rule.Hyper(**options))


@pytest.mark.parametrize(
    "other",
    [{"a": jnp.ones(2), "b": jnp.ones(2)}, {"b": jnp.ones(2)}, {"b": jnp.ones(2), "a": None}, [jnp.ones(2)] * 2],
    ids=["another order", "a leaf less", "a None", "a list"],
)
def test_updates_in_another_tree_than_the_state_are_refused(other):
    """By position, the state of b would be that of a."""
    transformation = ours.mvn_grad(0.1)
    state = transformation.init(collections.OrderedDict(b=jnp.ones(2), a=jnp.ones(2)))
    with pytest.raises(ValueError, match="updates and m of the state are different trees"):
        transformation.update(other, state)


@pytest.mark.parametrize(
    ("other", "missing"),
    [
        (ours.scale_by_mvn_grad(lean=True), "m"),
        (ours.mvn_grad(0.1), "m, s, u"),
        (ours.scale_by_laprop(), "m, s"),
        (optax.scale_by_adam(), "m, s, u"),
    ],
    ids=["lean", "a chain", "laprop", "adam"],
)
def test_the_state_of_another_transformation_is_refused(other, missing):
    x = {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match=f"MVN-Grad: the state has no {missing}: it is of .* pass the state that init"):
        ours.scale_by_mvn_grad().update(x, other.init(x), x)


def test_a_torch_run_continues_from_its_state_and_8_bit_state_is_refused():
    """Codes would be averaged as numbers, and the 8 that stands for them in a state_dict broadcast."""
    x, start = torch.nn.Parameter(torch.ones(300)), jnp.ones(300)
    optimizer = mvngrad.MVNGradW([x], lr=0.01, weight_decay=0.0, state_dtype="int8")
    noise = torch.Generator().manual_seed(0)
    for _ in range(9):
        x.grad = torch.randn(300, generator=noise)
        optimizer.step()
    transformation, gradient = ours.mvn_grad(0.01), x.grad.numpy()

    def step(saved):
        first, *rest = transformation.init(start)
        averages = {name: np.asarray(saved[name]) for name in ("m", "s", "u")}
        state = (first._replace(count=int(saved["step"]), **averages), *rest)
        return transformation.update(gradient, state, start)[0]

    for saved, is_one in ((optimizer.state[x], "uint8 of (300,)"), (optimizer.state_dict()["state"][0], "int32 of ()")):
        with pytest.raises(ValueError, match=rf"m of the state is {re.escape(is_one)} .* mvngrad\.convert_state_dict"):
            step(saved)
    updates = step(mvngrad.convert_state_dict(optimizer.state_dict(), None)["state"][0])
    before = x.detach().clone()
    optimizer.step()
    np.testing.assert_allclose(updates, (x - before).detach(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
def test_a_state_of_other_shapes_is_refused(shape):
    transformation = ours.mvn_grad(0.1)
    with pytest.raises(ValueError, match=r"m of the state is float32 of .* for an update that is float32 of \(2,\)"):
        transformation.update(jnp.ones(2), transformation.init(jnp.ones(shape)))


def test_parameters_may_have_more_than_the_updates():
    """As an Equinox module has functions, where its gradient has None."""
    network = eqx.nn.MLP(2, 1, width_size=2, depth=1, key=jax.random.key(0))
    gradients = eqx.filter(network, eqx.is_inexact_array)
    transformation = ours.mvn_grad(0.1)
    state = transformation.init(gradients)
    expected, _ = transformation.update(gradients, state, gradients)
    updates, _ = transformation.update(gradients, state, network)
    assert eqx.tree_equal(updates, expected)


def test_a_traced_b_mean_counts_as_valid():
    x = jnp.ones(2)
    make = optax.inject_hyperparams(ours.mvn_grad, static_args=("b1", "lean"))
    injected = make(0.01, b1=0.0, b_mean=0.9)
    plain = ours.mvn_grad(0.01, b1=0.0, b_mean=0.9)
    updates, _ = jax.jit(injected.update)(x, jax.jit(injected.init)(x), x)
    expected, _ = plain.update(x, plain.init(x), x)
    np.testing.assert_allclose(updates, expected, rtol=1e-6)


@pytest.mark.parametrize("mask", [None, {"w": True, "b": False}])
def test_a_run_resumes_with_decay_switched_on_or_off(mask):
    x = {"w": jnp.ones(2), "b": jnp.ones(2)}
    without, with_decay = (ours.mvn_grad(0.1, weight_decay=decay, mask=mask) for decay in (0.0, 0.5))
    for first, second in ((without, with_decay), (with_decay, without)):
        updates, _ = second.update(x, first.init(x), x)
        assert updates["w"] == pytest.approx(-0.1 / 0.9 - 0.05 * (second is with_decay), rel=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_gradients_of_float32_parameters_give_updates_in_float32(dtype):
    """In float16 an update of 1e-8 is 0."""
    x, transformation = jnp.zeros(2), ours.mvn_grad(1e-8)
    updates, _ = transformation.update(jnp.array([1.0, 0.5], dtype), transformation.init(x), x)
    assert updates.dtype == jnp.float32
    np.testing.assert_allclose(updates, -1e-8 / 0.9, rtol=1e-5)


@pytest.mark.parametrize(
    "make",
    [lambda: ours.mvn_grad(0.05, lean=True), lambda: ours.laprop(0.05), lambda: ours.mvn_grad(0.05, eps_root=0.0)],
    ids=["lean", "laprop", "mvn_grad without eps_root"],
)
@pytest.mark.parametrize("start", [[1.0, 2.0], [1.0, 0.0]], ids=["", "a gradient of 0"])
def test_derivatives_through_steps_are_finite_and_right(float64, make, start):
    transformation, x = make(), jnp.array(start)

    def loss_after_steps(scale):
        def step(carry, _):
            x, state = carry
            updates, state = transformation.update(x * scale, state, x)
            return (optax.apply_updates(x, updates), state), None

        return (jax.lax.scan(step, (x, transformation.init(x)), None, length=3)[0][0] ** 2).sum()

    expected = (loss_after_steps(1.3 + 1e-6) - loss_after_steps(1.3 - 1e-6)) / 2e-6
    for derivative in (jax.jacfwd, jax.grad):
        assert float(derivative(loss_after_steps)(1.3)) == pytest.approx(float(expected), rel=1e-4, abs=1e-8)


@pytest.mark.parametrize(
    ("betas", "lean"),
    [((0.0, 0.0), False), ((0.0, 0.999), False), ((0.5, 0.5), False), ((0.3, 0.0), True), ((0.9, 0.999), True)],
)
def test_derivatives_by_the_decays_are_finite_and_right(float64, betas, lean):
    """Also at 0, where the derivative of the logarithm is infinite."""

    def direction(b1, b2):
        transformation = ours.scale_by_mvn_grad(b1, b2, lean=lean, b_mean=None if lean else 0.9)
        state, total = transformation.init(1.0), 0.0
        for gradient in (1.0, -2.0, 0.5):
            updates, state = transformation.update(gradient, state)
            total += updates
        return total

    for i, derivative in enumerate(jax.grad(direction, (0, 1))(*betas)):
        ahead = [[beta + h * (j == i) for j, beta in enumerate(betas)] for h in (0.0, 1e-6, 2e-6)]
        zero, one, two = (float(direction(*each)) for each in ahead)
        assert float(derivative) == pytest.approx((4 * one - two - 3 * zero) / 2e-6, rel=1e-4, abs=1e-6)


def test_8_bit_floats_and_strict_promotion():
    x = jnp.ones(2, jnp.float8_e4m3fn)
    state = ours.scale_by_mvn_grad().init(x)
    assert state.s.dtype == jnp.float32
    with jax.numpy_dtype_promotion("strict"):
        assert ours.scale_by_mvn_grad().init(jnp.ones(2, jnp.bfloat16)).s.dtype == jnp.float32


@pytest.mark.parametrize("promotion", ["standard", "strict"])
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float16", "bfloat16"])
def test_narrow_gradients_of_wider_parameters_need_no_implicit_promotion(dtype, promotion):
    transformation = ours.mvn_grad(0.1, mu_dtype="bfloat16")
    for wide, expected in (("float32", "float32"), ("bfloat16", "float32" if dtype == "float16" else "bfloat16")):
        x = jnp.ones(2, wide)
        with jax.numpy_dtype_promotion(promotion):
            updates, _ = transformation.update(x.astype(dtype), transformation.init(x), x)
        assert updates.dtype == expected
        np.testing.assert_allclose(np.float32(updates), -0.1 / 0.9, rtol=0.01)


@pytest.mark.parametrize("options", [{"maximize": True}, {"weight_decay": 0.1}, {"decoupled": True}], ids=str)
def test_scale_by_rule_refuses_what_it_cannot_obey(options):
    with pytest.raises(ValueError, match=r"chain optax\.add_decayed_weights"):
        ours.scale_by_rule(rule.ADAM, rule.Hyper(**options))


@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function], ids=["jit", "eager"])
def test_hyper_parameters_in_16_bits_are_refused(wrap):
    """inject_hyperparams casts them to the dtype of the parameters: in bfloat16 0.999 is 1, and nothing would move."""
    x = jnp.ones(3, jnp.bfloat16)
    narrow = optax.inject_hyperparams(ours.mvn_grad)(0.1)
    with pytest.raises(ValueError, match=r"pass hyperparam_dtype=jnp\.float32"):
        wrap(narrow.init)(x)
    wide = optax.inject_hyperparams(ours.mvn_grad, hyperparam_dtype=jnp.float32)(0.1)
    updates, _ = wrap(wide.update)(x, wrap(wide.init)(x), x)
    expected, _ = ours.mvn_grad(0.1).update(x, ours.mvn_grad(0.1).init(x), x)
    np.testing.assert_allclose(np.float32(updates), np.float32(expected), rtol=2e-3)


@pytest.mark.parametrize(
    "value", [np.float16(0.999), np.array(0.999, "float16"), jnp.array(0.9, "float8_e5m2")], ids=repr
)
def test_narrow_hyper_parameters_are_refused_wherever_they_come_from(value):
    """1 - 0.999 is off by 2% in NumPy's float16, which JAX keeps."""
    with pytest.raises(ValueError, match=rf"hyper-parameters are in {value.dtype}, .*; make them float32"):
        ours.scale_by_mvn_grad(b2=value)


def test_a_python_float_is_a_parameter():
    params = {"w": jnp.ones(3), "scale": 1.0}
    for transformation in (ours.mvn_grad(0.1), optax.adam(0.1)):
        updates, _ = transformation.update(params, transformation.init(params), params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        np.testing.assert_allclose(updates["scale"], updates["w"][0], rtol=1e-6)


def test_lean_refuses_b_mean():
    with pytest.raises(ValueError, match=r"b_mean=0.5"):
        ours.scale_by_mvn_grad(b_mean=0.5, lean=True)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec
from mvngrad.optax import mvn_grad
assert jax.device_count() == 8
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
place = NamedSharding(mesh, PartitionSpec("data"))
x = jnp.arange(1.0, 33.0).reshape(16, 2)
optimizer = mvn_grad(0.1, weight_decay=0.1)
def run(x):
    state = jax.jit(optimizer.init)(x)
    for _ in range(3):
        updates, state = jax.jit(optimizer.update)(x, state, x)
        x = optax.apply_updates(x, updates)
    return x, state
plain, _ = run(x)
sharded, state = run(jax.device_put(x, place))
assert state[0].s.sharding.is_equivalent_to(place, 2), state[0].s.sharding
np.testing.assert_array_equal(plain, sharded)
print("equal")
"""


def test_sharded_arrays_on_8_devices_keep_their_sharding():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize("z_clip", [jnp.ones(1), jnp.ones(2), "3"])
def test_an_option_that_is_not_one_number_is_named(z_clip):
    with pytest.raises(ValueError, match=r"z_clip=.* is invalid"):
        ours.mvn_grad(0.1, z_clip=z_clip)


def test_a_missing_package_names_its_install_line():
    code = "import sys; sys.modules['optax'] = None; import mvngrad.optax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith("ImportError: mvngrad.optax needs optax: pip install 'mvngrad[jax]'")
