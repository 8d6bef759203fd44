"""The monitor: its numbers for known gradients, and that it changes nothing."""

import copy
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from family import NARROW, OPTIMIZERS, PLAIN, each_device, equal, everything, parameters, tensors, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mvngrad
from mvngrad.diagnostics import Monitor, TensorBoard, diagnose, read_records, variance_gap
from mvngrad.diagnostics.measures import SATURATION, correct_bias, find_quantiles, update_sizes
from mvngrad.diagnostics.sinks import named_scalars
from mvngrad.diagnostics.state import Sample, copy_to_host, view_group
from mvngrad.optim.formats import load_state

WATCHED = [*PLAIN, torch.optim.Adam]
each_cell = pytest.mark.parametrize(
    "make", WATCHED, ids=lambda make: f"{make.__module__.split('.')[0]}-{make.__name__}"
)


def last_entry(make, gradient, steps=600, size=4000, every=200, betas=(0.9, 0.99), dtype=torch.float32, **options):
    """The last entry of a monitor after steps on the gradients `gradient(t)`."""
    weight = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
    optimizer, records = make([weight], betas=betas, **options), []
    with Monitor(optimizer, every=every, sink=records.append):
        for t in range(1, steps + 1):
            weight.grad = gradient(t).to(dtype)
            optimizer.step()
    return records[-1]["groups"][0]


def noisy_gradient(mean, size=4000):
    return lambda t: mean + torch.randn(size)


def small_gradient(mean):
    return lambda t: 1e-3 * noisy_gradient(mean)(t)


# Measures


@pytest.mark.parametrize("rho", [0.0, 1.0, 4.0])
@each_cell
def test_signal_to_noise_matches_the_gradients(make, rho):
    entry = last_entry(make, noisy_gradient(rho))
    if make is mvngrad.LaProp:
        assert entry["m"] is entry["ratio"] is entry["snr"] is None
        return
    m_noise = math.sqrt(0.1 / 1.9)
    median = rho if rho else 0.6745 * m_noise
    assert entry["mean_noise"] == pytest.approx(m_noise)
    assert entry["snr"]["0.5"] == pytest.approx(median, rel=0.06)
    variance = "MVN" in entry["cell"] or "Belief" in entry["cell"]
    expected = median / (0.9 * math.sqrt(2 / 1.9)) if variance else median / math.sqrt(1 + median**2)
    assert entry["ratio"]["0.5"] == pytest.approx(expected, rel=0.05)
    if rho == 4.0 and variance:  # the quantiles show the noise of m itself
        assert entry["snr"]["0.95"] - entry["snr"]["0.05"] > 2 * 1.64 * m_noise


@pytest.mark.parametrize(
    ("make", "floor", "options"),
    [
        (mvngrad.MVNGrad, 1, {}),
        (mvngrad.AdaBelief, 10, {}),
        (mvngrad.MVNGrad, 3, {"lean": True}),
        (mvngrad.AdaBelief, 1, {"state_dtype": "bf16"}),
        (mvngrad.MVNGrad, 1, {"state_dtype": "int8"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("rho", [0.0, 4.0])
def test_a_floor_is_not_taken_for_noise(rho, make, floor, options):
    """The deviation of the gradients is 1e-3, and the floor up to ten times that."""
    entry = last_entry(make, small_gradient(rho), eps_s=(1e-3 * floor) ** 2 * 0.01, **options)
    median = rho if rho else 0.6745 * entry["mean_noise"]
    assert entry["floor"] == pytest.approx(1e-3 * floor)
    assert entry["noise_hidden"] < 0.05
    assert entry["snr"]["0.5"] == pytest.approx(median, rel=0.1)
    assert entry["layers"][0]["snr"] == pytest.approx(median, rel=0.1)
    assert entry["ratio"]["0.5"] < 0.8 * entry["snr"]["0.5"] / (0.9 * math.sqrt(2 / 1.9)), (
        "the ratio is that of the step"
    )


@pytest.mark.parametrize(("options", "floor"), [({}, 100), ({"state_dtype": "bf16"}, 4), ({"state_dtype": "int8"}, 4)])
def test_noise_far_below_a_floor_is_called_hidden(options, floor):
    entry = last_entry(mvngrad.MVNGrad, small_gradient(1.0), eps_s=(1e-3 * floor) ** 2 * 0.01, **options)
    assert entry["noise_hidden"] > 0.5
    assert entry["snr"]["0.5"] < 1, "a lower bound"


def test_quantiles_of_a_mixture_show_each_part():
    part = torch.cat([torch.zeros(2000), torch.full((2000,), 8.0)])
    entry = last_entry(mvngrad.MVNGrad, lambda t: part + torch.randn(4000))
    assert entry["snr"]["0.25"] < 0.5
    assert entry["snr"]["0.75"] == pytest.approx(8, rel=0.1)
    assert entry["sign_collapse"] == pytest.approx(0.5, abs=0.02)


@each_cell
def test_a_constant_gradient_is_in_sign_collapse(make):
    entry = last_entry(make, lambda t: torch.linspace(1e-3, 1, 4000), steps=2000)
    assert entry["sign_collapse"] > 0.99
    if entry["cell"] in ("Adam", "LaProp"):
        assert entry["sign_collapse_is"] == "measured"
        assert entry["update"]["0.05"] == pytest.approx(1, abs=SATURATION)
    else:
        assert entry["sign_collapse_is"] == "implied"
        assert entry["update"]["0.5"] > 10  # the scale is kept


@each_cell
def test_noise_alone_is_not_in_sign_collapse(make):
    assert last_entry(make, noisy_gradient(0.0))["sign_collapse"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("make", [mvngrad.AdaBelief, mvngrad.MVNGrad])
def test_implied_sign_collapse_starts_where_measured_would(make):
    """It starts at |mu|/sigma = 3.04. m deviates by 0.23, so 0.3 away most coordinates are on one side."""
    below, above = (last_entry(make, noisy_gradient(rho))["sign_collapse"] for rho in (2.74, 3.34))
    assert below < 0.2
    assert above > 0.8


@each_cell
def test_update_equals_the_change_of_the_parameters(make):
    weight = torch.nn.Parameter(torch.zeros(501, dtype=torch.float64))
    optimizer, records = make([weight], lr=0.01, maximize=True), []
    with Monitor(optimizer, every=1, sink=records.append):
        for _ in range(5):
            before = weight.detach().clone()
            weight.grad = torch.randn_like(weight)
            optimizer.step()
            moved = ((weight.detach() - before).abs() / 0.01).sort().values
            for q, value in records[-1]["groups"][0]["update"].items():
                assert value == pytest.approx(moved[round(float(q) * 500)].item(), rel=1e-6)


def test_coordinates_at_the_epsilon_floor_and_dead_coordinates_are_counted():
    scale = torch.cat([torch.zeros(1000), torch.full((1000,), 1e-9), torch.ones(2000)])
    entry = last_entry(mvngrad.MVNGrad, lambda t: scale * torch.randn(4000), eps_s=1e-16)
    assert entry["dead"] == pytest.approx(0.25)
    assert entry["epsilon_floor"] == pytest.approx(1 / 3)
    assert entry["floor"] == pytest.approx(math.sqrt(1e-16 / 0.01))
    entry = last_entry(mvngrad.Adam, lambda t: scale * torch.randn(4000))
    assert entry["epsilon_floor"] == pytest.approx(1 / 3)
    assert entry["floor"] == 0


@pytest.mark.parametrize("options", [{"state_dtype": torch.bfloat16}, {"state_dtype": "int8"}, {"lean": True}], ids=str)
def test_smaller_state_is_read(options):
    entry = last_entry(mvngrad.MVNGrad, noisy_gradient(2.0), steps=400, **options)
    assert entry["snr"]["0.5"] == pytest.approx(2, rel=0.1)
    assert entry["m"] == ("rebuilt" if "lean" in options else "kept")


@pytest.mark.parametrize("shape", [(3000,), (4, 50, 30), (2, 8, 25, 15)])
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, "int8"])
def test_a_sample_equals_the_decoded_state(shape, state_dtype):
    values = torch.randn(shape)
    if len(shape) == 4:
        values = values.to(memory_format=torch.channels_last)
    param = torch.nn.Parameter(values)
    optimizer = mvngrad.MVNGrad([param], state_dtype=state_dtype)
    train(optimizer, 3)
    sample, state = Sample([param], 100, seed=0), optimizer.state[param]
    ((_, index, count),) = sample.pieces
    assert count == 100
    for name, whole in load_state(("m", "s", "u"), state, torch.float32).items():
        (row,) = sample.load_rows(optimizer, name)
        assert torch.equal(row.float(), whole.flatten()[index])


def test_a_large_group_is_sampled_uniformly_and_reproducibly():
    small, large = parameters((100,), (300, 300))
    one, two = (Sample([small, large], 1000, seed=3) for _ in range(2))
    assert sum(count for _, _, count in one.pieces) == 1000
    assert one.population == 90100
    (_, index, _) = one.pieces[-1]
    assert index.float().mean().item() == pytest.approx(45000, rel=0.06)
    assert torch.equal(index, two.pieces[-1][1])
    entry = last_entry(mvngrad.AdaBelief, noisy_gradient(1.0, 40000), steps=200, size=40000)
    assert (entry["sampled"], entry["coordinates"]) == (2**12, 40000)
    assert entry["snr"]["0.5"] == pytest.approx(1, rel=0.06)


def test_quantiles_are_those_of_sorted_values_with_nan_last():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 1001, dtype=torch.float64, generator=generator).abs()
    rows[1, ::3], rows[1, 1], rows[0, :30] = -math.nan, math.inf, 0.0
    expected = rows.sort(1).values[:, [50, 250, 500, 750, 950]]
    assert torch.equal(find_quantiles([*rows]).nan_to_num(-1), expected.nan_to_num(-1))


def test_a_group_without_gradients_has_no_quantiles():
    entry = last_entry(mvngrad.MVNGrad, lambda t: torch.zeros(40), steps=200, size=40)
    assert (entry["dead"], entry["layers"]) == (1, [])
    keys = ("ratio", "snr", "update", "sign_collapse", "epsilon_floor", "floor_divisor")
    assert [entry[key] for key in keys] == [None] * len(keys)


def test_a_copy_to_the_host_returns_the_values_of_each_list():
    lists = [[torch.ones(2), torch.zeros(1, dtype=torch.float64)], [], [torch.ones(0)], [torch.full((2, 2), 3.0)]]
    assert [row.tolist() for row in copy_to_host(lists)] == [[1, 1, 0], [], [], [3, 3, 3, 3]]
    assert copy_to_host([]) == []


# Spikes


@each_cell
def test_spikes_are_found_at_their_steps(make):
    weight = torch.nn.Parameter(torch.zeros(500))
    optimizer, records = make([weight], betas=(0.9, 0.999)), []
    with Monitor(optimizer, every=50, sink=records.append):
        for t in range(1, 451):
            weight.grad = torch.randn(500) * {130: 100, 131: 60, 205: 30, 300: 4}.get(t, 1)
            optimizer.step()
    spikes = {spike["step"]: spike for r in records for spike in r["groups"][0]["spikes"]}
    assert sorted(spikes) == [130, 205]  # 4 times the median is not a spike
    assert spikes[130]["multiple"] == pytest.approx(100, rel=0.1)
    assert (spikes[130]["steps"], spikes[205]["steps"]) == (2, 1)
    assert [spike["ended"] for spike in spikes.values()] == ["another spike", "recovered"]
    # |z| is at most sqrt((1-beta2^t)/(1-beta2)), 11 at step 130. A tenth of it enters momentum, which is usually 0.23,
    # and beta1 = 0.9 takes about ten steps to forget it.
    assert 3 < spikes[130]["update_during"] < 7
    assert spikes[130]["update_after"] < spikes[130]["update_during"]
    assert 5 < spikes[130]["recovery_steps"] < 20
    norms = records[2]["groups"][0]["gradient_norm"]
    assert norms["max"] == pytest.approx(100 * norms["median"], rel=0.1)


def test_a_gradient_that_is_not_finite_is_a_spike_without_size():
    weight = torch.nn.Parameter(torch.zeros(50))
    optimizer, records = mvngrad.AdaBelief([weight]), []
    with Monitor(optimizer, every=50, sink=records.append):
        for t in range(1, 51):
            weight.grad = torch.full((50,), math.inf) if t == 40 else torch.randn(50)
            optimizer.step()
    entry = records[0]["groups"][0]
    assert entry["gradients_not_finite"] == 1
    assert [(spike["step"], spike["multiple"]) for spike in entry["spikes"]] == [(40, None)]
    json.dumps(records, allow_nan=False)


# Sums that the kernel writes

CELLS = [*((make, {}) for make in PLAIN), (mvngrad.MVNGrad, {"lean": True})]


@each_device
@pytest.mark.parametrize("state_dtype", [None, *NARROW.values()], ids=str)
@pytest.mark.parametrize(("make", "options"), CELLS, ids=[*(make.__name__ for make in PLAIN), "lean"])
def test_sums_written_by_the_kernel_match_the_state_and_change_no_bit(make, options, state_dtype, device, by_kernel):
    options = {"lr": 0.01, "weight_decay": 0.1, "maximize": True, "state_dtype": state_dtype, **options}
    plain, followed, again = (make(parameters((1500,), (40, 3), (7,), (0,), device=device), **options) for _ in "123")
    followed.sum_readers = again.sum_readers = 1
    for optimizer in (plain, followed, again):
        train(optimizer, 2)
    assert equal(everything(plain), everything(followed))
    assert plain.get_sums(0) == []
    ((sums, row),) = followed.get_sums(0)
    assert (len(sums), row, sums.coordinates) == (2, 1, 1627)
    view, expected = view_group(followed, followed.param_groups[0]), torch.zeros(2, dtype=torch.float64)
    for p, state in followed.state.items():
        values = {k: load_state((k,), state, torch.float32)[k].double().cpu().reshape(-1) for k in view.names}
        averages = correct_bias(view.hyper, values, state["step"].double().cpu())
        changes = update_sizes(view.rule, view.hyper, averages)
        expected += torch.stack([p.grad.double().cpu().square().sum(), changes.square().sum()])
    torch.testing.assert_close(
        sums.get_totals()[row].cpu(), expected, rtol=1e-5 if state_dtype is None else 2e-2, atol=0
    )
    assert torch.equal(sums.get_totals(), again.get_sums(0)[0][0].get_totals())


@each_device
def test_spikes_found_by_sums_are_those_of_the_eager_path(device, by_kernel):
    records = {None: [], False: []}
    for fused, sink in records.items():
        params = parameters((20, 3), (40,), (1, 1), device=device)
        params.append(torch.nn.Parameter(torch.zeros(9, dtype=torch.bfloat16, device=device)))  # needs a second launch
        optimizer = mvngrad.AdaBelief(params, fused=fused)
        with Monitor(optimizer, every=70, sink=sink.append) as monitor:
            for t in range(1, 71):  # more steps than the sums of a launch have rows
                if t == 50:
                    optimizer.load_state_dict(optimizer.state_dict())  # its inputs are collected again
                for p in params:
                    g = torch.randn(p.shape, generator=torch.Generator().manual_seed(t)) * {30: 100, 66: 30}.get(t, 1)
                    p.grad = g.to(device, p.dtype)
                optimizer.step()
            assert not monitor._groups[0].noted
        assert optimizer.sum_readers == 0
        train(optimizer, 1)
        assert optimizer.get_sums(0) == []
    left, right = (entry for ((record),) in records.values() for entry in record["groups"])
    assert left["gradient_norm"] == pytest.approx(right["gradient_norm"], rel=1e-5)
    assert [spike["step"] for spike in left["spikes"]] == [30, 66]
    for a, b in zip(left["spikes"], right["spikes"], strict=True):
        assert a.pop("ended") == b.pop("ended")
        numbers = [{k: -1.0 if value is None else value for k, value in spike.items()} for spike in (a, b)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)


@each_device
def test_spikes_are_found_although_gradients_are_released(device, by_kernel):
    entries = []
    for releases in (False, True):
        params = parameters((20, 3), (40,), device=device)
        optimizer, records = mvngrad.MVNGrad(params), []
        if releases:
            mvngrad.release_gradients(optimizer, bucket_bytes=1)
        with Monitor(optimizer, every=40, sink=records.append):
            for t in range(1, 41):
                loss = sum((p * torch.full_like(p, 1 + t % 3)).sum() for p in params)
                (loss * (100 if t == 30 else 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        entries += records[0]["groups"]
    assert [spike["step"] for spike in entries[1]["spikes"]] == [30]
    assert entries[0] == entries[1]


@each_device
def test_a_step_that_overflow_skipped_leaves_an_infinite_norm(device, by_kernel):
    (x,) = parameters((50,), device=device)
    optimizer, records = mvngrad.MVNGrad([x]), []
    with Monitor(optimizer, every=50, sink=records.append):
        for t in range(1, 51):
            x.grad = 4 * torch.randn(50, device=device)
            optimizer.grad_scale, optimizer.found_inf = (torch.tensor(float(v), device=device) for v in (4, t == 40))
            optimizer.step()
    entry = records[0]["groups"][0]
    assert entry["gradients_not_finite"] == 1
    assert [(spike["step"], spike["multiple"]) for spike in entry["spikes"]] == [(40, None)]
    assert 5 < entry["gradient_norm"]["median"] < 9


# What is not changed


def rounds(optimizer, steps=60):
    train(optimizer, steps)
    return everything(optimizer)


@pytest.mark.parametrize("make", [*OPTIMIZERS, torch.optim.Adam, torch.optim.AdamW])
def test_a_monitored_run_is_bit_identical(make):
    plain, watched = (make(parameters((33, 7), (5,), (), (0,), (64, 3)), lr=0.1) for _ in range(2))
    state = torch.get_rng_state()
    with Monitor(watched, every=7, sink=lambda record: None):
        left, right = rounds(plain), rounds(watched)
    assert equal(left, right)
    assert torch.equal(torch.get_rng_state(), state)


def test_copies_and_checkpoints_do_not_contain_the_monitor():
    optimizer = mvngrad.MVNGrad(parameters((5, 3)))
    train(optimizer, 3)
    before, keys = pickle.dumps(optimizer), optimizer.state_dict()["param_groups"][0].keys()
    monitor = Monitor(optimizer, every=1, sink=(records := []).append)
    assert pickle.dumps(optimizer) == before
    assert optimizer.state_dict()["param_groups"][0].keys() == keys
    train(copy.deepcopy(optimizer), 3)
    train(pickle.loads(pickle.dumps(optimizer)), 3)
    assert records == []
    train(optimizer, 1)
    assert [record["step"] for record in records] == [4]  # continues the count in the state
    monitor.close()
    train(optimizer, 1)
    assert len(records) == 1
    assert not optimizer._optimizer_step_post_hooks


def test_close_works_inside_the_sink_next_to_other_hooks():
    """torch goes through the hooks of a step while the sink is called, and must not see one of them removed."""
    optimizer, records, other = mvngrad.MVNGrad(parameters((5, 3))), [], []

    def close_at_the_second(record):
        records.append(record["step"])
        if len(records) == 2:
            monitor.close()

    monitor = Monitor(optimizer, every=2, sink=close_at_the_second)
    optimizer.register_step_post_hook(lambda *_: other.append(1))
    train(optimizer, 8)
    assert records == [2, 4]
    assert len(other) == 8
    monitor.close()
    monitor.close()
    assert len(optimizer._optimizer_step_post_hooks) == 1
    with pytest.raises(RuntimeError, match="this Monitor is closed; make a new one"):
        monitor.record()


def test_log_keeps_nothing_after_close():
    monitor = Monitor(mvngrad.MVNGrad(parameters((5,))), sink=print)
    monitor.close()
    for _ in range(3):
        monitor.log(loss=1.0)
    assert not monitor._logged


def test_groups_closures_frozen_and_late_parameters():
    one, two, frozen, late = parameters((4000,), (30,), (9,), (7,))
    frozen.requires_grad_(False)
    groups = [{"params": [one, frozen]}, {"params": [two], "lr": torch.tensor(0.5), "betas": (0.5, 0.9)}]
    optimizer, records = mvngrad.MVNGrad(groups, lr=0.1), []

    def closure():
        optimizer.zero_grad()
        loss = sum((p.square() * torch.randn_like(p)).sum() for g in optimizer.param_groups for p in g["params"])
        loss.backward()
        return loss

    monitor = Monitor(optimizer, every=5, sink=records.append)
    for _ in range(5):
        optimizer.step(closure)
    optimizer.add_param_group({"params": [late]})
    frozen.requires_grad_(True)
    for _ in range(5):
        optimizer.step(closure)
    monitor.close()
    first, second = (record["groups"] for record in records)
    assert [(e["group"], e["coordinates"], e["lr"], e["beta1"]) for e in first] == [
        (0, 4000, 0.1, 0.9),
        (1, 30, 0.5, 0.5),
    ]
    assert [(e["group"], e["coordinates"], e["t"]) for e in second] == [(0, 4009, 10), (1, 30, 10), (2, 7, 5)]


@pytest.mark.parametrize("make", [mvngrad.MVNGrad, torch.optim.Adam])
def test_a_parameter_is_left_out_while_it_is_frozen(make):
    frozen, other, alone = parameters((4000,), (30,), (50,))
    optimizer, records = make([{"params": [frozen, other]}, {"params": [alone]}]), []
    with Monitor(optimizer, every=10, sink=records.append):
        for thaw in (True, False, True):
            frozen.requires_grad_(thaw)
            alone.requires_grad_(thaw)
            for _ in range(10):
                optimizer.zero_grad()
                for param in filter(lambda param: param.requires_grad, (frozen, other, alone)):
                    param.grad = torch.randn(param.shape)
                optimizer.step()
    first, second, third = ([(e["group"], e["coordinates"], e["t"]) for e in record["groups"]] for record in records)
    assert first == [(0, 4030, 10), (1, 50, 10)]
    assert second == [(0, 30, 20)]
    assert third == [(0, 4030, 20), (1, 50, 20)]


def test_follow_false_records_no_norms_and_no_spikes():
    optimizer, records = torch.optim.AdamW(parameters((5,)), amsgrad=True), []
    with Monitor(optimizer, every=10, sink=records.append, follow=False) as monitor:
        train(optimizer, 10)
        monitor.record()
    assert [record["step"] for record in records] == [10, 10]
    assert records[0]["groups"][0]["gradient_norm"] is None
    assert records[0]["groups"][0]["spikes"] == []


def test_record_counts_steps_that_called_no_hook():
    optimizer, records = mvngrad.MVNGrad(parameters((5,))), []
    with Monitor(optimizer, every=10, sink=records.append) as monitor:
        hooks = dict(optimizer._optimizer_step_post_hooks)
        optimizer._optimizer_step_post_hooks.clear()  # as in a replayed graph
        train(optimizer, 7)
        monitor.record()
        optimizer._optimizer_step_post_hooks.update(hooks)
        train(optimizer, 3)
    assert [record["step"] for record in records] == [7, 10]


def test_no_record_without_a_step_or_a_coordinate():
    optimizer, records = mvngrad.MVNGrad(parameters((0,))), []
    with Monitor(optimizer, every=1, sink=records.append):
        train(optimizer, 2)
    assert records == []
    monitor = Monitor(mvngrad.MVNGrad(parameters((5,))), sink=(records := []).append)
    assert monitor.record() is None
    assert records == []


def test_invalid_arguments_are_rejected():
    optimizer = mvngrad.MVNGrad(parameters((5,)))
    with pytest.raises(ValueError, match="every=0 is invalid"):
        Monitor(optimizer, every=0)
    with pytest.raises(ValueError, match=r"every=2\.5 is invalid; it must be an integer"):
        Monitor(optimizer, every=2.5)
    with pytest.raises(TypeError, match="sink=3 is invalid"):
        Monitor(optimizer, sink=3)
    with pytest.raises(TypeError, match="SGD is not an optimizer of mvngrad"):
        Monitor(torch.optim.SGD(parameters((5,))))
    assert not optimizer._optimizer_step_post_hooks


def test_gradient_norms_are_divided_by_the_grad_scale_of_amp():
    weight = torch.nn.Parameter(torch.zeros(50))
    optimizer, records = mvngrad.MVNGrad([weight]), []
    with Monitor(optimizer, every=40, sink=records.append):
        for t in range(40):
            scale = 2.0**20 if t > 30 else 1.0
            weight.grad = torch.randn(50) * scale
            optimizer.grad_scale = torch.tensor(scale)  # as GradScaler sets it during a step
            optimizer.step()
    assert records[0]["groups"][0]["spikes"] == []


def test_norms_after_the_fused_step_of_torch_are_those_of_the_unscaled_gradients():
    weights = [torch.nn.Parameter(torch.zeros(50)) for _ in range(2)]
    optimizer, records = torch.optim.Adam([{"params": [weight]} for weight in weights], fused=True), []
    with Monitor(optimizer, every=100, sink=records.append):
        for t in range(1, 101):
            scale, skips = torch.tensor(2.0**14), torch.tensor(float(t == 60))
            for weight in weights:
                weight.grad = scale * torch.randn(50)
            if skips:
                weights[0].grad[0] = math.inf
            optimizer.grad_scale, optimizer.found_inf = scale, skips  # as GradScaler sets them during a step
            optimizer.step()
    skipped, finite = records[0]["groups"]
    assert skipped["gradients_not_finite"] == 1
    assert finite["spikes"] == []
    assert all(5 < group["gradient_norm"][key] < 11 for group in (skipped, finite) for key in ("median", "max"))


def test_parameters_of_several_dtypes_in_one_group():
    shapes = {torch.float64: (7,), torch.bfloat16: (40, 3), torch.complex64: (5, 2)}
    params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for dtype, shape in shapes.items()]
    optimizer, records = torch.optim.Adam([*params, *parameters((0,), ())]), []
    with Monitor(optimizer, every=30, sink=records.append):
        train(optimizer, 30)
    (entry,) = records[0]["groups"]
    assert entry["coordinates"] == 7 + 120 + 20 + 1
    assert entry["gradient_norm"]["median"] == pytest.approx(math.sqrt(7 + 120 + 10 + 1), rel=0.2)


# Sinks


def test_records_survive_kill_9(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    code = """
        import sys, torch
        from mvngrad import MVNGrad
        from mvngrad.diagnostics import Monitor
        weight = torch.nn.Parameter(torch.zeros(50))
        optimizer = MVNGrad([weight])
        monitor = Monitor(optimizer, every=5, sink=sys.argv[1])
        for t in range(1, 10**9):
            weight.grad = torch.randn(50)
            optimizer.step()
            if t == 27:
                print("there", flush=True)
                sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "there\n"
        os.kill(process.pid, signal.SIGKILL)
    assert [record["step"] for record in read_records(path)] == [5, 10, 15, 20, 25]
    # An incomplete line, as a crash leaves it, is left out with a warning, and the next record starts a new line.
    path.write_text(path.read_text()[:-30])
    optimizer = mvngrad.MVNGrad(parameters((50,)))
    train(optimizer, 18)  # resumes from a checkpoint before the last record
    with Monitor(optimizer, every=1, sink=path):
        train(optimizer, 3)
    with pytest.warns(UserWarning, match=r"records\.jsonl has lines that are incomplete or damaged.*: 5$"):
        records = read_records(path)
    assert [record["step"] for record in records] == [5, 10, 15, 19, 20, 21]


def test_a_file_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    optimizer = mvngrad.MVNGrad(parameters((5,)))
    for path in (tmp_path / "file" / "records.jsonl", "/proc/nope/records.jsonl", "/proc/records.jsonl"):
        with pytest.raises(OSError, match=r"sink='.*records.jsonl' cannot be written: .*; name a file in a folder"):
            Monitor(optimizer, sink=path)
    assert not optimizer._optimizer_step_post_hooks
    assert optimizer.sum_readers == 0


def test_a_file_is_neither_made_nor_changed_before_the_first_record(tmp_path):
    optimizer, path = mvngrad.MVNGrad(parameters((5,))), tmp_path / "deep" / "records.jsonl"
    Monitor(optimizer, sink=path).close()
    assert list(path.parent.iterdir()) == []
    with Monitor(optimizer, every=1, sink=path):
        train(optimizer, 1)
    before = path.read_bytes()
    Monitor(optimizer, sink=path).close()
    assert path.read_bytes() == before


def test_a_second_run_into_one_file_is_a_new_section(tmp_path):
    path = tmp_path / "records.jsonl"
    for every, steps in ((1, 3), (2, 5)):
        optimizer = mvngrad.MVNGrad(parameters((5,)))
        with Monitor(optimizer, every=every, sink=path):
            train(optimizer, 1)
            with pytest.warns(UserWarning, match="has records of an earlier run") if every == 2 else nullcontext():
                train(optimizer, steps - 1)
    assert [record["step"] for record in read_records(path)] == [2, 4]
    assert len(path.read_text().splitlines()) == 3 + 1 + 2


def test_tensorboard_gets_scalars_or_names_the_missing_package(tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, step))

        def flush(self):
            pass

        def close(self):
            written.append("closed")

    fake = type(sys)("torch.utils.tensorboard")
    fake.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    optimizer = mvngrad.MVNGrad(parameters((5,)))
    with Monitor(optimizer, every=2, sink=TensorBoard(tmp_path)):
        train(optimizer, 2)
    assert written[0] == (str(tmp_path), 2)
    assert ("mvngrad/group0/snr/0.5", 2) in written
    assert ("mvngrad/group0/spikes", 2) in written
    assert written[-1] == "closed"
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        TensorBoard(tmp_path)


def test_scalars_omit_none():
    entry = last_entry(mvngrad.LaProp, noisy_gradient(1.0), steps=200)
    names = named_scalars({"groups": [entry]})
    assert "mvngrad/group0/update/0.5" in names
    assert not any("/snr/" in name for name in names)


# On a GPU


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("path", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("make", WATCHED)
def test_only_a_recorded_step_waits_for_the_device(make, path):
    capturable = {} if path else {"capturable": True}
    optimizer, records = make(parameters((300, 70), (40000,), device="cuda"), **path, **capturable), []
    grads = [torch.randn_like(p) for p in optimizer.param_groups[0]["params"]]

    def step():
        for p, g in zip(optimizer.param_groups[0]["params"], grads, strict=True):
            p.grad = g
        optimizer.step()

    with Monitor(optimizer, every=10, sink=records.append):
        for _ in range(10):
            step()
        try:
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(9):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        step()
    assert [record["step"] for record in records] == [10, 20]


@pytest.mark.gpu
@pytest.mark.parametrize("make", WATCHED)
def test_nothing_happens_while_a_graph_is_captured(make):
    params = parameters((300, 70), device="cuda")
    optimizer, records = make(params, capturable=True, lr=torch.tensor(1e-3, device="cuda")), []
    for p in params:
        p.grad = torch.randn_like(p)
    stream = torch.cuda.Stream()
    with Monitor(optimizer, every=1, sink=records.append) as monitor:
        with torch.cuda.stream(stream):
            optimizer.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        for _ in range(5):
            graph.replay()
        assert len(records) == 1
        assert monitor.record()["groups"][0]["t"] == 6
    assert records[-1]["groups"][0]["lr"] == pytest.approx(1e-3)
    assert records[-1]["step"] == 6


def test_loading_less_state_and_removing_a_group_are_handled():
    first, second = parameters((10,), (10,))
    optimizer, records = mvngrad.MVNGrad([{"params": [first, second]}, {"params": parameters((3,))}]), []
    fresh = copy.deepcopy(optimizer.state_dict())
    with Monitor(optimizer, every=2, sink=records.append):
        train(optimizer, 3)
        optimizer.load_state_dict(fresh)
        del optimizer.param_groups[1]
        first.grad, second.grad = torch.ones(10), None
        optimizer.step()
        assert second not in optimizer.state
    assert [len(record["groups"]) for record in records] == [2, 1]


def test_the_default_device_of_torch_does_not_matter():
    weights, records = parameters((50, 50), (60, 60)), []
    optimizer = mvngrad.MVNGrad(weights)
    with Monitor(optimizer, every=2, sample=100, sink=records.append):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        for _ in range(4):
            with torch.device("meta"):
                optimizer.step()
    assert [record["groups"][0]["coordinates"] for record in records] == [6100, 6100]


@pytest.mark.parametrize("options", [{"beta_mean": 0.999}, {"lean": True, "eps": 1.0}], ids=["beta_mean", "lean"])
def test_the_ratio_uses_the_bias_corrections_of_each_average(options):
    (weight,) = parameters((501,))
    optimizer, records = mvngrad.MVNGrad([weight], betas=(0.9, 0.99), **options), []
    with Monitor(optimizer, every=10, sink=records.append):
        train(optimizer, 10)
    state = {name: value.double() for name, value in optimizer.state[weight].items()}
    root = (state["s"] / (1 - 0.99**10)).sqrt()
    mean = state["m"] / (1 - 0.999**10) if "m" in state else state["u"] / (1 - 0.9**10) * (root + 1.0)
    expected = (mean.abs() / root).median().item()
    assert records[0]["groups"][0]["ratio"]["0.5"] == pytest.approx(expected, rel=1e-5)


# Sharded parameters


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/alone", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, "int8"])
@pytest.mark.parametrize("make", [mvngrad.AdaBelief, mvngrad.MVNGrad])
def test_a_sharded_parameter_on_one_rank_is_measured_like_a_plain_one(mesh, make, state_dtype):
    (start,), grads = tensors((40, 30)), tensors(*[(40, 30)] * 30, seed=1)

    def run(place):
        weight = torch.nn.Parameter(place(start.clone()))
        optimizer, records = make([weight], state_dtype=state_dtype, rounding_seed=0), []
        with Monitor(optimizer, every=10, sink=records.append, sample=500) as monitor:
            for g in grads:
                weight.grad = place(g)
                optimizer.step()
        assert {record.pop("monitor") for record in records} == {monitor.id}
        return records, variance_gap(optimizer, lambda g: [place(g)], grads[:5])

    sharded = run(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))
    assert sharded == run(lambda tensor: tensor)


def test_layers_have_values_of_their_own_under_their_names():
    """The gradients of the second layer are at the floor of epsilon, those of the first are not."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 20), torch.nn.Linear(20, 10, bias=False))
    optimizer, records = mvngrad.MVNGrad(model.named_parameters(), eps_s=1e-8), []
    with Monitor(optimizer, every=100, sink=records.append) as monitor:
        for t in range(100):
            for param, size in zip(model.parameters(), (1.0, 1.0, 1e-6), strict=True):
                param.grad = size * torch.randn_like(param)
            monitor.log(loss=torch.tensor(float(t)), accuracy=0.5)
            optimizer.step()
    layers = {layer["name"]: layer for layer in records[0]["groups"][0]["layers"]}
    assert {name: layer["sampled"] for name, layer in layers.items()} == {
        "0.weight": 800,
        "0.bias": 20,
        "1.weight": 200,
    }
    assert [layer["epsilon_floor"] for layer in layers.values()] == [0, 0, 1]
    assert layers["0.weight"]["snr"] > 10 * layers["1.weight"]["snr"] > 0
    assert records[0]["logged"] == {"loss": 49.5, "accuracy": 0.5}
    assert named_scalars(records[0])["mvngrad/loss"] == 49.5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logged_value_that_is_not_finite_is_counted_and_not_averaged(bad, tmp_path):
    optimizer, path = mvngrad.MVNGrad(parameters((5,))), tmp_path / "records.jsonl"
    with Monitor(optimizer, every=4, sink=path) as monitor:
        for t in range(1, 13):
            monitor.log(loss=bad if t in (6, 7) or t > 8 else float(t), accuracy=torch.tensor(0.5))
            train(optimizer, 1)
    records = read_records(path)
    assert [record["logged"] for record in records] == [
        {"loss": 2.5, "accuracy": 0.5}, {"loss": 6.5, "accuracy": 0.5}, {"loss": None, "accuracy": 0.5},
    ]  # fmt: skip
    assert [record.get("logged_not_finite") for record in records] == [None, {"loss": 2}, {"loss": 4}]
    lead = str(diagnose(records)).splitlines()[0]
    assert lead == "Steps 4 to 12. Values of loss that were not finite: 6, the first by step 8."


def test_a_logged_tensor_may_be_overwritten():
    optimizer, records, loss = mvngrad.MVNGrad(parameters((5,))), [], torch.zeros(())
    with Monitor(optimizer, every=4, sink=records.append) as monitor:
        for t in range(1, 5):
            monitor.log(loss=loss.fill_(t))
            train(optimizer, 1)
    assert records[0]["logged"] == {"loss": 2.5}


def test_layers_without_names_are_numbered():
    model = torch.nn.Linear(40, 20)
    optimizer, records = mvngrad.LaProp(model.parameters()), []
    with Monitor(optimizer, every=1, sink=records.append):
        model(torch.randn(4, 40)).sum().backward()
        optimizer.step()
    assert [layer["name"] for layer in records[0]["groups"][0]["layers"]] == ["0: 20x40", "1: 20"]
    assert {layer["snr"] for layer in records[0]["groups"][0]["layers"]} == {None}


def test_wrong_arguments_are_named(tmp_path):
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = mvngrad.MVNGrad([weight])
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        Monitor(optimizer, sink=tmp_path)
    with pytest.raises(TypeError, match="a Linear is not an optimizer"):
        Monitor(torch.nn.Linear(2, 1), sink=print)
    monitor = Monitor(optimizer, sink=print)
    for value in (torch.ones(2), torch.tensor(1j), "0.3", None):
        with pytest.raises(ValueError, match=r"Monitor.log: loss must be one real number, not"):
            monitor.log(loss=value)


def test_gradients_that_are_conjugate_views_are_read():
    """Autograd makes them, and optimizers step by them."""
    weight = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
    optimizer, records = mvngrad.MVNGrad([weight]), []
    with Monitor(optimizer, every=1, sink=records.append):
        torch.view_as_real(weight.conj().resolve_conj()).sum().backward()
        assert weight.grad.is_conj()
        norm = weight.grad.norm().item()
        optimizer.step()
    assert records[0]["groups"][0]["gradient_norm"]["max"] == pytest.approx(norm)


def test_norms_of_half_and_double_gradients_in_one_group():
    """Also if the double parameter gets its first gradient later; the norm of the other overflows in float16."""
    half, double = torch.nn.Parameter(torch.zeros(4).half()), torch.nn.Parameter(torch.zeros(3).double())
    optimizer, records = mvngrad.Adam([half, double]), []
    with Monitor(optimizer, every=1, sink=records.append):
        for step in range(2):
            half.grad = torch.full_like(half, 6e4)
            double.grad = torch.ones_like(double) if step else None
            optimizer.step()
    norms = [record["groups"][0]["gradient_norm"]["max"] for record in records]
    assert norms == pytest.approx([1.2e5, (1.44e10 + 3) ** 0.5], rel=1e-3)
