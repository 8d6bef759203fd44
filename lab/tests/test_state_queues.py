"""The queues of the state_precision experiment: what they train, where peers come from, and what decides."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from texts import write_text
from torch import nn

from mvngrad_lab.experiments.floor import arms as floor
from mvngrad_lab.experiments.floor.records import read_accuracies
from mvngrad_lab.experiments.state_precision import arms, records, run
from mvngrad_lab.experiments.state_precision.arms import ADAMW_ARMS, IMAGE_ARMS, INT8, OURS, PEERS, TORCH
from mvngrad_lab.report import Sources, TableResult
from mvngrad_lab.report.page import draw
from mvngrad_lab.report.verdicts import NOT_REPRODUCED, NOT_RUN, REPRODUCED, UNDECIDED, find_judges
from mvngrad_lab.tasks.cifar100 import task as cifar100
from mvngrad_lab.tasks.language.data.prepare import prepare_folder_tokens
from mvngrad_lab.training import step

RESULTS = Path(__file__).parents[2] / "results"
JUDGES = find_judges()
PEER = """
import torch

class AdamW8bit(torch.optim.AdamW):
    pass
"""


# What is trained


def test_images_are_trained_as_the_grid_selected_with_other_seeds():
    selected = floor.select_arms(read_accuracies(RESULTS))["mvngrad-floor"]
    recipes = arms.make_queue("images")
    assert {dataclasses.replace(r, seed=0, state_dtype="float32", lean=False) for r in recipes.values()} == {selected}
    assert len({recipe.key for recipe in recipes.values()}) == 12 * 4
    assert [seed for _, seed in recipes] == sorted(seed for _, seed in recipes), "a cut leaves whole seeds"
    assert selected.seed not in {seed for _, seed in recipes}


def test_arms_of_adamw_differ_in_the_optimizer_alone():
    recipes = arms.make_queue("adamw")
    assert len({recipe.key for recipe in recipes.values()}) == 3 * 5
    same = {dataclasses.replace(r, seed=0, optimizer="adamw", state_dtype="float32") for r in recipes.values()}
    assert len(same) == 1


# Small runs


@pytest.fixture(autouse=True)
def _clear():
    yield
    cifar100._load.cache_clear()
    step.clear_cache()


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """bitsandbytes as a folder on the path: in its place, a package whose AdamW8bit is torch's AdamW."""
    folder = tmp_path / "wheels" / "bitsandbytes"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("__version__ = '1.2.3'\n")
    (folder / "optim.py").write_text(PEER)
    monkeypatch.syspath_prepend(folder.parent)
    yield folder
    for name in ("bitsandbytes", "bitsandbytes.optim"):
        sys.modules.pop(name, None)


def use_small_queue(monkeypatch, name, recipes):
    monkeypatch.setattr(arms, "make_queue", lambda asked: recipes if asked == name else {})


def run_queue(monkeypatch, name, root, *options):
    arguments = ["run", name, "--runs", str(root), "--results", str(root / "results"), "--device", "cpu", *options]
    monkeypatch.setattr(sys, "argv", arguments)
    run.main()


def collect(*folders):
    (table,) = records.collect(Sources(folders, {}, warn=pytest.fail))
    return table


def test_image_queue_is_trained_exported_and_collected(tmp_path, monkeypatch, no_data, capsys):
    def load(folder):
        torch.manual_seed(0)
        images, labels = torch.randint(0, 255, (50, 3, 32, 32), dtype=torch.uint8), torch.arange(50) % 4
        return cifar100.data.Cifar100(images[:40], labels[:40], images[40:], labels[40:], source="random")

    def network(classes):
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))

    monkeypatch.setattr(cifar100.data, "load", load)
    monkeypatch.setattr(cifar100, "resnet18", network)
    cifar100._load.cache_clear()
    small = {"batch_size": 10, "epochs": 3, "eval_every": 3, "precision": "float32", "randaugment_operations": 0}
    recipes = {(arm, 1): dataclasses.replace(arms.image_recipe(arm, 1), **small) for arm in IMAGE_ARMS}
    use_small_queue(monkeypatch, "images", recipes)
    run_queue(monkeypatch, "images", tmp_path, "--run-seconds", "0")
    assert capsys.readouterr().out.endswith("0 runs of images are left\n")
    results = {key: one["result"] for key, one in records.read_runs(tmp_path).items()}
    states = {arm: results[recipe.key]["state_bytes"] for (arm, _), recipe in recipes.items()}
    assert states["int8"] < states["bf16"] < states["lean"] < states["float32"]
    assert len({results[recipe.key]["weights"] for recipe in recipes.values()}) == 4, "every arm trains its own way"

    run_queue(monkeypatch, "export", tmp_path)
    stored, exported = collect(tmp_path), collect(tmp_path / "results")
    assert stored.result == exported.result
    assert exported.result["arms"].keys() == IMAGE_ARMS.keys()
    assert all(list(row) == ["1"] for row in exported.result["arms"].values())
    assert JUDGES["images-int8"](exported.result).status == NOT_RUN
    (figure,) = draw(exported)
    assert [row[:2] for row in figure.table.rows] == [(arm, "1") for arm in IMAGE_ARMS]
    run_queue(monkeypatch, "images", tmp_path, "--run-seconds", "0")
    assert "finished" not in capsys.readouterr().out, "nothing is trained twice"


@pytest.mark.slow
def test_adamw_queue_trains_peers_from_a_folder_on_the_path(tmp_path, monkeypatch, no_data, letters, peer, capsys):
    write_text(tmp_path / "words" / "a.txt", *(f"{n} words and {n * n} more" * 20 for n in range(60)))
    write_text(tmp_path / "words" / "validation.txt", "some words and more " * 10)
    name, _ = prepare_folder_tokens(tmp_path / "words", tmp_path / "data", workers=1)
    small = {
        "text": name, "model": "tiny", "batch_size": 2, "micro_batch_size": 2, "steps": 6, "epoch_steps": 3,
        "warmup_steps": 2, "eval_windows": 2, "precision": "float32",
    }  # fmt: skip
    installed = [arm for arm in ADAMW_ARMS if "torchao" not in arm]

    def make_queue(asked):
        if asked == "images":
            return {}
        return {(arm, 1): dataclasses.replace(arms.adamw_recipe(arm, 1), **small) for arm in installed}

    monkeypatch.setattr(arms, "make_queue", make_queue)
    monkeypatch.setattr(arms, "PEERS", {"bitsandbytes": PEERS["bitsandbytes"]})
    run_queue(monkeypatch, "adamw", tmp_path, "--data", str(tmp_path / "data"), "--run-seconds", "0")
    assert capsys.readouterr().out.endswith("0 runs of adamw are left\n")
    run_queue(monkeypatch, "export", tmp_path)
    rows = json.loads((tmp_path / "results" / "state-precision-adamw.json").read_text())["runs"]
    assert [row.get("bitsandbytes") for row in rows] == [None, None, None, "1.2.3"]
    assert "@" in rows[-1]["settings"]["optimizer"], "the code of the peer is a part of the run"

    for module in ("bitsandbytes", "bitsandbytes.optim"):
        del sys.modules[module]  # as where the report is made
    values = collect(tmp_path / "results").result["arms"]
    losses = {arm: values[arm]["1"] for arm in installed}
    assert losses[OURS] == pytest.approx(losses[TORCH], rel=1e-5)
    assert losses["bitsandbytes, 8 bits"] == pytest.approx(losses[TORCH], rel=1e-5)
    assert losses[INT8] == pytest.approx(losses[TORCH], rel=0.05)
    assert losses[INT8] != losses[OURS]


def test_a_peer_that_cannot_be_imported_is_left_out(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(arms, "PEERS", {"bitsandbytes": PEERS["bitsandbytes"]})
    trainable = run.find_trainable("adamw")
    assert len(trainable) == 3 * 4
    assert "bitsandbytes" in capsys.readouterr().out
    assert not any("bitsandbytes" in recipe.optimizer for recipe in trainable)


def test_torchao_steps_at_the_rates_of_the_schedule():
    """torchao keeps its rate in a tensor, which the loop replaces by another."""
    adamw = pytest.importorskip("torchao.optim").AdamW8bit
    weight = nn.Parameter(torch.ones(64, 64))
    optimizer = adamw([weight], lr=0.1, weight_decay=0.0)
    peak = optimizer.param_groups[0]["lr"]
    with torch.compiler.set_stance("force_eager"):
        for share in (1.0, 0.0, 0.5):
            before = weight.detach().clone()
            weight.grad = torch.ones_like(weight)
            optimizer.param_groups[0]["lr"] = peak * share
            optimizer.step()
            assert (before - weight).mean().item() == pytest.approx(0.1 * share, rel=0.05, abs=1e-7)


# What decides


def make_result(name, count, spread, **lost):
    """Values of each arm: the first minus or plus what it loses, apart by the spread, and a shift of each seed."""
    names, base, sign = (IMAGE_ARMS, 74.0, -1) if name == "images" else (ADAMW_ARMS, 4.0, 1)
    noise = [((seed * 37 + place * 61) % 11 - 5) / 5 for place in range(len(names)) for seed in range(count)]
    values = {
        arm: {
            str(seed): base + sign * lost.get(arm, 0.0) + spread * noise[place * count + seed] + 0.3 * (seed % 3)
            for seed in range(count)
        }
        for place, arm in enumerate(names)
    }
    return {"arms": values, "done": 1, "of": 1, "data": ""}


@pytest.mark.parametrize(
    ("lost", "spread", "status"),
    [
        ({}, 0.1, REPRODUCED),
        ({"int8": -1.0}, 0.1, REPRODUCED),
        ({"int8": 0.15}, 0.1, REPRODUCED),
        ({"int8": 0.9}, 0.1, NOT_REPRODUCED),
        ({"int8": 0.3}, 0.1, UNDECIDED),
        ({}, 2.0, UNDECIDED),
        ({"bf16": 2.0}, 0.1, REPRODUCED),  # of another arm
    ],
)
def test_a_format_is_judged_by_the_loss_against_float32(lost, spread, status):
    verdict = JUDGES["images-int8"](make_result("images", 12, spread, **lost))
    assert verdict.status == status
    assert verdict.strip.rows[0].label == "int8 against float32"
    assert verdict.strip.rows[0].value == pytest.approx(lost.get("int8", 0.0), abs=spread)


@pytest.mark.parametrize(
    ("lost", "int8", "peers"),
    [
        ({}, REPRODUCED, REPRODUCED),
        ({INT8: 0.08}, NOT_REPRODUCED, NOT_REPRODUCED),
        ({INT8: 0.08, "torchao, 8 bits": 0.08, "bitsandbytes, 8 bits": 0.08}, NOT_REPRODUCED, REPRODUCED),
        ({INT8: 0.08, "torchao, 8 bits": 0.08}, NOT_REPRODUCED, NOT_REPRODUCED),
        ({"torchao, 8 bits": 1.0, "bitsandbytes, 8 bits": 1.0}, REPRODUCED, REPRODUCED),
    ],
)
def test_8_bits_of_adamw_are_judged_against_float32_and_against_each_peer(lost, int8, peers):
    result = make_result("adamw", 3, 0.002, **lost)
    assert (JUDGES["adamw-int8"](result).status, JUDGES["adamw-int8-peers"](result).status) == (int8, peers)


def test_missing_and_diverged_runs_are_named():
    result = make_result("adamw", 3, 0.002)
    result["arms"]["torchao, 8 bits"].clear()
    assert JUDGES["adamw-int8"](result).status == REPRODUCED
    verdict = JUDGES["adamw-int8-peers"](result)
    assert (verdict.status, verdict.note) == (NOT_RUN, "Seeds done, of 3: torchao, 8 bits 0.")
    result["arms"][INT8]["1"] = None
    verdict = JUDGES["adamw-int8"](result)
    assert (verdict.status, verdict.measured) == (NOT_REPRODUCED, f"diverged: {INT8}")
    result["arms"][TORCH]["2"] = None
    assert JUDGES["adamw-int8"](result).status == UNDECIDED
    (figure,) = draw(TableResult("state-precision-adamw", {}, {}, result, ("a",), 0))
    assert [row[1] for row in figure.table.rows] == ["3, 1 diverged", "3", "3, 1 diverged", "0", "3"]
