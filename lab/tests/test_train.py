"""The training loop: exact after any interruption, each metric once, one run for each recipe."""

import dataclasses
import json
import os
import shutil
import signal
import threading
import time
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial

import pytest
import torch
from tiny import Tiny, TinyTask, exit_code, killed_after, rows, start_training, wait_for_checkpoint

from mvngrad.diagnostics import diagnose, read_records
from mvngrad_lab.experiments.cifar100.gap import measure_gap as variance_gap
from mvngrad_lab.store import read_rows
from mvngrad_lab.store.lock import lock_folder
from mvngrad_lab.training import checkpoint, loop, step
from mvngrad_lab.training.events import EpochEnd, Message, StepProgress
from mvngrad_lab.training.train import Interrupted, make_monitor_observer, train

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before any test's first product on a GPU

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def run(tmp_path):
    """Train a tiny recipe in a store of its own."""

    def run(recipe, root="runs", **options):
        return train(recipe, root=tmp_path / root, **{"task": TinyTask, **options})

    return run


def folder(tmp_path, recipe, root="runs"):
    return tmp_path / root / recipe.key


def read_checkpoint(checkpoints):
    """The content of the newest checkpoint."""
    return torch.load(checkpoint.find_newest(checkpoints), weights_only=True)


def check_rows(tmp_path, recipe, root, other="runs"):
    """Check that two runs have the same metrics; returns them."""
    table = rows(folder(tmp_path, recipe, root))
    assert table == rows(folder(tmp_path, recipe, other))
    return table


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
    assert events.pop(0) == Message(recipe.key, f"starts: 21 steps of 16, in {at}")
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
    model = task.build_model().to(memory_format=torch.channels_last)
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
def test_recipes_share_compiled_tasks_and_training_steps(run, device):
    """Another seed or rate takes the same captured step, another optimizer the same model."""
    exact = partial(Tiny, deterministic=True)
    alone = {}
    rounded = [exact(state_dtype="int8", seed=seed) for seed in (2, 3)]  # their step depends on the seed
    for recipe in (exact(seed=1, lr=1e-3), exact(optimizer="adam", eps_s=None), *rounded):
        step.clear_cache()
        alone[recipe] = run(recipe, "alone", device=device).result["weights"]
    step.clear_cache()
    run(exact(), device=device)
    (first,), (compiled,) = step._training_steps.values(), step._compiled_tasks.values()
    shared = []
    for recipe, weights in alone.items():
        assert run(recipe, device=device).result["weights"] == weights
        (training_step,) = step._training_steps.values()
        shared.append((training_step is first, training_step.compiled is compiled))
    assert shared == [(True, True), (False, True), (False, True), (False, True)]
    run(exact(batch_size=20), device=device)
    assert len(step._compiled_tasks) == 2


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


# Interruptions


@each_device
def test_a_run_killed_at_any_step_ends_with_the_same_weights(run, tmp_path, device):
    recipe, log, events = Tiny(deterministic=True), tmp_path / "log", []
    options = {"root": tmp_path / "killed", "device": device, "task": TinyTask, "checkpoint_every": 0}
    for steps in (3, 14):  # within an epoch, and at the end of one
        process = start_training(log, recipe, hold=steps, **options)
        wait_for_checkpoint(process.is_alive, log, folder(tmp_path, recipe, "killed") / "checkpoints", steps)
        process.kill()
        assert exit_code(process, log) == -signal.SIGKILL
    results = [run(recipe, root, device=device, on_event=events.append).result for root in ("killed", "whole")]
    assert events[0].text.startswith("resumes after step")
    for name in ("weights", "train_accuracy"):
        assert results[0][name] == results[1][name]
    assert [row["step"] for row in check_rows(tmp_path, recipe, "killed", "whole")] == [7, 14, 21]


def test_a_run_resumed_by_other_code_keeps_the_environment_of_every_part(run, monkeypatch):
    recipe, events, threads = Tiny(), [], torch.get_num_threads()
    for commit, steps in (("first", 3), ("second", 5), ("second", 9)):
        monkeypatch.setenv("MVNGRAD_COMMIT", commit)
        with killed_after(steps):
            run(recipe, checkpoint_every=0)
    monkeypatch.setenv("MVNGRAD_COMMIT", "third")
    done = run(recipe, on_event=events.append)
    assert events[0].text == "resumes after step 9 of 21; commit was second, is third"
    assert done.environment["commit"] == "third"
    parts = done.result["environments"]
    assert [(part["from_step"], part["commit"]) for part in parts] == [(0, "first"), (3, "second"), (9, "third")]
    assert all(part["torch"] == torch.__version__ and part["threads"] == threads for part in parts)
    assert "environments" not in run(recipe, "whole").result


def test_a_run_resumed_on_other_data_says_so(run, monkeypatch):
    recipe, events = Tiny(), []
    with killed_after(3):
        run(recipe, checkpoint_every=0)
    monkeypatch.setattr(TinyTask, "source", "other images")
    done = run(recipe, on_event=events.append)
    assert events[0].text == "resumes after step 3 of 21; data was random images, is other images"
    assert [part["data"] for part in done.result["environments"]] == ["random images", "other images"]


def test_a_missing_row_of_metrics_is_reported_on_resume_and_in_the_result(run, tmp_path):
    recipe, events = Tiny(), []
    with killed_after(15):
        run(recipe, checkpoint_every=0)
    path = folder(tmp_path, recipe) / "metrics.jsonl"
    path.write_text(path.read_text().partition("\n")[2])
    result = run(recipe, on_event=events.append).result
    assert events[1].text == "metrics.jsonl lacks 1 of 2 rows, so the result lacks them too"
    assert result["missing_rows"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_writes_a_checkpoint_and_says_where_it_stopped(run, tmp_path, number):
    recipe, log, events = Tiny(), tmp_path / "log", []
    at = folder(tmp_path, recipe) / "checkpoints"
    process = start_training(log, recipe, hold=2, root=tmp_path / "runs", task=TinyTask, checkpoint_every=0)
    wait_for_checkpoint(process.is_alive, log, at, 2)
    os.kill(process.pid, number)
    (tmp_path / "go").touch()
    assert exit_code(process, log) == 128 + number
    stopped = read_checkpoint(at)["step"]
    assert f"stopped by {number.name} after step {stopped}; start it again" in log.read_text()
    run(recipe, on_event=events.append)
    assert events[0].text == f"resumes after step {stopped} of 21"


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_signal_within_an_evaluation_loses_no_step_and_no_row(run, tmp_path, epoch):
    """Also within the last one, which does not run twice."""

    class Signalled(TinyTask):
        evaluations = 0

        def evaluate(self, model, final):
            self.evaluations += 1
            if self.evaluations == epoch:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().evaluate(model, final)

    whole = run(Tiny(), "whole")
    with pytest.raises(Interrupted, match=rf"after step {7 * epoch};"):
        run(Tiny(), task=Signalled)
    assert [row["step"] for row in rows(folder(tmp_path, Tiny()))] == [7, 14, 21][: epoch - 1]
    resumed = run(Tiny()).result
    for name in ("weights", "test_loss", "train_accuracy"):
        assert resumed[name] == whole.result[name]
    check_rows(tmp_path, Tiny(), "whole")


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
    assert [(report.step, report.steps) for report in reports] == [(step, 7) for step in range(1, 7)]
    assert all(report.seconds_left > 0 for report in reports)


def interrupt(after):
    """An `on_event` that sends this process a signal at the end of an epoch."""

    def on_event(event):
        if isinstance(event, EpochEnd) and event.epoch == after:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_event


def test_a_signal_at_the_end_of_an_epoch_loses_no_row_and_repeats_none(run, tmp_path):
    whole = run(Tiny(), "whole")
    before = signal.getsignal(signal.SIGTERM)
    for epoch in (1, 2):
        with pytest.raises(Interrupted, match=rf"after step {7 * epoch};") as stopped:
            run(Tiny(), on_event=interrupt(epoch))
        assert stopped.value.step == 7 * epoch
    assert signal.getsignal(signal.SIGTERM) == before
    assert run(Tiny()).result["weights"] == whole.result["weights"]
    check_rows(tmp_path, Tiny(), "whole")


def test_the_seconds_of_a_run_include_all_processes(run, tmp_path):
    with pytest.raises(Interrupted):
        run(Tiny(), on_event=interrupt(1))
    at = folder(tmp_path, Tiny()) / "checkpoints"
    saved = read_checkpoint(at)
    step, state = saved.pop("step"), saved.pop("state")
    checkpoint.save(at, step, {**saved, "seconds": 1000.0}, state, keep=1)
    assert run(Tiny()).result["seconds"] > 1000


@pytest.mark.parametrize("state_dtype", ["float32", "bf16", "int8"])
def test_a_damaged_checkpoint_costs_steps_and_changes_nothing(run, tmp_path, state_dtype):
    recipe = Tiny(state_dtype=state_dtype, seed=5)
    whole = run(recipe, "whole")
    with pytest.raises(Interrupted):
        run(recipe, on_event=interrupt(2), checkpoint_every=0)
    at = folder(tmp_path, recipe)
    newest = checkpoint.list_checkpoints(at / "checkpoints")[0]
    newest.write_bytes(newest.read_bytes()[:-10])
    with (at / "metrics.jsonl").open("a") as file:
        file.write('{"step": 14, "epo')  # the process was killed while it wrote
    events = []
    again = run(recipe, on_event=events.append)
    assert [type(event) for event in events[:2]] == [Message, Message]
    assert newest.name in events[0].text
    assert events[1].text == "resumes after step 13 of 21"
    assert again.result["weights"] == whole.result["weights"]
    check_rows(tmp_path, recipe, "whole")


def test_a_run_that_lacks_only_its_result_is_completed(run, tmp_path):
    whole = run(Tiny())
    (folder(tmp_path, Tiny()) / "result.json").unlink()
    again = run(Tiny())
    assert again.result["weights"] == whole.result["weights"]
    assert again.result["train_accuracy"] == whole.result["train_accuracy"]


def test_a_checkpoint_of_another_model_is_refused(run, tmp_path):
    run(Tiny(), "other")
    step.clear_cache()
    wrong = read_checkpoint(folder(tmp_path, Tiny(), "other") / "checkpoints")["state"] | {
        "model.0.weight": torch.zeros(3)
    }
    checkpoint.save(folder(tmp_path, Tiny()) / "checkpoints", 1, {"seconds": 0.0}, wrong, keep=1)
    with pytest.raises(ValueError, match=r"model.0.weight does not fit\); delete .* to train it again"):
        run(Tiny())


def test_checkpoints_come_at_their_interval(run, tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(checkpoint, "save", lambda folder, step, *rest: saved.append(step))
    run(Tiny(), checkpoint_every=1e9)
    assert saved == [21]
    run(Tiny(seed=1), checkpoint_every=0)
    assert saved[1:] == list(range(1, 22))


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
    training_step = step.TrainingStep(recipe, step.CompiledTask(TinyTask(recipe, None, device)), captured=True)
    training_step.reset(3)
    before = {name: value.clone() for name, value in training_step.state_dict().items()}
    training_step.set_plan({**training_step.task.plan_epoch(recipe, 0), "lr": torch.full((7,), 0.1)}, at=0)
    assert training_step.graph is not None
    for name, value in training_step.state_dict().items():
        assert torch.equal(value, before[name]), name
    training_step.step()
    assert not torch.equal(training_step.state_dict()["model.0.weight"], before["model.0.weight"])
    assert training_step.step_index.item() == 1


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
    diagnose(records)
