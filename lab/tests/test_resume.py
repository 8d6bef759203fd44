"""Interrupted runs: exact after a resume at any step, each metric once."""

import os
import signal

import pytest
import torch
from tiny import (
    Tiny,
    TinyTask,
    check_rows,
    each_device,
    exit_code,
    folder,
    interrupt,
    killed_after,
    read_checkpoint,
    rows,
    start_training,
    wait_for_checkpoint,
)

from mvngrad_lab.store import read_run
from mvngrad_lab.training import checkpoint, step
from mvngrad_lab.training.events import EpochEnd, Message
from mvngrad_lab.training.train import Interrupted


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


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_signal_within_an_evaluation_loses_no_step_and_no_row(run, tmp_path, epoch, killed):
    """Also within the last one, which does not run twice; and if the next process is killed after that evaluation."""

    def die(event):
        if isinstance(event, EpochEnd):
            raise KeyboardInterrupt

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
    if killed:
        with pytest.raises(KeyboardInterrupt):
            run(Tiny(), on_event=die)
        assert [row["step"] for row in rows(folder(tmp_path, Tiny()))] == [7, 14, 21][:epoch]
    resumed = run(Tiny()).result
    for name in ("weights", "test_loss", "train_accuracy"):
        assert resumed[name] == whole.result[name]
    assert "missing_rows" not in resumed
    check_rows(tmp_path, Tiny(), "whole")


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


def test_a_signal_after_the_last_evaluation_has_its_effect_once_the_run_is_stored(run, tmp_path):
    """A worker of a sweep would take the next run otherwise."""

    def signalled(event):
        if isinstance(event, EpochEnd) and event.epoch == event.epochs:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as stopped:
        run(Tiny(), on_event=signalled)
    assert not isinstance(stopped.value, Interrupted)
    assert read_run(folder(tmp_path, Tiny())).result["status"] == "finished"


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
