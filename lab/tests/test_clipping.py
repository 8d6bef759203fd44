"""Micro-batches, clipping, and steps that are not finite: skipped, counted and reported; too many end a run."""

import dataclasses
import json
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
from tiny import Tiny, TinyTask, killed_after
from torch import nn

from mvngrad.diagnostics import read_records
from mvngrad_lab.store import RunFolder, read_rows
from mvngrad_lab.training import checkpoint
from mvngrad_lab.training.events import EpochEnd, Message, format_event, scalars
from mvngrad_lab.training.train import make_monitor_observer, train

each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipped(Tiny):
    name: ClassVar[str] = "clipped"
    images: int = 112
    micro_batch_size: int = 4
    clip: float | None = 0.5
    nonfinite_limit: int = 3
    exploding: tuple[int, ...] = ()
    """Steps whose images are infinite."""
    deterministic: bool = True
    bias_decays: bool = True

    def learning_rate(self, step, steps_per_epoch):
        return self.lr

    def has_weight_decay(self, dimensions):
        return self.bias_decays or dimensions > 1


class ClippedTask(TinyTask):
    """Without batch normalization, which neither micro-batches nor infinite images leave alone."""

    def build_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 4))

    def plan_epoch(self, recipe, epoch):
        plan = super().plan_epoch(recipe, epoch)
        for number in recipe.exploding:
            if number // self.steps_per_epoch == epoch:
                plan["scale"][number % self.steps_per_epoch] = float("inf")
        return plan


@pytest.fixture
def run(tmp_path):
    def run(recipe, root="runs", **options):
        return train(recipe, root=tmp_path / root, task=ClippedTask, **options)

    return run


def rows(tmp_path, recipe, root="runs"):
    return read_rows(tmp_path / root / recipe.key / "metrics.jsonl")


@each_device
def test_micro_batches_add_up_to_the_batch(run, tmp_path, device):
    pieces, whole = Clipped(), Clipped(micro_batch_size=16)
    losses = [run(recipe, device=device).result["test_loss"] for recipe in (pieces, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for row, other in zip(rows(tmp_path, pieces), rows(tmp_path, whole), strict=True):
        assert row["losses"] == pytest.approx(other["losses"], rel=1e-4)
        assert row["norms"] == pytest.approx(other["norms"], rel=1e-4)


def test_clipping_equals_a_plain_loop(run, tmp_path):
    """AdamW of torch, with decay for matrices alone."""
    recipe = Clipped(optimizer="adamw", eps_s=None, weight_decay=0.1, bias_decays=False, epochs=2, micro_batch_size=16)
    result = run(recipe).result
    task = ClippedTask(recipe, None, torch.device("cpu"))
    torch.manual_seed(recipe.seed)
    model = task.build_model()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.99), weight_decay=0.1)
    norms = []
    for epoch in range(2):
        plan = task.plan_epoch(recipe, epoch)
        for at in range(7):
            optimizer.zero_grad()
            task.loss(model, task.make_batch({"order": plan["order"][at], "scale": plan["scale"][at]})).backward()
            norms.append(nn.utils.clip_grad_norm_(parameters, 0.5).item())
            optimizer.step()
    with torch.no_grad():
        assert result["test_loss"] == pytest.approx(task.evaluate(model, False)["test_loss"], rel=1e-5)
    assert [norm for row in rows(tmp_path, recipe) for norm in row["norms"]] == pytest.approx(norms, rel=1e-4)
    assert max(norms) > 0.5, "nothing was clipped"


@each_device
@pytest.mark.parametrize("clip", [0.5, None])
def test_a_nonfinite_step_is_skipped_counted_and_reported(run, tmp_path, device, clip):
    recipe, events = Clipped(exploding=(3, 4, 9), clip=clip), []
    at = tmp_path / "runs" / recipe.key
    result = run(recipe, device=device, on_event=events.append, observe=make_monitor_observer(at)).result
    assert (result["status"], result["nonfinite_steps"]) == ("finished", 3)
    table = rows(tmp_path, recipe)
    logged = [record["logged"]["loss"] for record in read_records(at / "monitor.jsonl")]
    assert logged == pytest.approx([row["loss"] for row in table])
    assert [row["nonfinite"] for row in table] == [2, 1, 0]
    missing = [at for row in table for at, loss in enumerate(row["losses"], row["step"] - 7) if loss is None]
    assert missing == [3, 4, 9]
    texts = [event.text for event in events[1:] if isinstance(event, Message)]
    assert texts == [
        "skipped, for a loss or gradient norm that was not finite: 2 of 7 steps, the last 5",
        "skipped, for a loss or gradient norm that was not finite: 1 of 7 steps, the last 10",
    ]
    path = checkpoint.find_newest(at / "checkpoints")
    state = torch.load(path, weights_only=True)["state"]
    assert all(value.isfinite().all() for name, value in state.items() if name.startswith(("model", "optimizer")))
    counts = {value.item() for name, value in state.items() if name.endswith(".step")}
    assert counts == {21 - 3}, "the optimizer did not count the steps it did not take"


@each_device
@pytest.mark.parametrize(("exploding", "end"), [((3, 4, 5), 6), ((5, 6, 7), 8)], ids=["in an epoch", "across two"])
def test_too_many_nonfinite_steps_in_a_row_end_the_run(run, tmp_path, device, exploding, end):
    result = run(Clipped(exploding=exploding), device=device).result
    assert (result["status"], result["step"], result["nonfinite_steps"]) == ("diverged", end, 3)
    assert [row["nonfinite"] for row in rows(tmp_path, Clipped(exploding=exploding))] == ([3] if end < 7 else [2, 1])
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_an_epoch_without_a_finite_step_has_no_loss(run, tmp_path):
    recipe, events = Clipped(exploding=tuple(range(7, 14)), nonfinite_limit=10), []
    result = run(recipe, on_event=events.append).result
    assert (result["status"], result["nonfinite_steps"]) == ("finished", 7)
    assert [row["loss"] is None for row in rows(tmp_path, recipe)] == [False, True, False]
    assert [step for step, _ in result["curve"]] == [7, 21]
    empty = next(event for event in events if isinstance(event, EpochEnd) and event.epoch == 2)
    assert "epoch 2/3  no finite loss" in format_event(empty)
    assert "loss" not in scalars(empty)


def test_steps_after_divergence_are_not_counted(run, tmp_path):
    recipe = Clipped(exploding=tuple(range(8, 14)))
    result = run(recipe).result
    assert (result["status"], result["step"], result["nonfinite_steps"]) == ("diverged", 11, 3)
    assert [(row["step"], len(row["losses"])) for row in rows(tmp_path, recipe)] == [(7, 7), (11, 4)]


def test_the_row_of_a_divergence_is_written_once(run, tmp_path, monkeypatch):
    """Killed between the row and the result, with a checkpoint of a later step."""
    recipe = Clipped(exploding=tuple(range(8, 14)))
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(recipe, checkpoint_every=0)
    assert [row["step"] for row in rows(tmp_path, recipe)] == [7, 11]
    result = run(recipe).result
    assert (result["status"], result["step"], result["nonfinite_steps"]) == ("diverged", 11, 3)
    assert [row["step"] for row in rows(tmp_path, recipe)] == [7, 11]


def test_nonfinite_steps_are_counted_across_an_interruption(run):
    """Killed between two epochs, with nonfinite steps in a row in both."""
    recipe = Clipped(exploding=(5, 6, 7))
    with killed_after(7):
        run(recipe, checkpoint_every=0)
    result = run(recipe).result
    assert (result["status"], result["step"]) == ("diverged", 8)


def test_without_clip_the_gradient_is_unchanged(run, tmp_path):
    guarded, plain = Clipped(clip=None), Clipped(clip=None, nonfinite_limit=1)
    assert run(guarded).result["weights"] == run(plain).result["weights"]
    assert "norms" in rows(tmp_path, guarded)[0]
    assert "norms" not in rows(tmp_path, plain)[0]


@pytest.mark.gpu
def test_a_captured_clipped_run_is_the_same(run):
    """The gradient norm, the decision to skip a step and the step itself are all in the graph."""
    recipe = Clipped(exploding=(3, 9))
    results = [run(recipe, str(capture), device="cuda", capture=capture).result for capture in (True, False)]
    assert results[0]["weights"] == results[1]["weights"]
