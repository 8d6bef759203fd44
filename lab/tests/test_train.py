"""The training loop: what a run stores, what decides its numbers, how it ends, on a CPU and on a GPU."""

import dataclasses
import json
import shutil
import threading
import time
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial

import pytest
import torch
from tiny import Tiny, TinyTask, check_rows, each_device, folder, interrupt, read_checkpoint, rows

from mvngrad.diagnostics import diagnose, read_records
from mvngrad_lab.experiments.cifar100.gap import measure_gap as variance_gap
from mvngrad_lab.store import read_rows
from mvngrad_lab.store.lock import lock_folder
from mvngrad_lab.training import checkpoint, loop, step
from mvngrad_lab.training.events import EpochEnd, Message, StepProgress
from mvngrad_lab.training.train import Interrupted, make_monitor_observer


def test_a_run_stores_recipe_metrics_result_and_weights(run, tmp_path):
    recipe, events = Tiny(eval_every=2), []
    done = run(recipe, on_event=events.append)
    at = folder(tmp_path, recipe)
    assert json.loads((at / "recipe.json").read_text()) == {"name": "tiny", **recipe.settings}
    assert json.loads((at / "environment.json").read_text()) == done.environment
    assert datetime.fromisoformat(done.environment["made"]) <= datetime.now(timezone.utc)
    assert json.loads((at / "result.json").read_text()) == done.result
    assert done.result["status"] == "finished"
    assert done.result["steps"] == 3 * 7
    assert done.result["state_bytes"] == 4 * (3 * done.result["parameters"] + 6)  # m, s, u, and six counts of steps
    assert [(row["epoch"], row["step"], "test_loss" in row) for row in read_rows(at / "metrics.jsonl")] == [
        (1, 7, False), (2, 14, True), (3, 21, True),
    ]  # fmt: skip
    assert events.pop(0) == Message(recipe.key, f"starts: tiny with mvngrad, lr 0.01; 21 steps of 16, in {at}")
    events = [event for event in events if isinstance(event, EpochEnd)]
    assert [event.epoch for event in events] == [1, 2, 3]
    assert events[-1].seconds_left == 0
    assert events[-1].metrics["test_loss"] == done.result["test_loss"]
    assert events[-1].loss < events[0].loss
    assert len(checkpoint.list_checkpoints(at / "checkpoints")) == 1
    assert read_checkpoint(at / "checkpoints")["step"] == 21


def test_a_finished_run_is_not_trained_again(run):
    first, events = run(Tiny()), []
    assert run(Tiny(), on_event=events.append) == first
    assert events == []


def test_a_run_that_another_process_just_finished_is_not_trained_again(run, tmp_path, monkeypatch):
    """After the first look for it, and before its folder was unlocked."""
    first, events = run(Tiny(), "other"), []

    @contextmanager
    def late(at):
        with lock_folder(at) as check:
            shutil.copytree(folder(tmp_path, Tiny(), "other"), at, dirs_exist_ok=True)
            yield check

    monkeypatch.setattr("mvngrad_lab.training.train.lock_folder", late)
    assert run(Tiny(), on_event=events.append) == first
    assert events == []


def test_only_the_seed_decides_the_random_numbers(run):
    first = run(Tiny())
    torch.manual_seed(7)
    before = torch.get_rng_state()
    again = run(Tiny(), "elsewhere")
    assert torch.equal(torch.get_rng_state(), before)
    step.clear_cache()
    results = [run.result for run in (first, again, run(Tiny(), "with an empty cache"))]
    without_times = [{name: value for name, value in each.items() if "seconds" not in name} for each in results]
    assert without_times[0] == without_times[1] == without_times[2]
    assert run(Tiny(seed=1)).result["weights"] != first.result["weights"]


def test_the_loop_equals_a_plain_loop(run):
    """The same steps written out, with the learning rate set from outside and no plan."""
    recipe = Tiny(epochs=2, optimizer="adamw", eps_s=None, weight_decay=0.1)
    result = run(recipe).result
    task = TinyTask(recipe, None, torch.device("cpu"))
    torch.manual_seed(recipe.seed)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.1)
    for epoch in range(2):
        plan = task.plan_epoch(recipe, epoch)
        for at in range(7):
            optimizer.param_groups[0]["lr"] = recipe.learning_rate(7 * epoch + at, 7)
            chosen = plan["order"][at] if at < 6 else plan["order"][at, :4]  # 100 = 6 * 16 + 4
            optimizer.zero_grad()
            task.loss(model, task.make_batch({"order": chosen, "scale": plan["scale"][at]})).backward()
            optimizer.step()
    with torch.no_grad():
        assert result["test_loss"] == pytest.approx(task.evaluate(model.eval(), False)["test_loss"], rel=1e-5)


def test_the_seed_decides_the_initial_weights(run, tmp_path):
    for seed in (0, 3):
        recipe = Tiny(seed=seed, lr=0.0, epochs=1)
        run(recipe)
        weight = read_checkpoint(folder(tmp_path, recipe) / "checkpoints")["state"]["model.0.weight"]
        torch.manual_seed(seed)
        assert torch.equal(weight, TinyTask(recipe, None, torch.device("cpu")).build_model()[0].weight)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("float32", torch.float32)])
def test_training_and_evaluation_use_the_precision_of_the_recipe(run, precision, dtype):
    seen = set()

    class Watched(TinyTask):
        def build_model(self):
            model = super().build_model()
            model.register_forward_hook(lambda model, inputs, scores: seen.add((model.training, scores.dtype)))
            return model

    run(Tiny(precision=precision, epochs=1), task=Watched)
    assert seen == {(True, dtype), (False, dtype)}


@each_device
def test_recipes_share_device_tasks_and_training_steps(run, device):
    """Another seed or rate takes the same captured step, another optimizer the same model."""
    exact = partial(Tiny, deterministic=True)
    alone = {}
    rounded = [exact(state_dtype="int8", seed=seed) for seed in (2, 3)]  # their step depends on the seed
    for recipe in (exact(seed=1, lr=1e-3), exact(optimizer="adam", eps_s=None), *rounded):
        step.clear_cache()
        alone[recipe] = run(recipe, "alone", device=device).result["weights"]
    step.clear_cache()
    run(exact(), device=device)
    (first,), (device_task,) = step._training_steps.values(), step._device_tasks.values()
    shared = []
    for recipe, weights in alone.items():
        assert run(recipe, device=device).result["weights"] == weights
        (training_step,) = step._training_steps.values()
        shared.append((training_step is first, training_step.device_task is device_task))
    assert shared == [(True, True), (False, True), (False, True), (False, True)]
    run(exact(batch_size=20), device=device)
    assert len(step._device_tasks) == 2


def test_every_epoch_sees_every_image_once_in_another_order(run):
    seen = []

    class Watched(TinyTask):
        def make_batch(self, row):
            seen.append(row["order"].tolist())
            return super().make_batch(row)

    run(Tiny(epochs=2), task=Watched)
    epochs = [[image for batch in part for image in batch] for part in (seen[:7], seen[7:])]
    assert all(sorted(order) == list(range(100)) for order in epochs)
    assert epochs[0] != epochs[1]


def test_the_last_evaluation_runs_once(run):
    finals = []

    class Counted(TinyTask):
        def evaluate(self, model, final):
            finals.append(final)
            return super().evaluate(model, final)

    run(Tiny(), task=Counted)
    assert finals == [False, False, True]


def test_progress_is_reported_within_long_epochs(run, monkeypatch):
    monkeypatch.setattr(loop, "PROGRESS_EVERY", 0.0)
    events = []
    run(Tiny(epochs=1), on_event=events.append)
    reports = [event for event in events if isinstance(event, StepProgress)]
    assert [(report.step, report.total_steps) for report in reports] == [(step, 7) for step in range(1, 7)]
    assert all(report.seconds_left > 0 for report in reports)


def test_a_finished_run_may_keep_no_checkpoint(run, tmp_path):
    kept, not_kept = run(Tiny()), run(Tiny(), "other", checkpoint_every=0, keep_last=False)
    assert not_kept.result["weights"] == kept.result["weights"]
    assert [(folder(tmp_path, Tiny(), *where) / "checkpoints").exists() for where in ((), ("other",))] == [True, False]


def test_training_works_outside_the_main_thread(run):
    """Where signals cannot be handled."""
    runs = []
    thread = threading.Thread(target=lambda: runs.append(run(Tiny())))
    thread.start()
    thread.join()
    assert runs[0].result["status"] == "finished"


# Divergence


@each_device
@pytest.mark.parametrize("break_at", [0, 8, 12, 20])
def test_a_loss_that_is_not_finite_ends_the_run_with_its_step(run, tmp_path, device, break_at):
    recipe = Tiny(break_at=break_at)
    done = run(recipe, device=device)
    assert done.result["status"] == "diverged"
    # Counted from 1: the step after the one that broke the weights, or the last, whose own loss was finite.
    assert done.result["step"] == min(break_at + 2, 21)
    assert run(recipe) == done
    assert len(read_rows(folder(tmp_path, recipe) / "metrics.jsonl")) == (break_at + 1) // 7


def test_a_device_that_is_too_small_names_the_setting_to_change(run):
    class Large(TinyTask):
        def make_batch(self, row):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand so on")

    with pytest.raises(torch.OutOfMemoryError, match=r"make batch_size=16 smaller.*\(CUDA out of memory.*GiB\.\)$"):
        run(Tiny(), task=Large)
    assert not step._training_steps
    assert run(Tiny()).result["status"] == "finished", "the failed attempt left something behind"


# Observers


@each_device
def test_an_observer_changes_nothing_and_its_time_does_not_count(run, tmp_path, device):
    """One that computes gradients and runs the model, with batch normalization, in the mode of training."""
    recipe, seen = Tiny(deterministic=True), []

    def observe(epoch, training_step):
        gap = variance_gap(recipe, training_step, epoch, K=4)
        time.sleep(0.2)
        seen.append((epoch, gap.batches, training_step.step_index.item()))

    alone = run(recipe, "alone", device=device)
    step.clear_cache()
    start = time.perf_counter()
    observed = run(recipe, "observed", device=device, observe=observe)
    passed = time.perf_counter() - start
    assert seen == [(epoch, 4, 7) for epoch in (1, 2, 3)]
    for name in ("weights", "test_loss"):
        assert observed.result[name] == alone.result[name]
    check_rows(tmp_path, recipe, "alone", "observed")
    assert observed.result["seconds"] + observed.result["setup_seconds"] + 3 * 0.2 <= passed


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("optimizer", ["mvngrad", "adamw"])
def test_a_captured_run_equals_an_uncaptured_one(run, tmp_path, optimizer, state_dtype):
    recipe = Tiny(optimizer=optimizer, eps_s=1e-8 if optimizer == "mvngrad" else None, state_dtype=state_dtype)
    recipe = dataclasses.replace(recipe, deterministic=True)
    runs = [run(recipe, f"capture={capture}", device="cuda", capture=capture) for capture in (False, True)]
    assert runs[0].result["test_loss"] == pytest.approx(runs[1].result["test_loss"], rel=1e-4)
    tables = [rows(folder(tmp_path, recipe, f"capture={capture}")) for capture in (False, True)]
    for one, other in zip(*tables, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.gpu
def test_the_gpu_sees_the_same_data_as_the_cpu(run):
    host, device = (run(Tiny(), where, device=where) for where in ("cpu", "cuda"))
    assert host.result["test_loss"] == pytest.approx(device.result["test_loss"], rel=1e-2)


@pytest.mark.gpu
def test_a_capture_does_not_change_the_state():
    recipe, device = Tiny(), torch.device("cuda")
    training_step = step.TrainingStep(recipe, step.DeviceTask(TinyTask(recipe, None, device)), captured=True)
    training_step.reset(3)
    before = {name: value.clone() for name, value in training_step.state_dict().items()}
    training_step.set_plan({**training_step.task.plan_epoch(recipe, 0), "lr": torch.full((7,), 0.1)}, at=0)
    assert training_step.graph is not None
    for name, value in training_step.state_dict().items():
        assert torch.equal(value, before[name]), name
    training_step.step()
    assert not torch.equal(training_step.state_dict()["model.0.weight"], before["model.0.weight"])
    assert training_step.step_index.item() == 1


def test_a_warm_up_does_not_change_buffers_that_no_checkpoint_has():
    def count(module, inputs):
        module.calls += 1

    class Counted(TinyTask):
        def build_model(self):
            model = super().build_model()
            model.register_buffer("calls", torch.zeros(()), persistent=False)
            model.register_forward_pre_hook(count)
            return model

    recipe = Tiny()
    task = Counted(recipe, None, torch.device("cpu"))
    training_step = step.TrainingStep(recipe, step.DeviceTask(task), captured=False)
    training_step.set_plan(training_step.plan_epoch(recipe, 0), at=0)
    training_step._warm_up()
    assert training_step.model.calls == 0


@pytest.mark.gpu
def test_a_second_run_replays_the_graph_of_the_first(run):
    run(Tiny(), device="cuda")
    (first,) = step._training_steps.values()
    graph = first.graph
    again = run(Tiny(seed=1), device="cuda")
    assert next(iter(step._training_steps.values())).graph is graph
    step.clear_cache()
    assert run(Tiny(seed=1), "apart", device="cuda").result["test_loss"] == pytest.approx(
        again.result["test_loss"], rel=1e-4
    )


@pytest.mark.gpu
def test_the_memory_of_a_run_excludes_earlier_runs(run):
    """One reuses the captured step of the first, the other captures its own."""
    first = run(Tiny(), device="cuda").result["memory_bytes"]
    assert first > 0
    for recipe in (Tiny(seed=1), Tiny(optimizer="adam", eps_s=None)):
        torch.empty(2**31, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        assert abs(run(recipe, device="cuda").result["memory_bytes"] - first) < 2**30


@pytest.mark.gpu
def test_a_replaced_captured_step_frees_its_memory(run):
    held = []
    for beta1 in (0.9, 0.8, 0.7, 0.6):
        run(Tiny(beta1=beta1), device="cuda")
        held.append(torch.cuda.memory_allocated())
    assert held[-1] - held[1] < 2**20  # by the second, libraries have allocated what they never free


@each_device
@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore:\\s*Online softmax is disabled")
def test_a_compiled_run_equals_an_uncompiled_one(run, device):
    runs = [run(Tiny(), f"compile={compile}", device=device, compile=compile) for compile in (False, True)]
    assert runs[0].result["test_loss"] == pytest.approx(runs[1].result["test_loss"], rel=1e-2)


def test_a_deterministic_run_is_never_compiled(run, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda part, **options: compiled.append(part.__name__) or part)
    run(Tiny(deterministic=True), compile=True)
    assert compiled == []
    run(Tiny(), compile=True)
    assert compiled == ["make_batch", "loss_and_correct"]


@each_device
def test_a_monitor_writes_a_record_after_each_epoch_and_changes_nothing(run, tmp_path, device):
    recipe = Tiny(deterministic=True)
    alone = run(recipe, "alone", device=device).result["weights"]
    at = folder(tmp_path, recipe)
    with pytest.raises(Interrupted):
        run(recipe, device=device, on_event=interrupt(2), observe=make_monitor_observer(at))
    with (at / "monitor.jsonl").open("a") as file:
        file.write('{"step": 21, "groups": []}\n')  # the process was killed before its checkpoint
    assert run(recipe, device=device, observe=make_monitor_observer(at)).result["weights"] == alone
    records = read_records(at / "monitor.jsonl")
    assert [record["step"] for record in records] == [7, 14, 21]
    assert all(record["groups"][0]["snr"]["0.5"] > 0 for record in records)
    losses = [record["logged"]["loss"] for record in records]
    assert losses == pytest.approx([row["loss"] for row in read_rows(at / "metrics.jsonl")])
    diagnose(records)
