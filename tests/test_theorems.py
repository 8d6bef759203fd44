"""The paper's statements, tested on the rule in float64.

Labels such as thm:spike are the paper's. Its theory has no bias correction, which is t = inf: 1 - beta^inf = 1.
"""

import math
from itertools import accumulate, pairwise, repeat

import pytest
from hypothesis import given, settings, strategies as st

from mvngrad.rule import ADABELIEF, ADAM, CELLS, LAPROP, MVNGRAD, SCALAR, Hyper

quick = settings(deadline=None, max_examples=60)
each_cell = pytest.mark.parametrize("rule", CELLS, ids=lambda rule: rule.name)
each_centered = pytest.mark.parametrize("rule", [ADABELIEF, MVNGRAD], ids=lambda rule: rule.name)
each_momentum_last = pytest.mark.parametrize("rule", [LAPROP, MVNGRAD], ids=lambda rule: rule.name)

beta1s = st.floats(0.05, 0.99)
beta2s = st.floats(0.1, 0.999)
signs = st.sampled_from([-1.0, 1.0])


def positive(low, high):
    """Every order of magnitude from low to high."""
    return st.floats(math.log10(low), math.log10(high)).map(lambda exponent: 10**exponent)


def nonzero(low, high):
    return st.builds(math.copysign, positive(low, high), signs)


nonzeros = st.lists(nonzero(1e-6, 1e6), min_size=1, max_size=30)
gradients = st.lists(st.just(0.0) | nonzero(1e-6, 1e6), min_size=1, max_size=30)
# Constant stretches, in which s decays to 0, with jumps of up to 200 orders of magnitude between them.
extremes = st.lists(st.tuples(nonzero(1e-100, 1e100), st.integers(1, 200)), min_size=1, max_size=6).map(
    lambda stretches: [g for g, length in stretches for _ in range(length)]
)


def walk(rule, hyper, gradients, start=None, corrected=True):
    """The step x_t - x_{t-1} and the state after it, for each gradient. x matters only for weight decay, so it is 0."""
    state = rule.init(0.0) | (start or {})
    for t, g in enumerate(gradients, start=1):
        step, state = rule.update(0.0, g, state, t if corrected else math.inf, hyper, SCALAR)
        yield step, state


# Algorithm 1


@each_centered
@quick
@given(gradients, beta1s, beta2s)
def test_centering_with_the_new_mean_scales_the_deviation_by_beta1(rule, grads, beta1, beta2):
    states = [rule.init(0.0), *(state for _, state in walk(rule, Hyper(beta1=beta1, beta2=beta2), grads))]
    for g, (old, new) in zip(grads, pairwise(states), strict=True):
        rounding = 4e-15 * max(abs(g), abs(old["m"]))
        deviation = beta1 * (g - old["m"])
        assert g - new["m"] == pytest.approx(deviation, rel=0, abs=rounding)
        s = beta2 * old["s"] + (1 - beta2) * deviation**2
        assert new["s"] == pytest.approx(s, rel=1e-14, abs=4 * rounding * (rounding + abs(deviation)))


@each_cell
@quick
@given(nonzero(1e-100, 1e100), beta1s, beta2s, positive(1e-6, 10))
def test_the_first_step_is_lr_or_lr_over_beta1_if_centered(rule, g, beta1, beta2, lr):
    ((step, _),) = walk(rule, Hyper(lr=lr, beta1=beta1, beta2=beta2, eps=0.0), [g])
    root = beta1 if rule.centered else 1.0  # |g - m_1| / |g|, or |g| / |g|
    assert step == pytest.approx(math.copysign(lr / root, -g), rel=1e-13)


@quick
@given(nonzero(1e-100, 1e100), beta1s, beta1s, beta2s)
def test_beta_mean_replaces_beta1_in_the_mean(g, beta1, beta_mean, beta2):
    ((step, _),) = walk(MVNGRAD, Hyper(lr=1.0, beta1=beta1, beta2=beta2, eps=0.0, beta_mean=beta_mean), [g])
    assert step == pytest.approx(math.copysign(1 / beta_mean, -g), rel=1e-13)


@quick
@given(gradients, beta1s, beta2s)
def test_with_beta_mean_equal_to_beta2_s_is_beta2_times_the_variance_of_the_averages(grads, beta1, beta2):
    """s = beta2 (v - m^2), with v and m averages of g^2 and g by beta2; v - m^2 loses digits, s does not."""
    v, m, largest = 0.0, 0.0, max(map(abs, grads))
    hyper = Hyper(beta1=beta1, beta2=beta2, eps=1.0, beta_mean=beta2)
    for g, (_, state) in zip(grads, walk(MVNGRAD, hyper, grads), strict=True):
        v, m = beta2 * v + (1 - beta2) * g**2, beta2 * m + (1 - beta2) * g
        assert state["m"] == pytest.approx(m, rel=0, abs=1e-14 * largest)
        assert state["s"] == pytest.approx(beta2 * (v - m**2), rel=0, abs=1e-14 * largest**2)


@each_cell
@quick
@given(nonzeros, beta1s, st.floats(0.5, 0.999), st.integers(-60, 60), positive(1e-3, 1e3))
def test_the_scale_of_the_gradients_does_not_matter(rule, grads, beta1, beta2, power, factor):
    def steps(scale):
        hyper = Hyper(lr=1.0, beta1=beta1, beta2=beta2, eps=0.0)
        return [step for step, _ in walk(rule, hyper, [scale * g for g in grads])]

    expected = steps(1.0)
    assert steps(2.0**power) == expected  # a power of two commutes with rounding
    assert steps(factor) == pytest.approx(expected, rel=0, abs=1e-8 * max(map(abs, expected)))


@quick
@given(gradients, beta2s, positive(1e-8, 1.0))
def test_without_momentum_laprop_is_adam(grads, beta2, eps):
    hyper = Hyper(beta1=0.0, beta2=beta2, eps=eps)
    adam, laprop = ([step for step, _ in walk(rule, hyper, grads)] for rule in (ADAM, LAPROP))
    assert adam == pytest.approx(laprop, rel=0, abs=1e-12 * max(map(abs, laprop)))


@each_centered
@quick
@given(gradients, beta1s, beta2s, positive(1e-16, 1e-2))
def test_eps_s_bounds_the_root_from_below(rule, grads, beta1, beta2, eps_s):
    hyper = Hyper(beta1=beta1, beta2=beta2, eps=0.0, eps_s=eps_s)
    assert hyper.floor**2 == pytest.approx(eps_s / (1 - beta2), rel=1e-15)
    for t, (step, state) in enumerate(walk(rule, hyper, [0.0] * 100), start=1):
        assert step == 0
        assert state["s"] / (1 - beta2**t) == pytest.approx(hyper.floor**2, rel=1e-12)
    for t, (_, state) in enumerate(walk(rule, hyper, grads), start=1):
        assert state["s"] / (1 - beta2**t) >= hyper.floor**2 * (1 - 1e-12)


# Convergence


@each_momentum_last
@quick
@given(gradients, beta1s, beta2s, positive(1e-8, 1.0))
def test_virtual_iterates_move_by_the_normalized_gradient(rule, grads, beta1, beta2, eps):
    """Step 1 of the proof of thm:mvngrad_convergence: x_t - beta1/(1-beta1) lr u_t moves by -lr z_t."""
    hyper = Hyper(lr=0.1, beta1=beta1, beta2=beta2, eps=eps)
    lead, u = beta1 / (1 - beta1) * hyper.lr, 0.0
    for g, (step, state) in zip(grads, walk(rule, hyper, grads, corrected=False), strict=True):
        z = g / (math.sqrt(state["s" if rule.centered else "v"]) + eps)
        rounding = 1e-15 * (lead + hyper.lr) * (abs(u) + abs(z))
        assert step - lead * (state["u"] - u) == pytest.approx(-hyper.lr * z, rel=0, abs=4 * rounding)
        u = state["u"]


@quick
@given(st.lists(signs, min_size=1, max_size=40), beta1s, beta2s, positive(1e-3, 1e3))
def test_at_a_constant_variance_mvngrad_is_heavy_ball(sides, beta1, beta2, sigma):
    """lem:mvn_to_hb_stoch: x_t - x_{t-1} = beta1 (x_{t-1} - x_{t-2}) - alpha g_t with alpha = lr (1-beta1) / sigma."""
    hyper = Hyper(lr=0.1, beta1=beta1, beta2=beta2, eps=0.0)
    alpha = hyper.lr * (1 - beta1) / sigma
    state, ball = {"m": 0.0, "s": sigma**2, "u": 0.0}, 0.0
    for side in sides:
        # s stays at sigma^2 for gradients this far from the mean: (g - m_t)^2 = beta1^2 (g - m_{t-1})^2 = sigma^2.
        g = state["m"] + side * sigma / beta1
        step, state = MVNGRAD.update(0.0, g, state, math.inf, hyper, SCALAR)
        ball = beta1 * ball - alpha * g
        assert state["s"] == pytest.approx(sigma**2, rel=1e-11)
        assert step == pytest.approx(ball, rel=0, abs=1e-11 * hyper.lr * (abs(g) / sigma + abs(state["u"])))


# Spikes


@each_momentum_last
@pytest.mark.parametrize("eps", [0.0, 1e-8])
@quick
@given(extremes, beta1s, beta2s, positive(1e-3, 1e3))
def test_z_clip_bounds_every_update(rule, eps, grads, beta1, beta2, z_clip):
    eps_s = eps if rule.centered else 0.0
    hyper = Hyper(lr=1.0, beta1=beta1, beta2=beta2, eps=eps, eps_s=eps_s, z_clip=z_clip)
    for step, state in walk(rule, hyper, grads):
        assert abs(state["u"]) <= z_clip * (1 + 1e-12)
        assert abs(step) <= z_clip * (1 + 1e-12)


def test_without_z_clip_a_constant_gradient_has_no_bound():
    hyper = Hyper(beta1=0.5, beta2=0.5, eps=0.0)
    *_, (_, free) = walk(MVNGRAD, hyper, [1.0] * 300)
    *_, (_, clipped) = walk(MVNGRAD, hyper._replace(z_clip=10.0), [1.0] * 300)
    assert free["u"] > 1e30
    assert clipped["u"] == pytest.approx(10.0, rel=1e-12)


# With beta1 = 0, and the mean at its own decay, u is z.


@each_momentum_last
@quick
@given(nonzeros, beta1s, beta2s, positive(1e-2, 1e2))
def test_z_clip_clamps_the_normalized_gradient(rule, grads, beta_mean, beta2, z_clip):
    hyper = Hyper(beta1=0.0, beta_mean=beta_mean, beta2=beta2)
    free, clipped = ([state["u"] for _, state in walk(rule, h, grads)] for h in (hyper, hyper._replace(z_clip=z_clip)))
    assert clipped == pytest.approx([max(-z_clip, min(z, z_clip)) for z in free], rel=1e-12)


@pytest.mark.parametrize("corrected", [False, True])
@quick
@given(extremes, beta2s)
def test_laprop_bounds_every_normalized_gradient(corrected, grads, beta2):
    """cor:multi_spike: |z| <= 1/sqrt(1-beta2), here times sqrt(c_v) with bias correction. The first z attains it."""
    z = [abs(state["u"]) for _, state in walk(LAPROP, Hyper(beta1=0.0, beta2=beta2, eps=0.0), grads, None, corrected)]
    c_v = [1 - beta2**t if corrected else 1.0 for t in range(1, len(z) + 1)]
    bounds = [math.sqrt(c / (1 - beta2)) for c in c_v]
    assert z[0] == pytest.approx(bounds[0], rel=1e-12)
    assert all(size <= bound * (1 + 1e-12) for size, bound in zip(z, bounds, strict=True))


@quick
@given(nonzero(1e-3, 1e3), st.lists(st.floats(-1e3, 1e3), max_size=30), beta1s, beta2s)
def test_mvngrad_bounds_every_normalized_spike(first, multiples, beta1, beta2):
    """cor:multi_spike: |z_t| <= 2/(beta1 sqrt(1-beta2)) if |g_t| >= 2 |m_{t-1}|, attained by g = 2m where s was 0."""
    hyper = Hyper(beta1=0.0, beta_mean=beta1, beta2=beta2, eps=0.0)
    bound = 2 / (beta1 * math.sqrt(1 - beta2))

    def step(g, state):
        return MVNGRAD.update(0.0, g, state, math.inf, hyper, SCALAR)[1]

    state = step(first, MVNGRAD.init(0.0))
    worst = step(2 * state["m"], state | {"s": 0.0})
    assert abs(worst["u"]) == pytest.approx(bound, rel=1e-12)
    for multiple in multiples:
        state = step(multiple * state["m"], state)
        assert abs(multiple) < 2 or abs(state["u"]) <= bound * (1 + 1e-12)


def spike(rule, hyper, M, u, d, steps):
    """The model of thm:spike: g_0 = M u, then g_t = u, with m = 0 and v or s = d before."""
    start = {"s" if rule.centered else "v": d}
    return walk(rule, hyper, [M * u, *repeat(u, steps)], start, corrected=False)


@each_momentum_last
@quick
@given(nonzero(1e-3, 1e3), positive(1e-3, 1e3), beta1s, beta2s, positive(1e-8, 10))
def test_a_spike_of_any_size_moves_laprop_and_mvngrad_by_a_bounded_step(rule, u, d, beta1, beta2, eps):
    """Part I of the proof of thm:spike: |Delta_t| <= Z_LP or Z_MV, which do not depend on M."""
    bound = max(1 / ((beta1 if rule.centered else 1.0) * math.sqrt(1 - beta2)), abs(u) / eps)
    hyper = Hyper(lr=1.0, beta1=beta1, beta2=beta2, eps=eps)
    for exponent in range(13):
        for delta, _ in spike(rule, hyper, 10.0**exponent, u, d, steps=30):
            assert abs(delta) <= bound * (1 + 1e-12)


@quick
@given(positive(1, 1e6), nonzero(1e-3, 1e3), positive(1e-3, 1e3), beta1s, st.floats(0.1, 0.9), positive(1e-8, 10))
def test_adam_step_after_a_spike_grows_with_the_spike(M, u, d, beta1, beta2, eps):
    """Part II of the proof of thm:spike: m and v in closed form, and |Delta| at t* from below."""
    t_star = next(t for t in range(1, 1000) if (1 - beta2) * beta2**t * M**2 <= 1)
    path = list(spike(ADAM, Hyper(lr=1.0, beta1=beta1, beta2=beta2, eps=eps), M, u, d, t_star))
    for t, (_, state) in enumerate(path):
        m = (1 - beta1) * beta1**t * M * u + (1 - beta1**t) * u
        v = beta2 ** (t + 1) * d + (1 - beta2) * beta2**t * M**2 * u**2 + (1 - beta2**t) * u**2
        assert state["m"] == pytest.approx(m, rel=1e-12)
        assert state["v"] == pytest.approx(v, rel=1e-12)
    D = math.sqrt(d + 2 * u**2) + eps
    assert abs(path[t_star][0]) >= (1 - beta1) * beta1**t_star * M * abs(u) / D * (1 - 1e-12)


def adam_bounds(beta1, beta2, steps):
    """|Delta| at most after 1, 2, ... steps, by Cauchy-Schwarz on m and v from m_{-1} = 0 and any v_{-1} >= 0:

    |m| <= (1-beta1) sqrt(sum_j (beta1^2/beta2)^j) sqrt(sum_j beta2^j g_j^2), where j counts steps back.
    The first sum is bounded, by 1/(1 - beta1^2/beta2) as in rem:adam_bound, if and only if beta2 > beta1^2.
    """
    powers = accumulate(repeat(beta1**2 / beta2, steps - 1), lambda power, ratio: power * ratio, initial=1.0)
    return [(1 - beta1) / math.sqrt(1 - beta2) * math.sqrt(total) for total in accumulate(powers)]


@quick
@given(extremes, st.floats(0.0, 0.99), beta2s, positive(1e-3, 1e3))
def test_adam_is_bounded_where_beta2_exceeds_the_square_of_beta1(grads, beta1, beta2, d):
    bounds = adam_bounds(beta1, beta2, len(grads))
    if beta2 > beta1**2:
        limit = (1 - beta1) / math.sqrt(1 - beta2) / math.sqrt(1 - beta1**2 / beta2)
        assert bounds[-1] <= limit * (1 + 1e-12)
    hyper = Hyper(lr=1.0, beta1=beta1, beta2=beta2, eps=0.0)
    for start in (0.0, d):
        for (delta, _), bound in zip(walk(ADAM, hyper, grads, {"v": start}, False), bounds, strict=True):
            assert abs(delta) <= bound * (1 + 1e-9)


@quick
@given(st.integers(1, 60), beta1s, beta2s)
def test_adam_attains_its_bound(steps, beta1, beta2):
    """With g_j = (beta1/beta2)^j, j steps back, Cauchy-Schwarz is an equality."""
    grads = [(beta1 / beta2) ** j for j in reversed(range(steps))]
    *_, (delta, _) = walk(ADAM, Hyper(lr=1.0, beta1=beta1, beta2=beta2, eps=0.0), grads, corrected=False)
    assert -delta == pytest.approx(adam_bounds(beta1, beta2, steps)[-1], rel=1e-9)
