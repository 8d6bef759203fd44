"""The benchmark of language models: what it writes, how it judges, and that all of its loops train the same thing."""

import argparse
import dataclasses
import hashlib
import json
import math

import pytest
import torch

from benchmarks import language, loss
from benchmarks.language import PlainLanguageLoop, RandomText, judge_targets, markdown
from benchmarks.overhead import MVNGRAD, TORCH, TimedSteps, optimizers
from benchmarks.rounds import run_rounds
from mvngrad_lab.tasks.language.data.tokens import Manifest, Part
from mvngrad_lab.tasks.language.model import Shape
from mvngrad_lab.tasks.language.recipe import STAND_IN
from mvngrad_lab.tasks.language.task import SHAPES
from mvngrad_lab.training.step import DeviceTask
from mvngrad_lab.training.task import build_initial_model

CPU = torch.device("cpu")
SMALL = Shape(layers=1, width=16, heads=2, context=8, vocabulary=128)
RECIPE = language.RECIPES["tiny"]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", SMALL)
    monkeypatch.setattr(language, "VOCABULARY", 100)


@pytest.fixture
def run(tmp_path):
    def run(*arguments):
        fixed = ["--device", "cpu", "--models", "tiny", "--seconds", "0.01", "--rounds", "1", "--out", str(tmp_path)]
        language.main([*fixed, *arguments])
        return json.loads((tmp_path / "language-cpu.json").read_text()), (tmp_path / "language-cpu.md").read_text()

    return run


@pytest.mark.slow
def test_run_writes_both_parts_and_uses_real_tokens_if_there_are_some(run, capsys, tmp_path):
    folder, content = tmp_path / "data" / "tokens" / STAND_IN, bytes([7, 0]) * 200
    part = Part(tokens=200, documents=1, sha256=hashlib.sha256(content).hexdigest())
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        (folder / f"{split}.bin").write_bytes(content)
    Manifest("sevens", "none", "none", files=(), train=part, validation=part).write(folder)
    result, page = run("--data", str(tmp_path / "data"))
    assert result["data"].startswith("sevens (200 tokens")
    assert "Data: sevens" in page
    assert capsys.readouterr().out.strip() == page.strip()
    rows = {row["name"]: row for row in result["throughput"]["tiny"]}
    assert list(rows) == ["ours", "plain"]
    assert rows["plain"]["ratio"] == 1
    tokens = RECIPE.steps * RECIPE.batch_size * SMALL.context
    for row in rows.values():
        low, high = row["tokens_per_second_range"]
        assert 0 < low <= row["tokens_per_second"] <= high
        assert row["projected_seconds"] * row["tokens_per_second"] == pytest.approx(tokens)
    overhead = result["overhead"]["tiny"]
    assert overhead["whole_steps"] == 6
    assert list(overhead["whole"]) == [TORCH, MVNGRAD]
    sizes = {row["name"]: row["state_bytes"] for row in overhead["rows"]}
    assert len(sizes) == 13
    for name, size in ((TORCH, 8), ("LaPropW float32", 8), (MVNGRAD, 12), ("MVNGradW bf16", 6), ("AdamW int8", 2)):
        assert sizes[name] == pytest.approx(size, abs=0.3)
    for row in overhead["rows"]:
        assert 0 < row["optimizer_seconds"] < row["step_seconds"]
        assert row["step_seconds"] - row["optimizer_seconds"] == pytest.approx(overhead["shared_seconds"])
        assert f"| {row['name']} |" in page
    assert {row["name"]: row["paper"] for row in overhead["rows"]}[MVNGRAD] == pytest.approx(46.8 / 46.2)
    assert result["notes"] == result["targets"] == []


def test_arms_skipped_for_lack_of_time_are_notes(run):
    result, page = run("--within", "0")
    assert "tokens drawn evenly" in result["data"]
    assert result["throughput"] == {"tiny": []}
    assert result["overhead"] == {}
    assert "- tiny, ours: no time left of --within 0" in page


def test_optimizers_skipped_for_lack_of_time_are_notes():
    args, notes = argparse.Namespace(rounds=1, within=5.0), []
    *_, overhead = language.measure_overhead(RECIPE, DeviceTask(RandomText(RECIPE, CPU)), args, notes, end=-math.inf)
    low, high = overhead["whole_ratio_range"]
    assert 0 < low <= overhead["whole_ratio"] <= high
    assert overhead["rows"] == []
    assert len(notes) == 13


def test_failing_arm_is_a_note_and_the_others_share_the_rounds():
    class Arm:
        def train(self, seconds):
            shares.append(seconds)
            return 7.0

    def broken():
        raise RuntimeError("no such kernel\non this machine")

    args, notes, shares = argparse.Namespace(rounds=3, seconds=6.0, within=math.inf), [], []
    rounds = run_rounds({"a": Arm, "b": broken, "c": Arm}, CPU, "{}, tiny", args, notes, math.inf)
    assert {name: each.rates for name, each in rounds.items()} == {"a": [7.0] * 3, "c": [7.0] * 3}
    assert shares == [2.0] * 6
    assert notes == ["b, tiny: RuntimeError: no such kernel"]


def test_plain_loop_trains_as_ours_does():
    """With our AdamW in place of MVN-Grad: the same windows, rates, clipping and decay give the same weights."""
    recipe = dataclasses.replace(
        RECIPE, optimizer="adamw", eps_s=None, precision="float32", epoch_steps=4, lr=1e-2, weight_decay=0.5
    )
    task = RandomText(recipe, CPU)
    ours = language.CapturedLoop(recipe, task, compiled=False)  # trains an epoch
    plain = PlainLanguageLoop(recipe, task, task.loss)
    for _ in range(3):
        plain.step()
    theirs, start = plain.model.state_dict(), build_initial_model(task, recipe.seed).state_dict()
    for name, value in ours.training_step.model.state_dict().items():
        if not name.endswith("attention_input.bias"):  # of keys it has no gradient but rounding, which Adam enlarges
            torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=0)
        assert (value - start[name]).abs().max() > 5e-3


def test_torchs_adamw_steps_the_shared_model():
    device_task = DeviceTask(RandomText(RECIPE, CPU))
    timed = {
        name: TimedSteps(recipe, device_task, name == TORCH)
        for name, recipe in optimizers(RECIPE)
        if "float32" in name or name == TORCH
    }
    assert type(timed[TORCH].optimizer) is torch.optim.AdamW
    assert timed[TORCH].optimizer.param_groups[0]["fused"]
    for each in timed.values():
        before = device_task.model.final_norm.weight.detach().clone()
        whole, own = each.step()
        assert 0 < own < whole
        assert not torch.equal(device_task.model.final_norm.weight, before)
        assert [group["weight_decay"] for group in each.optimizer.param_groups] == [0.1, 0.0]


def test_torchs_adamw_takes_steps_that_are_not_finite():
    """The check for finite steps costs time that an ordinary loop with AdamW does not pay."""
    device_task = DeviceTask(RandomText(RECIPE, CPU))
    timed = TimedSteps(dict(optimizers(RECIPE))[TORCH], device_task, torch_adamw=True)
    weight = device_task.model.final_norm.weight
    weight.data[0] = math.nan
    timed.step()
    assert weight[1:].isnan().all()


def test_random_tokens_are_in_the_vocabulary():
    task = RandomText(dataclasses.replace(RECIPE, batch_size=400), CPU)
    inputs, targets = task.make_batch({"tokens": task.plan_epoch(RECIPE, 0)["tokens"][0]})
    assert inputs.shape == targets.shape == (RECIPE.batch_size, SMALL.context)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    whole = task.drawn.long() & 0xFFFF
    assert whole.min() == 0
    assert whole.max() == 99


@pytest.mark.parametrize(("ratio", "verdict"), [(1.0, "met"), (1.0037, "missed")])
def test_targets_are_judged_on_their_machine_alone(ratio, verdict):
    row = {"name": "ours", "tokens_per_second": 1.8e6, "tokens_per_second_range": [1.7e6, 1.9e6]}
    row |= {"projected_seconds": 3600.0, "setup_seconds": 1.0, "memory_bytes": 0}
    both = {
        "shared_seconds": 0.8,
        "whole_steps": 2,
        "whole": {TORCH: 0.8, MVNGRAD: 0.8},
        "whole_ratio": ratio,
        "whole_ratio_range": [0.99, 1.01],
        "rows": [],
    }
    result = {"environment": {"device": "NVIDIA H200"}, "throughput": {"30M": [row]}, "overhead": {"124M": both}}
    targets = judge_targets(result)
    assert [target["verdict"] for target in targets] == ["missed", "not measured", verdict]
    page = markdown(result | {"targets": targets, "data": "none", "notes": []})
    assert "| at least 1,900,000 | 1,800,000 | missed |" in page
    assert f"| at most 1.00 | {ratio:.4f} | {verdict} |" in page
    assert f"median ratio of two in turn {ratio:.4f} (0.9900-1.0100)" in page
    assert judge_targets(result | {"environment": {"device": "NVIDIA L4"}}) == []


def test_compared_losses_are_equal(tmp_path):
    hidden, weight = torch.randn(40, 8), torch.randn(30, 8)
    targets = torch.randint(30, (40,))
    values = [made(hidden, weight, targets) for made in loss.make_losses([7, 16, 64], 40, compiled=False).values()]
    assert len(values) == 4, "more rows than there are make no arm"
    torch.testing.assert_close(torch.stack(values), values[0].expand(4))
    loss.main(["--device", "cpu", "--models", "tiny", "--rows", "8", "--rounds", "1", "--out", str(tmp_path)])
    assert "| tiny, 16 tokens | 8 rows |" in (tmp_path / "loss-cpu.md").read_text()
