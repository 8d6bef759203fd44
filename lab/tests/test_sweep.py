"""What a sweep does with its grid, its stages, its failures and its selection."""

import csv
import errno
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import optuna
import pytest
import sweep_toy
import torch
from optuna.exceptions import StorageInternalError
from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError
from sweep_toy import OPTIMIZERS, Toy, each, sweep, wait_for, worked

from mvngrad_lab.cli import main
from mvngrad_lab.store import RunFolder, lock, write_atomic
from mvngrad_lab.sweep import crew, database, export, patience, plan, worker
from mvngrad_lab.sweep.address import address
from mvngrad_lab.sweep.patience import GaveUp
from mvngrad_lab.sweep.queue import Queue, create
from mvngrad_lab.sweep.records import by_key
from mvngrad_lab.sweep.signals import undisturbed
from mvngrad_lab.sweep.worker import identity, work
from mvngrad_lab.tasks.mnist.recipe import Mnist


def statuses(queue):
    return sorted(record.status for record in by_key(queue.records()).values())


def test_init_twice_adds_nothing_and_a_changed_grid_adds_what_is_new(place, said, monkeypatch):
    assert len(plan.init(place, "sweep_toy:small", tell=said.append)) == 12
    assert plan.init(place, "sweep_toy:small", tell=said.append) == []
    assert "0 configurations are new, 12 were there" in said[-1]
    monkeypatch.setattr(sweep_toy, "small", sweep_toy.wider)
    said.clear()
    assert len(plan.init(place, "sweep_toy:small", tell=said.append)) == 8
    assert "8 configurations are new, 8 were there" in "\n".join(said)
    assert "4 that are there are not in the grid any more" in "\n".join(said)


def test_init_says_what_a_sweep_takes(place, said):
    plan.init(place, "sweep_toy:staged", tell=said.append)
    assert said[0] == "stage 1: adam 2, laprop 2, adabelief 2, mvngrad 2"
    assert said[1].startswith("stage 2: adabelief 2, adam 2, laprop 2, mvngrad 2 (if")
    assert "16 different runs, then 8 more seeds" in said[2]
    assert "about 2.4 hours of a toy" in said[2]


def test_a_second_init_keeps_the_pace_and_says_what_it_changes(opened, said):
    queue = opened("small", heartbeat=300, grace=7200)
    said.clear()
    plan.init(queue.address, queue.name, tell=said.append)
    assert (queue.notes["heartbeat"], queue.notes["grace"]) == (300, 7200)
    assert not any("is 300 s" in line for line in said)
    plan.init(queue.address, queue.name, grace=900, tell=said.append)
    assert (queue.notes["heartbeat"], queue.notes["grace"]) == (300, 900)
    assert "grace was 7200 s and is 900 s, for workers that start from now on" in said
    with pytest.raises(ValueError, match="grace=200 must be more than heartbeat=300"):
        plan.init(queue.address, queue.name, grace=200, tell=said.append)


def test_settings_may_be_sequences_and_what_cannot_be_kept_is_refused_before_anything_is_made(
    place, said, tmp_path, monkeypatch
):
    recipes = each(betas=((0.9, 0.99), (0.8, 0.99), (0.5,)))
    monkeypatch.setattr(sweep_toy, "small", lambda: sweep(recipes))
    assert len(plan.init(place, "sweep_toy:small", tell=said.append)) == 12
    assert work(place, "sweep_toy:small", root=tmp_path / "runs", tell=said.append) == {"finished": 12}
    elsewhere = address(f"sqlite:///{tmp_path}/other.db")
    monkeypatch.setattr(sweep_toy, "small", lambda: sweep([replace(r, floor=[r]) for r in recipes]))
    with pytest.raises((TypeError, ValueError)):
        plan.init(elsewhere, "sweep_toy:small", tell=said.append)
    assert not elsewhere.file.exists()


def test_a_sweep_that_init_did_not_write_to_its_end_names_the_remedy(place, said, tmp_path):
    create(place, "sweep_toy:small", higher=False)
    with pytest.raises(LookupError, match="is not whole; run `mvngrad sweep init sweep_toy:small` again"):
        work(place, "sweep_toy:small", root=tmp_path / "runs", tell=said.append)
    queue = Queue(place, "sweep_toy:small")
    assert "sweep init` again" in export.status(queue)[0]
    queue.close()


def test_optimizers_of_other_people_are_checked_before_a_sweep_is_made(place, said, monkeypatch):
    for optimizer, problem in (
        ("torch:Adan", "torch.optim has no optimizer 'Adan'"),
        ("torch:SGD", "torch:SGD does not take betas"),
        ("torch:LBFGS", "needs a closure"),
        ("torch:Adam,amsgrad", "cannot be read"),
        ("torch:Muon", "torch:Muon does not take betas"),
    ):
        recipe = Mnist(optimizer=optimizer, lr=1e-3, beta1=0.9, beta2=0.99)
        monkeypatch.setattr(sweep_toy, "small", lambda recipe=recipe: sweep([recipe]))
        with pytest.raises(ValueError, match=problem):
            plan.init(place, "sweep_toy:small", tell=said.append)
    assert not place.file.exists()


def test_what_is_chosen_by_is_named_once_and_is_not_test_data(place, said, monkeypatch):
    with pytest.raises(ValueError, match=r"test_loss.*test data"):
        sweep(each(), metric="test_loss")
    assert sweep(each(), metric="test_loss", test_because="there is no other").metric == "test_loss"
    plan.init(place, "sweep_toy:small", tell=said.append)
    monkeypatch.setattr(sweep_toy, "small", lambda: sweep(each(), metric="validation_accuracy", higher=True))
    with pytest.raises(ValueError, match="chooses by validation_loss, which was named before"):
        plan.init(place, "sweep_toy:small", tell=said.append)


def test_a_second_stage_follows_from_the_first_and_seeds_from_both(opened, tmp_path, said):
    queue = opened("staged")
    claim = queue.claim(identity())
    queue.finish(claim, {"status": "finished"}, 9.0)
    assert plan.init(queue.address, queue.name, tell=said.append) == []
    with pytest.raises(RuntimeError, match="7 runs of sweep_toy:staged are not done"):
        plan.rerun(queue, 3)
    assert worked(queue, tmp_path, said) == {"finished": 15}
    second = [record for record in queue.records() if record.stage == "2"]
    assert {(r.settings["optimizer"], r.settings["lr"], r.settings["steps"]) for r in second} == {
        (optimizer, 2.0, steps) for optimizer in OPTIMIZERS for steps in (1, 2)
    }
    selected = plan.select(queue)
    assert {who: record.settings["lr"] for who, record in selected.items()} == dict.fromkeys(OPTIMIZERS, 2.0)
    assert len(plan.rerun(queue, 3)) == 8
    assert plan.rerun(queue, 3) == []
    assert worked(queue, tmp_path, said) == {"finished": 8}
    assert {who: record.key for who, record in plan.select(queue).items()} == {
        who: record.key for who, record in selected.items()
    }
    assert any(line.startswith("adam: 1.125 ± 0.125 over 3 seeds  (lr 2.0") for line in export.selection(queue))


def test_the_selection_says_how_many_seeds_diverged_and_how_many_are_to_come(opened, tmp_path, said):
    queue = opened("small")
    assert worked(queue, tmp_path, said) == {"finished": 12}
    plan.rerun(queue, 4)
    for end in ("finished", "diverged"):
        claim = queue.claim(identity())
        queue.finish(claim, {"status": end, "reason": "no luck"}, 2.0 if end == "finished" else None)
    (line,) = (line for line in export.selection(queue) if line.startswith(claim.record.contestant))
    assert " over 2 seeds, 1 of 4 diverged, 1 to come  (" in line
    (other,) = (line for line in export.selection(queue) if line.startswith("mvngrad"))
    assert other == "mvngrad: 4, 3 to come  (lr 2.0)"


def test_a_run_that_diverges_or_raises_is_a_result_and_the_worker_goes_on(opened, tmp_path, said):
    queue = opened("unlucky", unequal=True)
    assert worked(queue, tmp_path, said) == {"finished": 4, "diverged": 4, "raised": 2}
    reasons = {record.status: record.outcome.get("reason") for record in queue.records()}
    assert reasons["diverged"] == "diverged at step 3"
    assert reasons["raised"] == "ZeroDivisionError: lr=3.0 is cursed"
    assert {record.value for record in queue.records() if record.status != "finished"} == {None}
    assert "4 x diverged at step 3" in export.status(queue)
    assert worked(queue, tmp_path, said) == {}
    assert len(plan.retry(queue)) == 2
    assert worked(queue, tmp_path, said) == {"raised": 2}


def test_a_worker_for_which_every_run_raises_stops_and_leaves_the_rest(opened, tmp_path, said):
    queue = opened("cursed")
    with pytest.raises(RuntimeError, match=r"3 runs in a row raised.*lr=0.* is cursed.*sweep retry"):
        worked(queue, tmp_path, said)
    assert statuses(queue) == ["raised"] * 3 + ["waiting"] * 9
    assert {r.contestant for r in queue.records() if r.status == "raised"} == {"adam", "laprop", "adabelief"}


def test_an_optimizer_that_cannot_run_does_not_stop_the_others(opened, tmp_path, said, monkeypatch):
    recipes = [replace(recipe, fate="raises") for recipe in each(lr=range(9))[:9]] + each(lr=range(3))[-3:]
    monkeypatch.setattr(sweep_toy, "small", lambda: sweep(recipes))
    queue = opened("small", unequal=True)
    with pytest.raises(RuntimeError, match="3 runs in a row raised"):
        worked(queue, tmp_path, said)
    assert statuses(queue) == ["finished"] * 3 + ["raised"] * 6 + ["waiting"] * 3


def test_a_result_without_the_metric_says_which_it_has(opened, tmp_path, said, monkeypatch):
    queue = opened("small")
    monkeypatch.setattr(sweep_toy, "small", lambda: sweep(each()))
    queue.note(metric="validation_accuracy")
    with pytest.raises(RuntimeError, match="in a row"):
        worked(queue, tmp_path, said)
    reason = next(record.outcome["reason"] for record in queue.records() if record.outcome)
    assert "no 'validation_accuracy'" in reason
    assert "test_loss" in reason


def test_no_two_workers_run_one_configuration_even_if_it_was_queued_twice(opened, tmp_path, said):
    queue = opened("small")
    queue.add([plan.again(record) for record in queue.records()])
    assert worked(queue, tmp_path, said) == {"finished": 12}
    assert sorted(record.status for record in queue.records()) == ["double"] * 12 + ["finished"] * 12
    assert len(export.rows(queue)) == 12


def test_a_configuration_that_was_queued_twice_and_diverges_is_run_once(opened, tmp_path, said, monkeypatch):
    monkeypatch.setattr(sweep_toy, "small", lambda: sweep(each(lr=(2.0,), fate=("diverges",))))
    queue = opened("small")
    queue.add([plan.again(record) for record in queue.records()])
    assert worked(queue, tmp_path, said) == {"diverged": 4}
    assert sorted(record.status for record in queue.records()) == ["diverged"] * 4 + ["double"] * 4


def test_a_worker_that_dies_before_its_first_sign_of_life_loses_nothing(opened, tmp_path, said):
    queue = opened("small", heartbeat=1, grace=2)
    claim = queue.claim(identity())
    wait_for(lambda: queue.reclaim() or any("silent; queued again" in line for line in said))
    assert [r.status for r in queue.records() if r.key == claim.record.key] == ["lost", "waiting"]
    assert worked(queue, tmp_path, said) == {"finished": 12}


def test_who_was_killed_on_this_machine_is_replaced_at_once(opened, tmp_path, said):
    """However long the grace is. Of a machine that has the same processes and is another, nothing is known."""
    queue = opened("small", heartbeat=60, grace=600)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    worker = {**identity(), "pid": str(process.pid), "began": lock.process_start(process.pid)}
    claims = [queue.claim(worker), queue.claim({**worker, "machine": "another"}), queue.claim(identity())]
    assert not queue.inherit()
    assert statuses(queue).count("running") == 3
    process.kill()
    process.communicate()
    assert queue.inherit()
    assert not queue.inherit()
    assert [r.key for r in queue.records() if r.status == "lost"] == [claims[0].record.key]
    assert [line for line in said if "queued again" in line] == [
        f"{claims[0].record.key}: its worker is over; queued again"
    ]


def test_a_worker_without_work_says_for_whom_it_waits(opened, tmp_path, said, monkeypatch):
    monkeypatch.setattr(sweep_toy, "small", lambda: sweep([Toy(optimizer="adam", pause=0.0)]))
    queue = opened("small", heartbeat=1, grace=2)
    queue.claim({**identity(), "worker": "elsewhere-17", "machine": "another"})
    assert worked(queue, tmp_path, said) == {"finished": 1}
    assert sum("waits for" in line and "(elsewhere-17)" in line for line in said) == 1


def test_after_the_store_was_away_nobody_is_called_dead_before_he_could_speak(opened, said):
    queue = opened("small", heartbeat=1, grace=2)
    claim = queue.claim(identity())
    wait_for(lambda: time.monotonic() > queue.judging)
    with queue.storage.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00'")
    queue._away()
    queue.reclaim()
    assert "lost" not in statuses(queue)
    with queue.beating(claim):
        wait_for(lambda: time.monotonic() > queue.judging)
        queue.reclaim()
    assert "lost" not in statuses(queue)
    assert queue.finish(claim, {"status": "finished"}, 1.0)


def test_a_worker_that_dies_while_it_queues_a_dead_ones_run_loses_nothing(opened, tmp_path, said):
    queue = opened("small", heartbeat=1, grace=2)
    claim = queue.claim(identity())
    queue.storage.set_trial_state_values(claim.trial, optuna.trial.TrialState.FAIL)
    assert statuses(queue)[0] == "lost"
    assert worked(queue, tmp_path, said) == {"finished": 12}


def test_a_worker_that_dies_between_its_result_and_its_end_is_not_believed(opened, tmp_path, said):
    queue = opened("small")
    claim = queue.claim(identity())
    queue.storage.set_trial_user_attr(claim.trial, "outcome", {"status": "finished", "validation_loss": 0.0})
    queue.storage.set_trial_state_values(claim.trial, optuna.trial.TrialState.FAIL)
    assert statuses(queue)[0] == "lost"
    assert worked(queue, tmp_path, said) == {"finished": 12}


def test_a_worker_that_was_thought_dead_changes_nothing_when_it_wakes(opened, tmp_path, said):
    queue = opened("small")
    claim = queue.claim(identity())
    queue.storage.set_trial_state_values(claim.trial, optuna.trial.TrialState.FAIL)
    assert not queue.finish(claim, {"status": "finished"}, 1.0)
    queue.put_back(claim)
    assert [r.status for r in queue.records() if r.key == claim.record.key] == ["lost"]


def test_a_run_that_another_process_holds_is_left_for_later(opened, tmp_path, said):
    queue = opened("small")
    first = queue.records()[0]
    holder = subprocess.Popen(["sleep", "60"])
    note = {"pid": holder.pid, "host": platform.node(), "began": lock.process_start(holder.pid), "at": 0.0}
    write_atomic(tmp_path / "runs" / first.key / lock.NAME, json.dumps(note))
    queue.note(heartbeat=1)

    def release(line):
        said.append(line)
        if "left for later" in line:
            holder.kill()
            holder.wait()

    done = work(queue.address, queue.name, root=tmp_path / "runs", tell=release)
    assert (done["finished"], done["busy"]) == (12, 1)


def test_a_worker_asked_to_stop_leaves_a_run_that_it_gave_back_to_who_has_it(opened, tmp_path, said, monkeypatch):
    queue = opened("small")
    others = []

    def busy(attempt, runner):
        """Another process is at it; that one takes the run, and this one is asked to stop."""
        attempt.queue.put_back(attempt.claim, pause=60.0)
        others.append(queue.claim({**identity(), "worker": "another"}))
        monkeypatch.setattr(Queue, "reclaim", interrupt)
        return "busy"

    def interrupt(queue):
        raise KeyboardInterrupt

    monkeypatch.setattr(worker.Attempt, "made", busy)
    with pytest.raises(KeyboardInterrupt):
        worked(queue, tmp_path, said)
    (record,) = (r for r in queue.records() if r.key == others[0].record.key)
    assert (record.status, record.worker["worker"]) == ("running", "another")


def test_the_lock_of_a_worker_elsewhere_is_removed_once_the_store_knows_it_is_dead(opened, tmp_path, said):
    queue = opened("small")
    claim = queue.claim({**identity(), "worker": "elsewhere-17"})
    note = json.dumps({"pid": 17, "host": "elsewhere", "began": "", "at": 0.0})
    write_atomic(tmp_path / "runs" / claim.record.key / lock.NAME, note)
    queue.storage.set_trial_state_values(claim.trial, optuna.trial.TrialState.FAIL)

    def tell(line):
        assert "left for later" not in line

    assert work(queue.address, queue.name, root=tmp_path / "runs", tell=tell) == {"finished": 12}


def test_a_full_disk_is_waited_for_and_leaves_nothing_half_written(opened, tmp_path, said, monkeypatch):
    monkeypatch.setattr(patience, "FIRST", 0.01)
    queue, failures, finish = opened("small"), [1, 2], RunFolder.finish

    def full(folder, result):
        if failures:
            failures.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        finish(folder, result)

    monkeypatch.setattr(RunFolder, "finish", full)
    assert worked(queue, tmp_path, said) == {"finished": 12}
    assert sum("no space is left on the disk" in line and "trying again" in line for line in said) == 2
    failures.extend([1] * 1000)
    plan.init(queue.address, "sweep_toy:staged", tell=said.append)
    with pytest.raises(GaveUp, match="no space is left"):
        work(queue.address, "sweep_toy:staged", root=tmp_path / "more", patience=0.1, tell=said.append)
    other = Queue(queue.address, "sweep_toy:staged")
    assert set(statuses(other)) == {"waiting"}
    other.close()


def test_a_full_disk_under_the_store_is_waited_for_too(opened, tmp_path, said, monkeypatch):
    monkeypatch.setattr(patience, "FIRST", 0.01)
    queue = opened("small")
    with queue.storage.engine.connect() as connection:
        pages = connection.connection.cursor().execute("PRAGMA page_count").fetchone()[0]
    full, tell = [True], queue.tell

    def limit(connection):
        cursor = connection.connection.cursor()
        cursor.execute(f"PRAGMA max_page_count = {pages if full[0] else 2**30}")

    def make_room(line):
        tell(line)
        full[0] = False

    event.listen(queue.storage.engine, "begin", limit)
    queue.tell = make_room
    before = len(queue.records())
    queue.add([plan.again(record) for record in queue.records()] * 8)
    assert len(queue.records()) == 9 * before
    assert any("no space is left on the disk of the store (database or disk is full)" in line for line in said)


@pytest.mark.parametrize("pages", [2, 12])
def test_init_says_that_the_disk_is_full_for_the_tables(place, said, monkeypatch, pages):
    monkeypatch.setattr(database.random, "random", lambda: 0.0)

    def limit(connection, record):
        connection.execute(f"PRAGMA max_page_count = {pages}")

    event.listen(Engine, "connect", limit)
    try:
        with pytest.raises(ConnectionError, match=r"sweeps.db: no space is left on the disk of the store"):
            plan.init(place, "sweep_toy:small", tell=said.append)
    finally:
        event.remove(Engine, "connect", limit)
    assert len(plan.init(place, "sweep_toy:small", tell=said.append)) == 12


def test_init_says_that_the_disk_is_full_for_the_sweep(place, said, monkeypatch):
    def full(**given):
        raise StorageInternalError("while committing") from OperationalError("INSERT", {}, Exception("disk is full"))

    monkeypatch.setattr(optuna, "create_study", full)
    with pytest.raises(ConnectionError, match=r"no space is left on the disk of the store"):
        plan.init(place, "sweep_toy:small", tell=said.append)


def test_patience_is_for_waiting_and_not_for_what_a_run_takes(said, monkeypatch):
    """Neither for the hours before the disk was full nor for those until it is again."""
    clock, steps = [0.0], [3600, 1, 1, 3600, 1]
    monkeypatch.setattr(patience.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(patience.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))

    def call():
        clock[0] += steps.pop(0)
        if steps:
            raise OSError(errno.ENOSPC, "No space left on device")
        return "done"

    assert patience.patiently(call, said.append, 10.0) == "done"
    assert [line.rpartition(" in ")[2] for line in said] == ["0.5 s", "1 s", "2 s", "0.5 s"]
    steps.extend([1] * 99)
    with pytest.raises(GaveUp, match="gave up after 10 s"):
        patience.patiently(call, said.append, 10.0)
    assert len(steps) > 90


def test_recipes_of_other_code_are_not_run(opened, tmp_path, said, monkeypatch):
    queue = opened("small")
    monkeypatch.setattr(Toy, "name", "toy-2")
    with pytest.raises(RuntimeError, match="different versions"):
        worked(queue, tmp_path, said)
    assert set(statuses(queue)) == {"waiting"}


def test_workers_of_other_commits_are_noticed(opened, tmp_path, said, monkeypatch):
    monkeypatch.setenv("MVNGRAD_COMMIT", "aaaa")
    queue = opened("staged")
    for _ in range(3):
        claim = queue.claim(identity())
        queue.finish(claim, {"status": "finished", "validation_loss": 9.0}, 9.0)
    monkeypatch.setenv("MVNGRAD_COMMIT", "bbbb")
    worked(queue, tmp_path, said)
    assert "warning: the sweep was made with commit aaaa, this worker has bbbb" in "\n".join(said)
    assert "warning: 3 runs are of commit aaaa, this worker has bbbb" in "\n".join(said)
    assert "warning: runs of different commit: bbbb (13), aaaa (3)" in export.status(queue)


def test_a_run_that_is_found_finished_keeps_its_commit(opened, tmp_path, said, monkeypatch):
    monkeypatch.setenv("MVNGRAD_COMMIT", "bbbb")
    queue = opened("small")
    early = RunFolder(each(lr=(2.0,))[1], tmp_path / "runs")
    early.begin({"commit": "toy", "torch": torch.__version__})
    early.finish({"status": "finished", "validation_loss": 1.0, "seconds": 9.0})
    worked(queue, tmp_path, said)
    commits = {row["key"]: row["commit"] for row in export.rows(queue)}
    assert commits.pop(early.recipe.key) == "toy"
    assert set(commits.values()) == {"bbbb"}
    assert [line for line in export.status(queue) if "different" in line] == [
        "warning: runs of different commit: bbbb (11), toy (1)"
    ]
    assert not any("code" in row["metrics"] for row in export.rows(queue))
    said.clear()
    worked(queue, tmp_path, said)
    assert "warning: 1 runs are of commit toy, this worker has bbbb" in "\n".join(said)


def test_the_export_has_every_run(opened, tmp_path, said):
    queue = opened("unlucky", unequal=True)
    worked(queue, tmp_path, said)
    for suffix in ("json", "csv"):
        assert export.export(queue, tmp_path / f"runs.{suffix}") == 10
    whole = json.loads((tmp_path / "runs.json").read_text())
    assert (whole["metric"], whole["higher"], len(whole["selected"])) == ("validation_loss", False, 4)
    row = next(row for row in whole["runs"] if row["key"] == whole["selected"]["mvngrad"])
    assert row["settings"]["lr"] == 1.0
    assert (row["status"], row["value"], row["metrics"]["validation_loss"]) == ("finished", 7.0, 7.0)
    assert row["worker"] == f"{platform.node()}-{os.getpid()}"
    assert row["commit"] == identity()["commit"]
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["key"], r["status"]) for r in rows] == [(r["key"], r["status"]) for r in whole["runs"]]
    assert {r["reason"] for r in rows} == {"", "diverged at step 3", "ZeroDivisionError: lr=3.0 is cursed"}
    with pytest.raises(ValueError, match="neither"):
        export.export(queue, tmp_path / "runs.txt")


@pytest.fixture
def do(tmp_path, monkeypatch, capfd):
    """Do `mvngrad sweep ...` in this process; what it says. Workers are processes of their own where they are two."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = signal.getsignal(signal.SIGTERM)

    def do(*arguments, code=0):
        found = main(["sweep", *map(str, arguments), "--storage", f"sqlite:///{tmp_path}/sweeps.db"])
        said = "".join(capfd.readouterr())
        assert found == code, said
        return said

    yield do
    signal.signal(signal.SIGTERM, before)


def test_the_commands_from_the_first_to_the_last(do, tmp_path):
    runs = ("--runs", tmp_path / "runs", "--device", "cpu")
    assert "there is no sweep in" in do("status", code=2)
    assert "there is no sweep 'mnist-7k'; choose of" in do("init", "mnist-7k", code=2)
    assert not (tmp_path / "sweeps.db").exists()
    assert "8 configurations are new" in do("init", "sweep_toy:staged", "--heartbeat", "1")
    assert "has no sweep 'mnist' (it has: sweep_toy:staged)" in do("select", "mnist", code=2)
    assert "worker 2: " in do("work", "sweep_toy:staged", "--workers", "2", *runs)
    assert "sweep_toy:staged: 16 finished" in do("status")
    assert "4 runs are new" in do("rerun", "sweep_toy:staged", "--seeds", "2")
    assert "4 are left, about 0.0 minutes of one worker at 0 s each" in do("status")
    do("work", "sweep_toy:staged", *runs)
    assert "adam: 1.0625 ± 0.08839 over 2 seeds" in do("select", "sweep_toy:staged")
    assert "20 runs are in" in do("export", "sweep_toy:staged", tmp_path / "all.json")


@pytest.mark.parametrize("workers", [1, 2])
def test_work_fails_if_a_run_of_it_raised_and_not_if_one_diverged(do, tmp_path, workers):
    runs = ("--workers", workers, "--runs", tmp_path / "runs", "--device", "cpu")
    do("init", "sweep_toy:unlucky", "--unequal", "--heartbeat", "1")
    assert " raised" in do("work", "sweep_toy:unlucky", *runs, code=1)
    assert "nothing was left" in do("work", "sweep_toy:unlucky", *runs)
    do("retry", "sweep_toy:unlucky")
    do("work", "sweep_toy:unlucky", *runs, code=1)


SPEAKING = """
import sweep_toy
from dataclasses import replace

def run(recipe, **given):
    print("begins", end=" ")
    print(recipe.key)
    return sweep_toy.run(recipe, **given)

def sweep():
    return replace(sweep_toy.staged(), run="speaking:run")
"""


def test_of_several_workers_every_line_says_whose_it_is(do, tmp_path, monkeypatch):
    (tmp_path / "speaking.py").write_text(SPEAKING)
    monkeypatch.syspath_prepend(str(tmp_path))
    do("init", "speaking:sweep", "--heartbeat", "1")
    said = do("work", "speaking:sweep", "--workers", "2", "--runs", tmp_path / "runs", "--device", "cpu")
    assert all(re.match("worker [12]: [a-z]", line) for line in said.splitlines()), said
    assert sum(": begins toy-" in line for line in said.splitlines()) == 16


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("work", "--slurm-options", "timeout_min=5"), "--slurm-options is for --slurm"),
        (("work", "--slurm", "2", "--workers", "4"), "--workers is for one machine"),
        (("work", "--slurm", "-2"), "slurm=-2"),
        (("work", "--workers", "0"), "workers=0"),
        (("rerun", "--seeds", "0"), "seeds=0"),
    ],
)
def test_options_that_would_do_nothing_are_refused(do, options, told):
    do("init", "sweep_toy:small")
    assert told in do(options[0], "sweep_toy:small", *options[1:], code=2)


def test_workers_of_a_machine_are_dealt_over_its_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [crew._device("auto", index) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert crew._device("cpu", 1) == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert crew._device("auto", 1) == "cpu"
    with pytest.raises(ValueError, match="sees no GPU"):
        crew._device("cuda", 0)


def test_a_signal_waits_for_the_end_of_a_block_and_a_second_one_does_not():
    done = []

    def asked(times):
        with undisturbed():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            done.append(times)

    with pytest.raises(KeyboardInterrupt):
        asked(1)
    with pytest.raises(KeyboardInterrupt):
        asked(2)
    assert done == [1]


def test_status_says_how_much_of_their_time_workers_trained(opened, said):
    """Two runs of one worker, with a second between them, and one of another, which says nothing about that."""
    times = {"a": [(0, 4.0, 3.5), (5, 5.0, 9.0)], "b": [(0, 1.0, 0.1)]}
    queue = opened("small")
    assert not any("of their time" in line for line in export.status(queue))
    for name, runs in times.items():
        for start, length, trained in runs:
            claim = queue.claim({**identity(), "worker": name})
            began = f"2026-01-01T00:00:{start:02d}+00:00"
            outcome = {"status": "finished", "began": began, "worker_seconds": length, "seconds": trained}
            assert queue.finish(claim, outcome, 1.0)
    claim = queue.claim({**identity(), "worker": "a"})
    found = {"status": "finished", "began": "2026-01-01T00:01:00+00:00", "worker_seconds": 0.01, "seconds": 9.0}
    assert queue.finish(claim, {**found, "code": {}}, 1.0)  # finished before
    (line,) = (line for line in export.status(queue) if "of their time" in line)
    assert line.startswith("workers trained 85% of their time")
