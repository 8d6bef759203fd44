"""The verdict on signal and noise where records of one regime can look like another."""

import json
import math
import re

import pytest
import torch
from test_diagnosis import noise, signal, train_with_monitor

import mvngrad
from mvngrad.diagnostics import Monitor, diagnose
from mvngrad.diagnostics.signal_to_noise import _find_mean_noise


def uniform_noise(t, size):
    return 2 * torch.rand(size) - 1


def sign_noise(t, size):
    return uniform_noise(t, size).sign()


def noise_after_spike(t, size):
    return noise(t, size) * (1000 if t == 200 else 1)


def noise_of_few(t, size):
    return noise(t, size) * (torch.arange(size) < 0.4 * size if t > 100 else 1)


def large_at_first(t, size):
    return noise(t, size) * (1000 if t < 10 else 1)


@pytest.mark.parametrize(
    ("make", "gradient", "options"),
    [
        (torch.optim.AdamW, noise_after_spike, {}),
        (mvngrad.MVNGradW, noise_after_spike, {}),
        (torch.optim.AdamW, noise_of_few, {}),
        (torch.optim.AdamW, large_at_first, {"amsgrad": True}),
    ],
    ids=["spike-AdamW", "spike-MVNGradW", "no gradient now", "amsgrad"],
)
def test_a_divisor_that_noise_cannot_explain_is_not_called_noise(make, gradient, options):
    (group,) = diagnose(train_with_monitor(make, gradient, steps=620, betas=(0.9, 0.99), **options)[2]).groups
    assert group["signal"].verdict == "cannot tell"
    assert group.finding == group["signal"].because
    assert ", where noise alone gives 0.15: the divisor still contains larger gradients, as after" in group.finding


@pytest.mark.parametrize("make", [torch.optim.Adam, mvngrad.Adam, mvngrad.AdaBelief, mvngrad.MVNGrad])
@pytest.mark.parametrize("gradient", [noise, uniform_noise])
@pytest.mark.parametrize("betas", [(0.0, 0.99), (0.1, 0.99), (0.35, 0.99), (0.999, 0.7)], ids=str)
def test_noise_is_never_called_signal_at_any_beta1(make, gradient, betas):
    if not betas[0] and make in (mvngrad.AdaBelief, mvngrad.MVNGrad):
        betas = (0.01, betas[1])  # they need one above 0
    statement = diagnose(train_with_monitor(make, gradient, betas=betas)[2]).groups[0]["signal"]
    assert statement.verdict == ("cannot tell" if betas[0] < 0.3 else "noise-dominated")


@pytest.mark.parametrize("make", [torch.optim.Adam, mvngrad.Adam, mvngrad.AdaBelief, mvngrad.MVNGrad])
@pytest.mark.parametrize("betas", [(0.99, 0.7), (0.999, 0.7)], ids=str)  # the second has not settled
def test_a_mean_of_larger_gradients_than_the_divisor_is_not_called_signal(make, betas):
    """Noise that shrinks, as when all examples are learnt, while m forgets more slowly than the divisor."""

    def gradient(t, size):
        return noise(t, size) * (1 if t < 400 else 1e-4)

    (group,) = diagnose(train_with_monitor(make, gradient, steps=820, betas=betas)[2]).groups
    assert group["signal"].verdict == group["normalizer"].verdict == "cannot tell"
    assert group.finding == group["signal"].because
    assert "still contains larger gradients than the present ones" in group.finding
    (group,) = diagnose(train_with_monitor(make, signal, steps=820, betas=betas)[2]).groups
    assert group["signal"].verdict == "signal-dominated"


@pytest.mark.parametrize("make", [mvngrad.Adam, mvngrad.AdaBelief, mvngrad.MVNGrad])
def test_a_mean_slower_than_the_variance_needs_its_own_time(make):
    """m needs 3/(1 - 0.99) = 300 steps, while v or s at beta2 = 0.7 needs 10."""
    early, late = (diagnose(train_with_monitor(make, noise, n, betas=(0.99, 0.7))[2]).groups[0] for n in (260, 400))
    assert early["signal"].provisional or early["signal"].verdict == "cannot tell"
    assert (late["signal"].verdict, late["signal"].provisional) == ("noise-dominated", False)


@pytest.mark.parametrize("make", [mvngrad.Adam, mvngrad.LaProp, mvngrad.AdaBelief, mvngrad.MVNGrad])
@pytest.mark.parametrize("gradient", [noise, uniform_noise, sign_noise])
def test_noise_is_no_signal_in_the_first_steps(make, gradient):
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer, records = make([weight]), []
    with Monitor(optimizer, every=1, sink=records.append):
        for t in range(1, 31):
            weight.grad = gradient(t, 1000)
            optimizer.step()
    for steps in range(1, 31):
        (group,) = diagnose(records[:steps]).groups
        assert group["signal"].verdict in ("noise-dominated", "cannot tell"), steps
        assert group["sign collapse"].verdict in ("absent", "cannot tell"), steps
    assert group["signal"].provisional or make is mvngrad.LaProp
    (group,) = diagnose(records[:6]).groups
    assert group["sign collapse"].because == "Too few records from step 5 on to judge sign collapse: 2 of at least 3."


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 1 - 1e-9])
def test_the_noise_of_the_mean_is_that_of_its_steps(beta):
    entry = {"mean_noise": math.sqrt((1 - beta) / (1 + beta))}
    for t in (1, 2, 40):
        weights = torch.tensor([beta**i for i in range(t)], dtype=torch.float64)
        assert _find_mean_noise({**entry, "t": t}) == pytest.approx((weights / weights.sum()).norm().item(), rel=1e-5)
    assert _find_mean_noise({"mean_noise": 0.0, "t": 4}) == 0.5


def constant(t, size):
    return torch.logspace(-3, -1, size)


@pytest.mark.parametrize("options", [{}, {"lean": True}, {"state_dtype": "int8"}], ids=str)
def test_a_clipped_step_is_not_called_sgd(tmp_path, options):
    records = train_with_monitor(mvngrad.MVNGrad, constant, steps=3000, betas=(0.9, 0.99), z_clip=3.0, **options)[2]
    entry = records[-1]["groups"][0]
    assert (entry["z_clip"], entry["clipped"], entry["epsilon_floor"]) == (3.0, 1.0, 0.0)
    assert entry["update"]["0.5"] == pytest.approx(3, rel=0.05)
    text = str(diagnose(records))
    assert "SGD" not in text
    (group,) = diagnose(records).groups
    assert group.finding == (
        "100% of the coordinates move by z_clip * lr at each step, whatever the size of their gradient."
    )
    assert group.action == "If that is not intended, raise z_clip, and lower lr with it."
    assert group["sign collapse"].verdict == "present"
    assert group["signal"].verdict == "signal-dominated"
    assert "or more" in group["signal"].because or "lean" not in options
    for record in records:  # as an early version wrote it
        del record["groups"][0]["z_clip"], record["groups"][0]["clipped"]
    (path := tmp_path / "early.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert diagnose(path).groups[0].finding != group.finding


def test_a_mean_rebuilt_from_clipped_updates_is_a_lower_bound():
    options = {"steps": 600, "betas": (0.9, 0.99), "z_clip": 1.0}
    for lean in (False, True):
        (group,) = diagnose(train_with_monitor(mvngrad.MVNGrad, signal, lean=lean, **options)[2]).groups
        assert group["signal"].verdict == ("cannot tell" if lean else "signal-dominated")
    assert re.match(r"With lean=True the mean is rebuilt .* z_clip bounds \d+% of them\.", group["signal"].because)

    def signal_of_few(t, size):
        return 6.0 * (torch.arange(size) < 0.3 * size) + noise(t, size)

    for lean in (False, True):
        (group,) = diagnose(train_with_monitor(mvngrad.MVNGrad, signal_of_few, lean=lean, **options)[2]).groups
        assert group["sign collapse"].verdict == ("cannot tell" if lean else "avoided")


def test_noise_is_not_clipped():
    (group,) = diagnose(train_with_monitor(mvngrad.LaProp, noise, z_clip=1.0)[2]).groups
    assert group["sign collapse"].verdict == "absent"


@pytest.mark.parametrize("make", [mvngrad.Adam, mvngrad.AdaBelief, mvngrad.LaProp, mvngrad.MVNGrad, torch.optim.Adam])
@pytest.mark.parametrize("last", [10, 60])
def test_a_state_that_overflowed_is_not_called_dead(make, last):
    """Also if later gradients are small: what is infinite stays so."""
    records = train_with_monitor(make, lambda t, size: (1e25 if t <= last else 1) * noise(t, size), steps=60)[2]
    entry = records[-1]["groups"][0]
    assert (entry["dead"], entry["not_finite"], entry["update"]) == (0, 1, None)
    (group,) = diagnose(records).groups
    assert group["epsilon floor"].because == "The state is not finite."
    where = "From step 20 on a part of the state is not finite: "
    assert group.finding == f"{where}100% in the last record."


def test_signal_is_recognized_with_little_momentum():
    statement = diagnose(train_with_monitor(mvngrad.Adam, signal, betas=(0.35, 0.99))[2]).groups[0]["signal"]
    assert statement.verdict == "signal-dominated"


@pytest.mark.parametrize("make", [torch.optim.AdamW, mvngrad.MVNGradW])
@pytest.mark.parametrize("size", [100, 2000])
def test_a_layer_that_is_hardly_used_does_not_hide_the_others(make, size):
    often, rarely = torch.nn.Parameter(torch.zeros(1000)), torch.nn.Parameter(torch.zeros(size))
    optimizer, records = make([often, rarely], betas=(0.9, 0.98)), []
    with Monitor(optimizer, every=20, sink=records.append):
        for t in range(400):
            often.grad, rarely.grad = signal(t, 1000), noise(t, size) if t < 3 else None
            optimizer.step()
    statement = diagnose(records).groups[0]["signal"]
    assert statement.verdict == ("signal-dominated" if size == 100 else "cannot tell")
    assert not statement.provisional
