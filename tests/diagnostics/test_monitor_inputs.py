"""What users give a Monitor: state before the first step, numbers that are not Python's, groups changed by hand."""

import json
import math

import numpy as np
import pytest
import torch
from family import parameters, train

import mvngrad
from mvngrad.diagnostics import Monitor, diagnose, read_records, variance_gap


def test_state_of_step_0_is_left_out(tmp_path):
    """init_state and checkpoints create it; a parameter that is not used keeps it."""
    used, unused = (torch.nn.Parameter(torch.zeros(100)) for _ in range(2))
    optimizer = mvngrad.MVNGrad([{"params": [used, unused]}, {"params": [torch.nn.Parameter(torch.zeros(10))]}])
    optimizer.init_state()
    path = tmp_path / "monitor.jsonl"
    with Monitor(optimizer, every=1, sink=path) as monitor:
        monitor.record()  # before any step
        for _ in range(4):
            used.grad = torch.randn(100)
            optimizer.step()
    records = read_records(path)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        (group,) = record["groups"]
        assert group["t"] == record["step"]
        assert group["dead"] == 0.5
        assert math.isfinite(group["update"]["0.5"])
    assert diagnose(path).groups


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (mvngrad.MVNGrad, {"betas": (np.float32(0.9), 0.999), "eps": np.float32(1e-8)}),
        (torch.optim.Adam, {"lr": torch.tensor(1e-3), "betas": (torch.tensor(0.9), torch.tensor(0.999))}),
    ],
    ids=["numpy", "tensors"],
)
def test_hyper_parameters_may_be_numbers_of_numpy_and_torch(tmp_path, make, options):
    param = torch.nn.Parameter(torch.ones(30))
    if make is torch.optim.Adam:
        options = {**options, "capturable": False, "foreach": False}
    optimizer = make([param], **options)
    with Monitor(optimizer, every=1, sink=tmp_path / "monitor.jsonl"):
        param.grad = torch.ones(30)
        optimizer.step()
    (record,) = read_records(tmp_path / "monitor.jsonl")
    assert record["groups"][0]["beta1"] == pytest.approx(0.9)


def test_names_that_no_longer_match_the_parameters_are_not_used():
    model = torch.nn.Linear(30, 30)
    optimizer, records = mvngrad.MVNGrad(model.named_parameters()), []
    model.bias.requires_grad_(False)
    group = optimizer.param_groups[0]
    group["params"] = [param for param in group["params"] if param.requires_grad]
    with Monitor(optimizer, every=1, sink=records.append):
        model(torch.ones(30)).sum().backward()
        optimizer.step()
    assert [layer["name"] for layer in records[0]["groups"][0]["layers"]] == ["0: 30x30"]
    gap = variance_gap(optimizer, lambda batch: model(batch).square().mean(), torch.randn(4, 8, 30), K=4, model=model)
    assert gap.coordinates == 900


@pytest.mark.parametrize("make", [mvngrad.MVNGrad, torch.optim.AdamW])
def test_steps_are_counted_from_a_checkpoint_loaded_after_the_monitor_is_made(make):
    def take_steps(optimizer, first, last):
        for t in range(first, last + 1):
            optimizer.param_groups[0]["params"][0].grad = torch.randn(100) * (100 if t == 560 else 1)
            optimizer.step()

    trained, resumed = (make([torch.nn.Parameter(torch.zeros(100))]) for _ in range(2))
    take_steps(trained, 1, 500)
    with Monitor(resumed, every=100, sink=(records := []).append):
        resumed.load_state_dict(trained.state_dict())
        take_steps(resumed, 501, 600)
    assert [(record["start"], record["step"]) for record in records] == [(500, 600)]
    assert records[0]["groups"][0]["spikes"][0]["step"] == 560
    assert not resumed._optimizer_load_state_dict_post_hooks


def test_a_group_of_which_some_gradients_are_released_has_no_norm():
    early, late, other = (torch.nn.Parameter(torch.ones(10)) for _ in range(3))
    optimizer = mvngrad.MVNGrad([{"params": [early, late]}], fused=False)
    late.requires_grad_(False)
    mvngrad.release_gradients(optimizer)
    late.requires_grad_(True)
    optimizer.add_param_group({"params": [other]})
    with Monitor(optimizer, every=2, sink=(records := []).append):
        for _ in range(2):
            (3 * (early + late + other)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    partly, not_released = records[0]["groups"]
    assert partly["t"] == not_released["t"] == 2
    assert partly["gradient_norm"] is None
    assert not_released["gradient_norm"]["max"] == pytest.approx(3 * math.sqrt(10))


@pytest.mark.parametrize("wrong", [{"spike": None}, {"spike": "5"}, {"recovered": 0}, {"spike": math.inf}])
def test_bounds_of_spikes_are_checked_when_a_monitor_is_made(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"Monitor: {name}={value!r} is invalid; it must be a finite number above 0"):
        Monitor(mvngrad.MVNGrad([torch.nn.Parameter(torch.ones(3))]), sink=print, **wrong)


@pytest.mark.parametrize("size", [100, 6000, 9000], ids=["smaller", "a little larger", "larger"])
def test_a_resized_parameter_gets_a_new_sample(size):
    """As a vocabulary that is cut or grown: its state is removed, and a sample of the old one would be out of range."""
    param, records = torch.nn.Parameter(torch.randn(5000)), []
    optimizer = mvngrad.MVNGrad([param])
    with Monitor(optimizer, every=2, sink=records.append):
        for count in (5000, size):
            param.grad = None
            param.data = torch.randn(count)
            optimizer.state.clear()
            for _ in range(3):
                param.grad = torch.randn(count)
                optimizer.step()
    assert [record["groups"][0]["coordinates"] for record in records] == [5000, size, size]


@pytest.mark.parametrize("name", ["update", "snr"])
def test_the_values_of_layers_are_checked(tmp_path, name):
    path, optimizer = tmp_path / "monitor.jsonl", mvngrad.MVNGrad(parameters((30,)))
    with Monitor(optimizer, every=1, sink=path):
        train(optimizer, 1)
    record = json.loads(path.read_text())
    del record["crc32"]
    record["groups"][0]["layers"][0][name] = "x"
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"because of groups\[0\]\.layers\[0\]\.{name};"):
        read_records(path)
