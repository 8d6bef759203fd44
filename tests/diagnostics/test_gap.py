"""The variance gap: the paper's closed form, what is averaged, and that nothing is changed."""

import copy
import math

import pytest
import torch
from family import equal, everything

import mvngrad
from mvngrad.diagnostics import gap as gap_module, variance_gap
from mvngrad.rule import ADABELIEF, MVNGRAD

BETA1, BETA2 = 0.9, 0.95


def make_trained(make, size=50, steps=40, **options):
    """A weight and its optimizer after steps on gradients with signals from -2 to 2 and noise."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, size, dtype=torch.float64))
    optimizer = make([weight], betas=(BETA1, BETA2), **options)
    for _ in range(steps):
        weight.grad = torch.linspace(-2, 2, size, dtype=torch.float64) + torch.randn(size, dtype=torch.float64)
        optimizer.step()
    return weight, optimizer


def symmetric_gradients(m, pairs=32):
    """Gradients for which g - m is exactly symmetric about 0."""
    noise = [torch.randn_like(m) for _ in range(pairs)]
    return [m + sign * zeta for zeta in noise for sign in (1, -1)]


def closed_form(optimizer, weight, grads):
    """(2 beta1 - beta1^2) m^2 Var(1 / (sqrt(s_t) + eps)), with the bias corrections that the theorem leaves out."""
    state, (group,) = optimizer.state[weight], optimizer.param_groups
    m, s, t = state["m"], state["s"], state["step"].item() + 1
    rows = torch.stack(grads)
    s_t = BETA2 * s + (1 - BETA2) * BETA1**2 * (rows - m) ** 2 + group["eps_s"]
    y = 1 / ((s_t / (1 - BETA2**t)).sqrt() + group["eps"])
    return ((2 * BETA1 - BETA1**2) * m**2 * y.var(0)).mean().item() / (1 - BETA1**t) ** 2


@pytest.mark.parametrize("make", [mvngrad.AdaBelief, mvngrad.MVNGrad])
def test_the_gap_of_symmetric_innovations_is_the_closed_form(make):
    weight, optimizer = make_trained(make)
    grads = symmetric_gradients(optimizer.state[weight]["m"])
    result = variance_gap(optimizer, lambda g: (weight * g).sum(), grads)
    expected = closed_form(optimizer, weight, grads)
    assert expected > 0
    assert result.cells == ("AdaBelief", "MVN-Grad")
    assert result.gap == pytest.approx(expected, rel=1e-9)
    assert result.relative == pytest.approx(expected / result.before)
    assert (result.batches, result.coordinates) == (64, 50)


def test_clipping_is_no_effect_of_the_order():
    gaps = []
    for z_clip in (None, 1.0):
        torch.manual_seed(0)
        weight, optimizer = make_trained(mvngrad.MVNGrad)
        optimizer.param_groups[0]["z_clip"] = z_clip
        grads = symmetric_gradients(optimizer.state[weight]["m"])
        gaps.append(variance_gap(optimizer, lambda g, weight=weight: (weight * g).sum(), grads).relative)
    assert gaps[0] == gaps[1] != 0


@pytest.mark.parametrize(
    ("make_grads", "message"),
    [
        (lambda weight: [torch.ones(1)], r"a gradient of shape \(1,\) for .*, whose shape is \(50,\)"),
        (lambda weight: [[1.0]], "a gradient of shape None"),
        (lambda weight: [], "returned 0 values; it must return a loss tensor, or a list"),
        (lambda weight: 0.5, "returned a float"),
    ],
)
def test_gradients_of_other_parameters_are_refused(make_grads, message):
    weight, optimizer = make_trained(mvngrad.MVNGrad)
    with pytest.raises(ValueError, match=message):
        variance_gap(optimizer, lambda batch: make_grads(weight), range(4))


def test_with_the_cells_swapped_the_theorem_would_not_hold(monkeypatch):
    weight, optimizer = make_trained(mvngrad.MVNGrad)
    grads = symmetric_gradients(optimizer.state[weight]["m"])
    monkeypatch.setattr(gap_module, "cells_by_order", lambda rule: (MVNGRAD, ADABELIEF))
    result = variance_gap(optimizer, lambda g: (weight * g).sum(), grads)
    assert result.gap == pytest.approx(-closed_form(optimizer, weight, grads), rel=1e-9)


def variance_of_steps(weight, optimizer, grads):
    """The mean variance of real steps over lr, each from a copy of the optimizer."""
    moves = []
    for g in grads:
        x, other = copy.deepcopy((weight, optimizer))
        x.grad = g
        other.step()
        moves.append((weight - x).detach() / optimizer.param_groups[0]["lr"])
    return torch.stack(moves).var(0).mean().item()


def test_each_variance_equals_that_of_real_steps():
    for make, name in ((mvngrad.AdaBelief, "before"), (mvngrad.MVNGrad, "after")):
        weight, optimizer = make_trained(make, lr=1e-2, weight_decay=0.3)
        grads = [torch.randn_like(weight) for _ in range(8)]
        result = variance_gap(optimizer, lambda g, weight=weight: (weight * g).sum(), grads)
        assert getattr(result, name) == pytest.approx(variance_of_steps(weight, optimizer, grads), rel=1e-9)


def test_maximize_lean_and_smaller_state_are_read():
    for options in ({"maximize": True}, {"lean": True}, {"state_dtype": torch.bfloat16}, {"state_dtype": "int8"}):
        weight, optimizer = make_trained(mvngrad.MVNGrad, **options)
        grads = [torch.randn_like(weight) for _ in range(4)]
        result = variance_gap(optimizer, lambda g, weight=weight: (weight * g).sum(), grads)
        tolerance = 1e-6 if "state_dtype" not in options else 0.1  # steps round their new state, variance_gap does not
        assert result.after == pytest.approx(variance_of_steps(weight, optimizer, grads), rel=tolerance)


def network():
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    )
    x = torch.randn(256, 6)
    y = x[:, :3].argmax(1)

    def loss(rows):
        return torch.nn.functional.cross_entropy(model(x[rows]), y[rows])

    return model, loss


@pytest.mark.parametrize("make", [mvngrad.MVNGradW, mvngrad.AdaBelief])
def test_nothing_is_changed(make):
    model, loss = network()
    model[0].bias.requires_grad_(False)
    optimizer = make(model.named_parameters(), betas=(BETA1, BETA2))
    for rows in torch.randint(256, (20, 16)):
        optimizer.zero_grad()
        loss(rows).backward()
        optimizer.step()
    batches = list(torch.randint(256, (10, 16)))
    grads = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in grads]
    before = everything(optimizer), [b.clone() for b in model.buffers()]
    result = variance_gap(optimizer, loss, batches, model=model)
    assert equal(everything(optimizer), before[0])
    assert equal(list(model.buffers()), before[1])
    for p, g, value in zip(model.parameters(), grads, values, strict=True):
        assert p.grad is g
        assert g is None or torch.equal(g, value)
    assert [each.name for each in result.parameters] == [n for n, p in model.named_parameters() if p.requires_grad]
    assert result.before == pytest.approx(
        sum(p.before * p.coordinates for p in result.parameters) / sum(p.coordinates for p in result.parameters)
    )
    assert all(each.gap == each.before - each.after for each in result.parameters)


def test_no_random_numbers_are_drawn_and_K_batches_are_used():
    weight, optimizer = make_trained(mvngrad.MVNGrad)
    state = torch.get_rng_state()

    def endless():
        while True:
            yield torch.ones_like(weight)

    result = variance_gap(optimizer, lambda g: (weight * g).sum(), endless(), K=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert result.batches == 5
    assert result.before == result.after == 0  # one gradient, no variance
    assert result.relative == 0


def test_the_standard_error_matches_the_spread_of_repetitions():
    _, optimizer = make_trained(mvngrad.MVNGrad, size=20)

    def measure():
        batches = (1 + torch.randn(20, dtype=torch.float64) for _ in range(24))
        return variance_gap(optimizer, lambda g: [g], batches)

    results = [measure() for _ in range(60)]
    gaps = torch.tensor([result.gap for result in results])
    claimed = torch.tensor([result.error for result in results]).square().mean().sqrt().item()
    assert claimed == pytest.approx(gaps.std().item(), rel=0.3)
    assert variance_gap(optimizer, lambda g: [g], [torch.ones(20), torch.zeros(20)]).error == math.inf


def test_the_loss_may_return_gradients():
    weight, optimizer = make_trained(mvngrad.MVNGrad)
    grads = [torch.randn_like(weight) for _ in range(6)]
    by_loss = variance_gap(optimizer, lambda g: (weight * g).sum(), grads)
    assert variance_gap(optimizer, lambda g: [g], grads) == by_loss


def test_a_parameter_without_gradients_is_omitted():
    used, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = mvngrad.AdaBelief([used, unused])
    used.grad, unused.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    result = variance_gap(optimizer, lambda k: (k * used).sum(), [1.0, 2.0, 4.0])
    assert [each.name for each in result.parameters] == ["0.0"]
    assert math.isfinite(result.gap)


def test_adam_is_compared_with_laprop():
    weight, optimizer = make_trained(torch.optim.AdamW)
    result = variance_gap(optimizer, lambda g: (weight * g).sum(), [torch.randn_like(weight) for _ in range(8)])
    assert result.cells == ("Adam", "LaProp")
    assert "Var Adam" in str(result)


def test_unsupported_optimizers_are_rejected():
    def measure(make, batches=(1.0, 2.0), step=True, **options):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = make([weight], **options)
        weight.grad = torch.ones(3)
        if step:
            optimizer.step()
        return variance_gap(optimizer, lambda k: (k * weight).sum(), batches)

    with pytest.raises(ValueError, match="LaProp keeps no m"):
        measure(mvngrad.LaProp)
    with pytest.raises(ValueError, match="no beta_mean"):
        measure(mvngrad.MVNGrad, beta_mean=0.8)
    with pytest.raises(ValueError, match="amsgrad"):
        measure(torch.optim.Adam, amsgrad=True)
    with pytest.raises(ValueError, match="no state to freeze"):
        measure(mvngrad.MVNGrad, step=False)
    with pytest.raises(ValueError, match="at least 2"):
        measure(mvngrad.MVNGrad, batches=[1.0])
    with pytest.raises(TypeError, match="SGD is not an optimizer of mvngrad"):
        measure(torch.optim.SGD)


def test_a_frozen_parameter_is_omitted():
    weights = [torch.nn.Parameter(torch.ones(size)) for size in (3, 5)]
    optimizer = mvngrad.MVNGrad(weights)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    weights[1].requires_grad_(False)
    result = variance_gap(optimizer, lambda g: (weights[0] * g).sum(), torch.randn(8, 3))
    assert result.coordinates == 3
