"""The diagnosis of trainings for which the answer is known."""

import math
import re
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

import mvngrad
from mvngrad.diagnostics import Monitor, diagnose, read_records, variance_gap
from mvngrad.diagnostics.diagnosis import _judge_spikes
from mvngrad.diagnostics.floor import FLOOR_COUPLED, FLOOR_DECOUPLED, FLOOR_LANGUAGE, FLOOR_WITHOUT_DECAY
from mvngrad.diagnostics.signal_to_noise import _remove_start
from mvngrad.diagnostics.spikes import SpikeTracker

CLASSES = {"Adam": mvngrad.Adam, "AdaBelief": mvngrad.AdaBelief, "LaProp": mvngrad.LaProp, "MVN-Grad": mvngrad.MVNGrad}


def train_with_monitor(make, gradient, steps=400, size=1000, betas=(0.9, 0.98), follow=True, **options):
    weight = torch.nn.Parameter(torch.zeros(size))
    optimizer, records = make([weight], betas=betas, **options), []
    with Monitor(optimizer, every=20, sink=records.append, follow=follow):
        for t in range(1, steps + 1):
            weight.grad = gradient(t, size)
            optimizer.step()
    return weight, optimizer, records


def noise(t, size):
    return torch.randn(size)


def signal(t, size):
    return 6 + torch.randn(size)


@pytest.mark.parametrize("cell", CLASSES)
def test_a_training_dominated_by_noise(cell):
    (group,) = diagnose(train_with_monitor(CLASSES[cell], noise)[2]).groups
    assert group.trained_with == cell
    assert group["sign collapse"].verdict == "absent"
    assert group["epsilon floor"].verdict == "not active"
    assert group["spikes"].verdict == "none"
    if cell == "LaProp":
        assert group["signal"].verdict == group["normalizer"].verdict == "cannot tell"
        assert group["order"].because == "LaProp keeps no m, which variance_gap needs to measure it."
        assert group.action.endswith("dominates cannot be told. LaProp keeps no m, from which it is measured.")
    else:
        assert group["signal"].verdict == "noise-dominated"
        assert group["normalizer"].verdict == group["order"].verdict == "either"
    assert group.cell is None


def test_of_two_trainings_in_one_file_the_second_is_judged():
    first, second = (train_with_monitor(mvngrad.Adam, gradient)[2] for gradient in (signal, noise))
    assert diagnose([*first, *second]) == diagnose(second)
    assert diagnose([*second[:15], *second[10:]]) == diagnose(second), "a resumed training is judged as one"


@pytest.mark.parametrize("every", [(20, 20), (20, 30), (20, 200)])
@pytest.mark.filterwarnings("ignore:.*has records of an earlier run")
def test_records_of_two_optimizers_in_one_file_are_refused(tmp_path, every):
    path, shared = tmp_path / "records.jsonl", []
    weights = [torch.nn.Parameter(torch.zeros(100)) for _ in range(2)]
    optimizers = [mvngrad.MVNGrad(weights[:1]), torch.optim.AdamW(weights[1:])]
    monitors = [
        Monitor(optimizer, each, sink)
        for sink in (path, shared.append)
        for optimizer, each in zip(optimizers, every, strict=True)
    ]
    for _ in range(280):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.randn(100)
            optimizer.step()
    for monitor in monitors:
        monitor.close()
    mixed = r"records of several Monitors are mixed: .*\(AdamW\).*; give each optimizer, .* sink of its own, and close"
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: {mixed}"):
        diagnose(path)
    with pytest.raises(ValueError, match=mixed):
        diagnose(shared)
    kept = [record for record in shared if record["optimizer"] == "MVNGrad"]
    assert diagnose(kept).groups[0].optimizer == "MVNGrad"
    optimizer = mvngrad.Adam(weights)
    with Monitor(optimizer, every=1, sink=path):
        optimizer.step()
    assert diagnose(path).groups[0].optimizer == "Adam", "a later run of its own is judged"


def test_topics_are_looked_up_by_name():
    (group,) = diagnose(train_with_monitor(mvngrad.Adam, noise)[2]).groups
    assert [statement.topic for statement in group.statements][:2] == ["signal", "sign collapse"]
    with pytest.raises(KeyError, match="'sgnal' is not a topic; the topics are signal, sign collapse"):
        group["sgnal"]


@pytest.mark.parametrize("records", [{"step": 1, "groups": []}, None])
def test_what_is_no_list_of_records_is_named(records):
    with pytest.raises(TypeError, match=f"pass a list of records, .*; got a {type(records).__name__}"):
        diagnose(records)


def test_spikes_that_were_not_followed_are_not_judged():
    (group,) = diagnose(train_with_monitor(mvngrad.Adam, noise, follow=False)[2]).groups
    assert group["spikes"].verdict == "cannot tell"
    assert group["order"].verdict == "either"
    assert group["order"].because.endswith("spikes were not followed.")


def test_a_mean_that_changes_sign_is_said_to_count_as_noise():
    """Without noise, as with all examples at once and a rate that is too high."""
    (group,) = diagnose(
        train_with_monitor(mvngrad.Adam, lambda t, size: torch.full((size,), 1.0 - 2.0 * (t % 2)))[2]
    ).groups
    assert group["signal"].verdict == "noise-dominated"
    assert group["signal"].because.endswith(" A mean that changes within a few steps counts as noise.")


@pytest.mark.parametrize("cell", CLASSES)
def test_a_training_dominated_by_signal(cell):
    diagnosis = diagnose(train_with_monitor(CLASSES[cell], signal)[2])
    (group,) = diagnosis.groups
    variance = cell in ("AdaBelief", "MVN-Grad")
    assert group["sign collapse"].verdict == ("avoided" if variance else "present")
    if not variance:
        cost = "such a floor cost a language model 0.30 nats or more (GPT-2 30M, one seed)."
        assert group.action == f"Divide by the variance (AdaBelief, MVN-Grad). A larger eps also avoids it, but {cost}"
    assert group["normalizer"].verdict == "variance"
    if cell == "LaProp":  # keeps no m
        assert group["signal"].verdict == "cannot tell"
        assert group.cell == "AdaBelief or MVN-Grad"
    else:
        assert group["signal"].numbers["snr"] == pytest.approx(6, rel=0.2)
        assert group.cell == "MVN-Grad"
    for statement in group.statements:
        assert statement.because in str(diagnosis)


def test_a_measured_gap_decides_the_order():
    weight, optimizer, records = train_with_monitor(mvngrad.MVNGrad, lambda t, size: 0.6 + torch.randn(size))
    (group,) = diagnose(records).groups
    assert group["signal"].verdict == "between signal and noise"
    assert group["order"].verdict == "cannot tell"
    gap = variance_gap(optimizer, lambda g: (weight * g).sum(), [0.6 + torch.randn(1000) for _ in range(32)])
    (group,) = diagnose(records, gap).groups
    assert group["order"].numbers["relative"] == gap.relative
    assert group["order"].verdict == ("after" if gap.relative > 0.02 else "either")
    assert group.action == group["order"].because, "what was measured need not be measured again"
    (group,) = diagnose(records, replace(gap, before=1.1 * gap.after, error=gap.after)).groups
    assert group["order"].verdict == "cannot tell"
    (group,) = diagnose(records, replace(gap, before=1.5 * gap.after, error=1e-3 * gap.after)).groups
    assert group.action.endswith("Updates vary less with momentum after normalizing.")
    (group,) = diagnose(records, replace(gap, before=math.nan)).groups
    assert (group["order"].verdict, "not finite" in group["order"].because) == ("cannot tell", True)
    (group,) = diagnose(records, replace(gap, cells=("Adam", "LaProp"))).groups
    assert group["order"].numbers == {}
    assert group.action == group["order"].because
    assert group.action.endswith("Theorem 3.1 does not cover these two.")
    (group,) = diagnose(train_with_monitor(mvngrad.MVNGrad, signal)[2], gap).groups
    assert "Measured" in group["order"].because


def test_the_epsilon_floor_is_reported():
    (group,) = diagnose(train_with_monitor(mvngrad.MVNGrad, lambda t, size: signal(t, size) * 1e-9)[2]).groups
    assert group["epsilon floor"].verdict == "active"
    assert group["epsilon floor"].numbers["share"] > 0.9
    assert "choose it with care" in group["normalizer"].because or group["normalizer"].verdict != "variance"


@pytest.mark.parametrize("make", [mvngrad.Adam, mvngrad.LaProp])  # LaProp keeps no m, so that its signal is not known
def test_a_floor_under_a_part_of_the_coordinates_is_in_the_lead(make):
    scale = torch.where(torch.arange(1000) < 300, 1e-12, 1.0)
    (group,) = diagnose(train_with_monitor(make, lambda t, size: noise(t, size) * scale)[2]).groups
    assert "30% of the coordinates are stepped as by SGD with momentum at rate 1e+05." in group.finding
    assert "if it grows beyond a half" in group.action


@pytest.mark.parametrize(
    ("make", "options"),
    [(torch.optim.Adam, {}), *((make, {}) for make in CLASSES.values()), (mvngrad.MVNGrad, {"lean": True})],
)
def test_a_coordinate_without_a_gradient_is_not_at_the_floor(make, options):
    """As in an embedding, where each row has a gradient once in 1000 steps: its divisor decays, but divides nothing."""

    def gradient(t, size):
        return noise(t, size).where((torch.arange(size) % 1000 == t % 1000) | (torch.arange(size) < 100), 0.0)

    records = train_with_monitor(make, gradient, 2000, betas=(0.9, 0.94), **options)[2]
    (group,) = diagnose(records).groups
    assert group["epsilon floor"].numbers["share"] < 0.01
    assert all(record["groups"][0]["noise_hidden"] < 0.01 for record in records)


def test_a_coordinate_whose_mean_is_rounded_to_0_is_at_the_floor():
    """As in 8 bits, next to coordinates with far larger gradients."""

    def gradient(t, size):
        return noise(t, size).where(torch.arange(size) % 2 == 0, 1e-6 * noise(t, size))

    _, optimizer, records = train_with_monitor(mvngrad.MVNGrad, gradient, eps_s=1e-6, state_dtype="int8")
    (state,) = optimizer.state.values()
    assert (state["m"] & 127 == 0).float().mean() > 0.3
    share = diagnose(records).groups[0]["epsilon floor"].numbers["share"]
    assert share == pytest.approx(0.5, abs=0.02)


def noise_with_spike(t, size):
    return torch.randn(size) * (1e4 if t == 205 else 1)


@pytest.mark.parametrize("make", [mvngrad.AdaBelief, mvngrad.MVNGrad])
def test_a_floor_does_not_turn_signal_into_noise(make):
    """A floor of 0.02 over deviations of 1e-3, and of 2e-5, which cannot be read beside it."""
    (group,) = diagnose(train_with_monitor(make, lambda t, size: 1e-3 * signal(t, size), eps_s=8e-6)[2]).groups
    assert group["epsilon floor"].numbers["share"] == 1
    assert group["signal"].verdict == "signal-dominated"
    records = train_with_monitor(make, lambda t, size: 1e-4 + 2e-5 * torch.randn(size), eps_s=8e-6)[2]
    (group,) = diagnose(records).groups
    assert {group[topic].verdict for topic in ("signal", "sign collapse", "normalizer")} == {"cannot tell"}
    assert group["signal"].because.startswith("The floor of eps_s (0.02) hides the noise of 100% of the coordinates. ")
    for record in records:  # as an early version wrote it
        del record["groups"][0]["noise_hidden"]
    assert diagnose(records).groups[0]["signal"].verdict == "cannot tell"


def test_the_steps_in_which_no_spike_can_be_found_are_named():
    """A median of fewer than 20 norms is no measure."""
    records = train_with_monitor(mvngrad.MVNGrad, lambda t, size: noise(t, size) * (1e4 if t == 10 else 1), 20)[2]
    statement = diagnose(records).groups[0]["spikes"]
    assert str(statement) == "spikes: none. After the first 20 steps no gradient norm was far above its running median."


def test_spikes_that_momentum_explains_are_absorbed():
    (group,) = diagnose(train_with_monitor(mvngrad.MVNGrad, noise_with_spike)[2]).groups
    assert group["spikes"].verdict == "absorbed"
    assert group["spikes"].numbers["steps"] == [205]


def test_spikes_that_return_are_carried_over():
    """v decays by 0.6 per step, m only by 0.95: as in the paper's figure, the spike returns when v is small again."""
    betas = (0.95, 0.6)
    adam, laprop = (
        diagnose(train_with_monitor(make, noise_with_spike, betas=betas)[2]).groups[0]
        for make in (mvngrad.Adam, mvngrad.LaProp)
    )
    assert adam["spikes"].verdict == "carried over"
    assert adam["spikes"].numbers["update"] > 100
    assert adam["order"].verdict == "after"
    assert laprop["spikes"].verdict == "absorbed"
    assert laprop["spikes"].numbers["update"] < 10
    assert "Remark 3.1" in laprop["order"].because  # another order would not have absorbed it


@pytest.mark.parametrize(
    ("make", "betas"), [(mvngrad.MVNGrad, (0.9, 0.98)), (mvngrad.LaProp, (0.95, 0.6)), (mvngrad.Adam, (0.9, 0.98))]
)
def test_an_update_that_rises_from_later_gradients_is_not_carried_over(make, betas):
    """The gradients after the spike have one sign, so that they add up."""

    def gradient(t, size):
        scale = 20.0 if t == 205 else 1.0 + 3.0 * (t > 230)
        return scale * (torch.randn(size) if t < 230 else torch.randn(size).abs())

    (group,) = diagnose(train_with_monitor(make, gradient, betas=betas)[2]).groups
    assert group["spikes"].verdict == "absorbed"
    assert group["spikes"].because.endswith(
        "; 1 rose again after the gradient had recovered, but from later gradients: "
        "here momentum only decays after a spike."
    )
    assert "came back" not in group.finding


def test_only_unbounded_spikes_decide_the_order():
    """rem:adam_bound holds where beta1^2 < beta2; without a spike it does not matter."""
    short, usual = (0.95, 0.6), (0.9, 0.98)
    for gradient, betas in ((noise_with_spike, usual), (noise, short)):
        (group,) = diagnose(train_with_monitor(mvngrad.MVNGrad, gradient, betas=betas)[2]).groups
        assert "Remark 3.1" not in group["order"].because


@pytest.mark.parametrize("make", [mvngrad.Adam, torch.optim.Adam])
def test_a_step_that_gradscaler_skips_does_not_decide_the_order(make):
    groups = []
    for fused in (False, True):
        torch.manual_seed(0)
        weight, records = torch.nn.Parameter(torch.zeros(100)), []
        optimizer, scaler = make([weight], betas=(0.99, 0.9), fused=fused), torch.amp.GradScaler("cpu")
        with Monitor(optimizer, every=20, sink=records.append):
            for t in range(1, 201):
                optimizer.zero_grad()
                scaler.scale((weight * torch.randn(100)).sum() * (math.inf if t == 105 else 1)).backward()
                scaler.step(optimizer)
                scaler.update()
        groups += diagnose(records).groups
        assert optimizer.state[weight]["step"] == 199
    assert groups[0]["choice of optimizer"] == groups[1]["choice of optimizer"]
    assert groups[0]["order"].verdict == groups[1]["order"].verdict == "either"
    assert groups[1]["spikes"].because.startswith("1 found, 1 of them not finite; updates rose")


@pytest.mark.parametrize("make", [mvngrad.LaProp, mvngrad.MVNGradW, torch.optim.AdamW])
def test_a_floor_is_found_in_the_first_record_and_named_before_what_is_unknown(make):
    floor = {"eps_s": 1.0} if make is mvngrad.MVNGradW else {"eps": 100.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        records = train_with_monitor(make, noise, **floor)[2]
    for judged in (records[:1], records):
        (group,) = diagnose(judged).groups
        assert group["epsilon floor"].verdict == "active"
        assert not group["epsilon floor"].provisional
        assert re.match(r"100% of the coordinates are stepped as by SGD with momentum at rate [\d.e-]+", group.finding)
        assert ("with decoupled weight decay" in " ".join(group.measured)) == make.__name__.endswith("W")
        assert all(f"\n  {text}\n" in str(diagnose(judged)) for text in group.measured)


@pytest.mark.parametrize(("share", "percent"), [(0.002, "0.2%"), (0.06, "6%"), (1.0, "100%")])
@pytest.mark.parametrize("make", [mvngrad.MVNGradW, mvngrad.Adam, torch.optim.AdamW])
def test_state_that_became_nan_is_reported(make, share, percent):
    def gradient(t, size):
        return noise(t, size).where(torch.arange(size) >= size * share * (t > 200), math.nan)

    records = train_with_monitor(make, gradient)[2]
    (group,) = diagnose(records).groups
    where = "From step 220 on a part of the state is not finite:"
    assert group.finding == f"{where} {percent} in the last record."
    assert "checkpoint before that" in group.action
    (entry,) = records[-1]["groups"]
    (layer,) = entry["layers"] or [{"update": None}]
    assert (entry["root"] is None) == (layer["update"] is None) == (share == 1)
    (group,) = diagnose(records[:10]).groups
    assert "not finite" not in group.finding


@pytest.mark.parametrize("bad", [1, 5, 300])
@pytest.mark.parametrize("cell", ["Adam", "LaProp"])
def test_a_gradient_that_is_not_finite_is_reported_if_its_coordinate_is_not_sampled(cell, bad):
    def gradient(t, size):
        return noise(t, size).index_fill(0, torch.tensor([7]), math.nan if t == bad else 1.0)

    weight, _, records = train_with_monitor(CLASSES[cell], gradient, size=50_000)
    (group,) = diagnose(records).groups
    assert weight.isnan().sum() == 1
    assert not any(record["groups"][0]["not_finite"] for record in records)
    assert "part from 1 spike of the gradient that was not finite, nothing" in group.finding
    assert group.action.startswith("Unless GradScaler skipped these steps, look for NaN in the weights. ")
    assert group["spikes"].verdict == ("absorbed" if bad == 300 else "not finite")
    assert group["spikes"].because.startswith("1 found, 1 of them not finite; ")


@pytest.mark.parametrize(("make", "what"), [(mvngrad.MVNGrad, "the signal"), (mvngrad.LaProp, "sign collapse")])
def test_of_two_records_only_what_has_an_answer_is_printed(make, what):
    records = train_with_monitor(make, signal)[2]
    diagnosis = diagnose(records[-2:])
    (group,) = diagnosis.groups
    assert group["sign collapse"].verdict == group["choice of optimizer"].verdict == "cannot tell"
    assert (group.finding, group.measured) == (f"Too few records to judge {what}: 2 of at least 3.", ())
    assert group.action == "Record more often (Monitor(every=...)) or train longer."
    topics = [line.split(":")[0].strip() for line in str(diagnosis).splitlines()[2:]]
    assert topics == ["epsilon floor", "spikes"]
    assert "provisional" not in str(diagnosis), "the floor is known from the first record"
    assert diagnose([]).steps is None


def test_without_a_gradient_nothing_is_judged():
    (group,) = diagnose(train_with_monitor(mvngrad.Adam, lambda t, size: torch.zeros(size))[2]).groups
    assert (group.finding, group.action) == ("Nothing can be judged yet.", "No coordinate has had a gradient.")


@pytest.mark.parametrize(
    "gradient", [noise, signal, lambda t, size: 0.01 * noise(t, size)], ids=["noise", "signal", "floor"]
)
@pytest.mark.parametrize("cell", CLASSES)
def test_texts_have_no_word_that_only_the_paper_defines(cell, gradient):
    text = str(diagnose(train_with_monitor(CLASSES[cell], gradient, eps=1e-2)[2]))
    assert not re.search(r"\bcells?\b|\bm\^2|\bmu\b|\bsigma\b|v and s|regimes", text)
    assert "\n  choice of optimizer: " in text


def test_what_the_records_decide_is_said():
    groups = {
        (make, each): diagnose(train_with_monitor(make, each)[2]).groups[0]["choice of optimizer"]
        for make, each in ((mvngrad.Adam, noise), (mvngrad.Adam, signal), (mvngrad.LaProp, signal))
    }
    theory = (
        " This is the theory of the paper, and does not predict which optimizer reaches the lowest loss: on a language "
        "model none was shown to be ahead of all others (GPT-2 30M, three seeds)."
    )
    assert [(each.verdict, each.because) for each in groups.values()] == [
        ("cannot tell", "The records favour none of Adam, LaProp, AdaBelief and MVN-Grad."),
        ("MVN-Grad", f"The records decide the normalizer and the order of momentum.{theory}"),
        ("AdaBelief or MVN-Grad", f"The records decide the normalizer, but not the order of momentum.{theory}"),
    ]
    records = train_with_monitor(mvngrad.Adam, noise_with_spike, betas=(0.95, 0.6))[2]
    choice = diagnose(records).groups[0]["choice of optimizer"]
    assert choice.because == f"The records decide the order of momentum, but not the normalizer.{theory}"
    assert choice.verdict == "MVN-Grad or LaProp"


@pytest.mark.parametrize("cell", ["MVN-Grad", "Adam"])
def test_before_the_averages_have_settled_the_answer_is_provisional(cell):
    records = train_with_monitor(CLASSES[cell], signal, betas=(0.9, 0.999))[2]
    (group,) = diagnose(records).groups
    statement = group["signal"]
    assert (statement.verdict, statement.provisional) == ("signal-dominated", True)
    text = "signal: signal-dominated (provisional). Median |mean|/std of the gradient after 400 steps: "
    assert text in str(diagnose(records))
    if cell == "MVN-Grad":  # s contains the first deviations from m = 0
        assert statement.numbers["snr"] < 5.3
        assert statement.numbers["snr_corrected"] == pytest.approx(6, rel=0.1)


@pytest.mark.parametrize("gradient", [noise, signal])
@pytest.mark.parametrize("cell", ["MVN-Grad", "AdaBelief", "Adam"])
def test_a_provisional_answer_is_a_range(cell, gradient):
    for steps in (80, 400):
        records = train_with_monitor(CLASSES[cell], gradient, steps=steps, betas=(0.9, 0.999))[2]
        (group,) = diagnose(records).groups
        assert group["signal"].provisional
        low, high = re.search(r" steps: ([\d.]+) to ([\d.]+)\. Below", group["signal"].because).groups()
        assert 1.02 < float(high) / float(low) < 3


def test_a_provisional_range_of_lean_is_said_to_be_low():
    """m is rebuilt from u, which has seen larger roots."""
    for lean in (False, True):
        records = train_with_monitor(mvngrad.MVNGrad, signal, betas=(0.9, 0.999), lean=lean)[2]
        statement = diagnose(records).groups[0]["signal"]
        assert statement.provisional
        assert (statement.numbers["snr_corrected"] < 5.7) == lean
        assert ("With lean=True" in statement.because) == lean
    settled = diagnose(train_with_monitor(mvngrad.MVNGrad, signal, lean=True)[2]).groups[0]["signal"]
    assert "lean" not in settled.because


def test_no_provisional_answer_if_the_start_could_change_it():
    records = train_with_monitor(
        mvngrad.MVNGrad, lambda t, size: 1.04 + torch.randn(size), steps=60, betas=(0.9, 0.999)
    )[2]
    (statement,) = (group["signal"] for group in diagnose(records).groups)
    assert statement.numbers["snr"] < 1 < statement.numbers["snr_corrected"]
    assert statement.verdict == "cannot tell"
    assert statement.numbers["needed"] == pytest.approx(3000)


@pytest.mark.parametrize(
    ("make", "options"),
    [(mvngrad.MVNGrad, {"eps_s": 1e-2}), (mvngrad.Adam, {"eps": 10.0}), (torch.optim.AdamW, {"eps": 10.0})],
)
def test_at_the_floor_the_sgd_rate_is_that_of_an_sgd_with_the_same_steps(make, options):
    """0.01 / (1 - 0.98) = 0.5 is added to s; the gradients are of size 0.01."""
    torch.manual_seed(0)
    gradients = {t: 0.01 * torch.randn(1000) for t in range(1, 401)}
    weight, _, records = train_with_monitor(make, lambda t, size: gradients[t], lr=0.1, weight_decay=0.0, **options)
    (group,) = diagnose(records).groups
    rate = group["epsilon floor"].numbers["sgd_rate"]
    assert group.finding.startswith(f"100% of the coordinates are stepped as by SGD with momentum at rate {rate:.2g}")
    assert next(iter(options)) in group.action
    x, u = torch.zeros(1000), torch.zeros(1000)
    for t, gradient in gradients.items():
        u = 0.9 * u + 0.1 * gradient
        x -= rate * u / (1 - 0.9**t)
    torch.testing.assert_close(weight.detach(), x, rtol=5e-3, atol=1e-5)


FLOORS = [
    (mvngrad.MVNGrad, {"eps_s": 1e-6}, 1e-3),  # a floor of 7e-3
    (mvngrad.AdaBelief, {"eps_s": 1e-16}, 1e-8),  # a floor of 7e-8; eps is as large as a gradient
    (mvngrad.LaProp, {"eps": 0.1}, 1e-3),
    (torch.optim.AdamW, {"eps": 0.1}, 1e-3),
]


@pytest.mark.parametrize(("make", "options", "scale"), FLOORS, ids=[make.__name__ for make, *_ in FLOORS])
def test_the_action_against_a_floor_removes_it_and_says_how_steps_grow(make, options, scale):
    torch.manual_seed(0)
    gradients = {t: scale * torch.randn(1000) for t in range(1, 401)}
    records = train_with_monitor(make, lambda t, size: gradients[t], **options)[2]
    diagnosis = diagnose(records)
    (group,) = diagnosis.groups
    if make in (mvngrad.LaProp, torch.optim.AdamW):
        assert "eps_s" not in str(diagnosis), "it has no such option"
    advised = {name: float(value) for name, value in re.findall(r"(eps|eps_s)=([\d.e-]+\d)", group.action)}
    assert advised.keys() == ({"eps", "eps_s"} if make is mvngrad.AdaBelief else options.keys())
    after = train_with_monitor(make, lambda t, size: gradients[t], **{**options, **advised})[2]
    assert diagnose(after).groups[0]["epsilon floor"].verdict == "not active"
    growth = float(re.search(r"the median step is then about ([\d.e+]+) times as large", group.action)[1])
    medians = [each[-1]["groups"][0]["update"]["0.5"] for each in (records, after)]
    assert medians[1] / medians[0] == pytest.approx(growth, rel=0.15)


@pytest.mark.parametrize("make", [mvngrad.MVNGrad, torch.optim.Adam])
def test_after_a_floor_was_removed_the_records_with_it_are_not_judged(make):
    gradient = lambda t, size: 1e-4 * torch.randn(size)  # noqa: E731
    _, optimizer, records = train_with_monitor(make, gradient, eps=1e-3)
    state_dict = optimizer.state_dict()
    state_dict["param_groups"][0]["eps"] = 1e-8
    weight = torch.nn.Parameter(torch.zeros(1000))
    resumed = mvngrad.MVNGrad([weight])
    resumed.load_state_dict(mvngrad.from_adamw(resumed, state_dict))
    with Monitor(resumed, every=20, sink=records.append):
        for t in range(80):
            weight.grad = gradient(t, 1000)
            resumed.step()
    diagnosis = diagnose(records)
    assert diagnosis.steps == (420, 480)
    assert diagnosis.groups[0]["epsilon floor"].verdict == "not active"


def test_records_under_a_slow_schedule_of_epsilons_are_judged():
    _, _, records = train_with_monitor(mvngrad.MVNGrad, lambda t, size: torch.randn(size), eps_s=1.234565e-13)
    for i, record in enumerate(records):
        (entry,) = record["groups"]
        entry["eps"] *= 1.02**i
        entry["beta2"] = 0.999 - 1e-5 * i
        entry["floor"] = math.sqrt(1.234565e-13 / (1 - entry["beta2"]))
    assert diagnose(records).steps[0] == records[-20:][0]["step"]


@pytest.mark.parametrize("without", ["root", "noise"])
def test_the_action_against_a_floor_has_no_values_if_the_root_is_not_known(without):
    scale = 1e-3 if without == "root" else 1e-5  # s is all floor
    records = train_with_monitor(mvngrad.MVNGrad, lambda t, size: scale * torch.randn(size), eps_s=1e-6)[2]
    if without == "root":  # as an early version wrote it
        for record in records:
            del record["groups"][0]["root"]
    (group,) = diagnose(records).groups
    assert "If that is not intended, lower eps_s, and lr too if it was tuned with this floor." in group.action
    for record in records:
        record["groups"][0]["eps"] = 2e-3  # a quarter of the floor of eps_s
    (group,) = diagnose(records).groups
    assert "lower eps_s and eps, and lr" in group.action


@pytest.mark.parametrize("lean", [False, True])
def test_the_floor_of_eps_s_is_named_for_lean_too(lean):
    records = train_with_monitor(mvngrad.MVNGrad, lambda t, size: 1e-4 * noise(t, size), eps_s=1e-4, lean=lean)[2]
    assert "floor of eps_s" in diagnose(records).groups[0]["epsilon floor"].because


@pytest.mark.parametrize(
    ("make", "options", "cited"),
    [
        (mvngrad.MVNGrad, {}, [FLOOR_WITHOUT_DECAY]),
        (mvngrad.MVNGrad, {"weight_decay": 0.1}, [FLOOR_COUPLED]),
        (mvngrad.MVNGradW, {}, [FLOOR_DECOUPLED]),
        (torch.optim.AdamW, {"weight_decay": 0.0}, [FLOOR_WITHOUT_DECAY]),
        (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, [FLOOR_DECOUPLED]),
        (mvngrad.MVNGrad, {"early": True}, [FLOOR_COUPLED, FLOOR_WITHOUT_DECAY]),
    ],
)
def test_what_is_cited_of_a_floor_depends_on_weight_decay(make, options, cited):
    is_early, options = "early" in options, {name: value for name, value in options.items() if name != "early"}
    records = train_with_monitor(make, lambda t, size: 0.01 * noise(t, size), steps=20, eps=1.0, **options)[2]
    entry = records[0]["groups"][0]
    assert entry["weight_decay"] == options.get("weight_decay", 0.01 if make is mvngrad.MVNGradW else 0.0)
    if is_early:
        del entry["weight_decay"], entry["decoupled_weight_decay"]
    (group,) = diagnose(records).groups
    assert ("On images a floor may help with coupled" in group.action) == (cited == [FLOOR_COUPLED])
    own, *others = group.measured
    assert others == [*cited, FLOOR_LANGUAGE]
    assert own.startswith("Your floor of 1 is ")
    assert all("the floor was 1e-3, 2.1 times the root mean square" in each for each in cited)


def test_the_floor_is_compared_with_the_median_root():
    """A floor of 7.1e-3 over deviations of 1e-3, and of 1e-5, which it hides."""
    for scale, size in (
        (1e-3, r"(\d\.\d) times the median root \(0\.00\d+\)\."),
        (1e-5, r"more than (\d+) times the median root\."),
    ):
        records = train_with_monitor(mvngrad.MVNGrad, lambda t, n, s=scale: s * noise(t, n), eps_s=1e-6)[2]
        own = diagnose(records).groups[0].measured[0]
        found = re.match(rf"Your floor of 0\.0071 is {size} Floors of other sizes have other effects", own)
        assert 7 < float(found[1]) < 9 if scale == 1e-3 else 20 < float(found[1]) < 40
        for record in records:  # as an early version wrote it
            del record["groups"][0]["root"]
        assert not diagnose(records).groups[0].measured[0].startswith("Your floor")


def test_a_group_without_decay_is_judged_with_the_decay_of_the_others():
    """As usual for biases. What we measured without decay has none in any parameter."""
    weight, bias = (torch.nn.Parameter(torch.zeros(50)) for _ in range(2))
    groups, records = [{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}], []
    with Monitor(torch.optim.AdamW(groups, eps=1.0), every=1, sink=records.append) as monitor:
        weight.grad, bias.grad = 0.01 * torch.randn(50), 0.01 * torch.randn(50)
        monitor.optimizer.step()
    assert [entry["weight_decay"] for entry in records[0]["groups"]] == [0.01, 0.0]
    assert all(FLOOR_DECOUPLED in group.measured for group in diagnose(records).groups)


def test_the_sgd_rates_are_those_of_the_judged_records_and_not_of_the_last_step():
    """lr falls to 0 at the last record, and the divisor is eps within 1%."""
    weight, records = torch.nn.Parameter(torch.zeros(100)), []
    optimizer = torch.optim.Adam([weight], lr=10.0, eps=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 399)
    with Monitor(optimizer, every=20, sink=records.append):
        for _ in range(400):
            weight.grad = 0.01 * torch.randn(100)
            optimizer.step()
            schedule.step()
    assert records[-1]["groups"][0]["lr"] == 0
    (group,) = diagnose(records).groups
    assert "are stepped as by SGD with momentum at rates 0.061 to 9.8, because" in group.finding
    assert "are stepped as by SGD at rates 0.061 to 9.8;" in group["epsilon floor"].because
    assert group["epsilon floor"].numbers["sgd_rate"] == pytest.approx(5, rel=0.05), "the median"
    (group,) = diagnose(records[-1:]).groups
    assert "are stepped as by SGD with momentum, because" in group.finding


def test_what_is_known_comes_first_under_the_name_of_the_class():
    diagnosis = diagnose(train_with_monitor(torch.optim.AdamW, noise, follow=False)[2])
    (group,) = diagnosis.groups
    assert "Group 0, trained with AdamW: Gradients are noise-dominated" in str(diagnosis)
    assert group.trained_with == "Adam"
    known = [statement.verdict != "cannot tell" for statement in group.statements]
    assert known == sorted(known, reverse=True)
    assert not all(known)


@pytest.mark.parametrize("gradient", [float("nan"), 0.0])
def test_gradients_that_are_zero_or_not_finite_are_not_judged(gradient):
    (group,) = diagnose(train_with_monitor(mvngrad.AdaBelief, lambda t, size: torch.full((size,), gradient))[2]).groups
    assert group["signal"].verdict == "cannot tell"
    assert group.cell is None


def test_a_file_is_judged_without_torch(tmp_path):
    weight = torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.AdamW([weight], betas=(0.9, 0.9))
    with Monitor(optimizer, every=10, sink=tmp_path / "records.jsonl"):
        for _ in range(100):
            weight.grad = 1 + torch.randn(100)
            optimizer.step()
    code = (
        "import sys; from mvngrad.diagnostics import diagnose;"
        "print(diagnose(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "records.jsonl")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Steps 10 to 100." in text
    assert "trained with Adam" in text


def test_a_real_training():
    torch.manual_seed(1)
    x = torch.randn(512, 10)
    y = (x[:, 0] > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def loss(rows):
        return torch.nn.functional.cross_entropy(model(x[rows]), y[rows])

    def regime(batch):
        optimizer, records = mvngrad.MVNGrad(model.parameters(), lr=1e-5, betas=(0.9, 0.98)), []
        with Monitor(optimizer, every=20, sink=records.append):
            for _ in range(300):
                optimizer.zero_grad()
                loss(torch.randint(512, (batch,))).backward()
                optimizer.step()
        return diagnose(records).groups[0]["signal"]

    # A larger batch has less noise; lr is too small to change the signal.
    few, many = regime(4), regime(512)
    assert many.numbers["snr"] > 4 * few.numbers["snr"]
    assert few.verdict != many.verdict


def test_recovery_uses_the_bound_of_the_monitor():
    """An update that stays at 1.6 medians never recovers below 1.5, and is always below 4; it does not rise again."""
    for recovered, steps in ((1.5, 1001), (4.0, 0)):
        spikes = SpikeTracker(recovered=recovered)
        for step in range(1, 1400):
            spikes.add(step, 100.0 if step == 100 else 1.0, 1.6 if step >= 100 else 1.0)
        (spike,) = spikes.pop_spikes()
        assert (spike["recovered"], spike["recovery_steps"]) == (recovered, steps)
        assert spike["ended"] == ("given up" if steps else "recovered")
        statement = _judge_spikes([{"spikes": [spike], "gradient_norm": {"median": 1.0, "max": 100.0}}])
        assert statement.verdict == "absorbed"
        assert f"for at most {steps} steps above {recovered:g} times" in statement.because


@pytest.mark.parametrize(("beta2", "t"), [(0.98, 60), (0.999, 400), (0.81, 7), (0.81 * (1 + 1e-9), 7)])
def test_what_is_left_of_the_start_is_the_sum_over_all_steps(beta2, t):
    entry = {"cell": "MVN-Grad", "beta2": beta2, "t": t, "mean_noise": math.sqrt(0.1 / 1.9)}
    excess = sum(beta2 ** (t - i) * 0.81**i for i in range(1, t + 1)) * (1 - beta2) / (1 - beta2**t)
    ratio = 0.5 / (0.9 * math.sqrt(2 / 1.9))
    first = beta2 ** (t * 2 / 3) * (1 - beta2 ** (t / 3)) / (1 - beta2**t)
    expected = max(0.5 * math.sqrt(1 + first), 0.5 / math.sqrt(1 - excess * ratio**2))
    assert _remove_start(0.5, entry) == pytest.approx(expected, rel=1e-6)


def test_what_is_left_of_the_start_of_a_long_training_is_found_at_once():
    entry = {"cell": "MVN-Grad", "beta2": 1 - 2**-53, "t": 10**9, "mean_noise": 0.2}
    assert math.isfinite(_remove_start(0.1, entry))


@pytest.mark.parametrize("make", [torch.optim.Adam, mvngrad.Adam, mvngrad.LaProp])
def test_records_without_momentum_are_read_back(tmp_path, make):
    """The mean is the last gradient, all of which is noise."""
    path, weight = tmp_path / "monitor.jsonl", torch.nn.Parameter(torch.zeros(100))
    optimizer = make([weight], betas=(0.0, 0.98))
    with Monitor(optimizer, every=20, sink=path):
        for t in range(60):
            weight.grad = noise(t, 100)
            optimizer.step()
    assert read_records(path)[-1]["groups"][0]["mean_noise"] == 1
    assert diagnose(path).groups[0]["epsilon floor"].verdict == "not active"
    entry = {"cell": "MVN-Grad", "beta2": 0.98, "t": 60, "mean_noise": 1}  # not from a Monitor
    assert math.isfinite(_remove_start(0.1, entry))
