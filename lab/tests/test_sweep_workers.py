"""Workers that fail, die and come back: every configuration ends once, none is lost."""

import errno
import json
import platform
import signal
import subprocess
import sys
from collections import Counter

import optuna
import pytest
import torch
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState
from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError
from sweep_toy import Toy, loss, make_sweep, run, silence, small, staged, toys, unlucky, wait_for

from mvngrad_lab.store import RunFolder, lock, write_atomic
from mvngrad_lab.sweep import database, worker
from mvngrad_lab.sweep.database import RetriesExhausted
from mvngrad_lab.sweep.function_code import describe_function
from mvngrad_lab.sweep.local_workers import PrefixedStream
from mvngrad_lab.sweep.queue import Queue
from mvngrad_lab.sweep.stages import requeue_errors
from mvngrad_lab.sweep.summary import describe_status, make_rows
from mvngrad_lab.sweep.worker import defer_signals, describe_worker

# Runs that fail


def test_a_run_that_diverges_or_raises_is_a_result_and_the_worker_continues(toy):
    toy.init(unlucky(), unequal=True)
    assert toy.work() == {"finished": 4, "diverged": 4, "raised": 2}
    reasons = {record.status: record.outcome.get("reason") for record in toy.queue.records()}
    assert reasons["diverged"] == "diverged at step 3"
    assert reasons["raised"] == "ZeroDivisionError: lr=3.0 is cursed"
    assert {record.value for record in toy.queue.records() if record.status != "finished"} == {None}
    assert "4 x diverged at step 3" in describe_status(toy.queue)
    assert toy.work() == {}
    assert len(requeue_errors(toy.queue)) == 2
    assert toy.work() == {"raised": 2}


def test_a_worker_for_which_every_run_raises_stops_and_leaves_the_rest(toy):
    toy.init(make_sweep(toys(lr=range(3), fate=("raises",))))
    with pytest.raises(RuntimeError, match=r"3 runs in a row raised.*lr=0.* is cursed.*sweep retry"):
        toy.work()
    assert toy.statuses() == ["raised"] * 3 + ["waiting"] * 9
    assert {r.optimizer for r in toy.queue.records() if r.status == "raised"} == {"adam", "laprop", "adabelief"}


def test_an_optimizer_that_cannot_run_does_not_stop_the_others(toy):
    recipes = toys(["adam"], lr=range(9), fate=("raises",)) + toys(["mvngrad"], lr=range(3))
    toy.init(make_sweep(recipes), unequal=True)
    with pytest.raises(RuntimeError, match="3 runs in a row raised"):
        toy.work()
    assert toy.statuses() == ["finished"] * 3 + ["raised"] * 6 + ["waiting"] * 3


def test_a_result_without_the_metric_says_which_it_has(toy):
    toy.init(make_sweep(toys(), metric="validation_accuracy"))
    with pytest.raises(RuntimeError, match="in a row"):
        toy.work()
    reason = next(record.outcome["reason"] for record in toy.queue.records() if record.outcome)
    assert "no 'validation_accuracy'" in reason
    assert "test_loss" in reason


# Runs that are queued twice, and workers that die between two lines


@pytest.mark.parametrize(("fate", "status"), [("", "finished"), ("diverges", "diverged")])
def test_a_configuration_that_was_queued_twice_is_run_once(toy, fate, status):
    toy.init(make_sweep(toys(lr=(1.0, 2.0), fate=(fate,))))
    toy.queue.add([record.entry for record in toy.queue.records()])
    assert toy.work() == {status: 8}
    assert Counter(record.status for record in toy.queue.records()) == {"duplicate": 8, status: 8}
    assert len(make_rows(toy.queue)) == 8


def test_a_worker_that_dies_before_its_second_heartbeat_loses_nothing(toy):
    toy.init(small())
    claim = toy.queue.claim(describe_worker())
    silence(toy.queue, claim.record.key)
    toy.queue.requeue_silent()
    assert f"{claim.record.key}: its worker is silent; queued again" in toy.messages
    assert [r.status for r in toy.queue.records() if r.key == claim.record.key] == ["lost", "waiting"]
    assert toy.work() == {"finished": 12}


def test_a_worker_killed_on_this_machine_is_replaced_at_once(toy):
    """However long the grace is. A process with the same number on another machine is another process."""
    toy.init(small(), heartbeat=60, grace=600)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dying = {**describe_worker(), "pid": str(process.pid), "began": lock.process_start(process.pid)}
    claims = [toy.queue.claim(each) for each in (dying, {**dying, "machine": "another"}, describe_worker())]
    assert not toy.queue.requeue_ended()
    assert toy.statuses().count("running") == 3
    process.kill()
    process.communicate()
    assert toy.queue.requeue_ended()
    assert not toy.queue.requeue_ended()
    assert [r.key for r in toy.queue.records() if r.status == "lost"] == [claims[0].record.key]
    output = [line for line in toy.messages if "queued again" in line]
    assert output == [f"{claims[0].record.key}: its worker has ended; queued again"]


def test_an_idle_worker_says_which_others_it_waits_for(toy):
    toy.init(make_sweep([Toy(optimizer="adam")]), heartbeat=1)
    claim = toy.queue.claim({**describe_worker(), "worker": "elsewhere-17", "machine": "another"})

    def say(line):
        toy.messages.append(line)
        if "waits for" in line:
            toy.queue.finish(claim, {"status": "diverged", "reason": "it ends"}, None)

    assert toy.work(say=say) == {}
    assert sum("waits for" in line and "(elsewhere-17)" in line for line in toy.messages) == 1


def test_after_the_store_was_away_other_workers_may_send_a_heartbeat_first(toy):
    toy.init(small(), heartbeat=1)
    claim, queue = toy.queue.claim(describe_worker()), toy.queue
    silence(queue, claim.record.key)
    queue._postpone_requeue()
    queue.requeue_silent()
    assert "lost" not in toy.statuses()
    stale = queue.storage._get_stale_trial_ids
    assert stale(queue.study._study_id) == [claim.trial]
    with queue.send_heartbeats(claim):
        wait_for(lambda: stale(queue.study._study_id) == [])
    queue.requeue_from = 0.0
    queue.requeue_silent()
    assert "lost" not in toy.statuses()
    assert queue.finish(claim, {"status": "finished"}, 1.0)


@pytest.mark.parametrize("outcome", [None, {"status": "finished", "validation_loss": 0.0}])
def test_a_worker_that_dies_between_the_transactions_of_an_end_loses_nothing(toy, outcome):
    """After it failed a dead worker's trial and before it queued the run again, or after it wrote an outcome."""
    toy.init(small())
    claim = toy.queue.claim(describe_worker())
    if outcome is not None:
        toy.queue.storage.set_trial_user_attr(claim.trial, "outcome", outcome)
    toy.queue.storage.set_trial_state_values(claim.trial, TrialState.FAIL)
    assert toy.statuses()[0] == "lost"
    assert toy.work() == {"finished": 12}


def test_a_worker_that_was_thought_dead_changes_nothing_when_it_wakes(toy):
    toy.init(small())
    claim = toy.queue.claim(describe_worker())
    toy.queue.storage.set_trial_state_values(claim.trial, TrialState.FAIL)
    assert not toy.queue.finish(claim, {"status": "finished"}, 1.0)
    toy.queue.release(claim)
    assert [r.status for r in toy.queue.records() if r.key == claim.record.key] == ["lost"]


# Locks, and signals


def write_lock(toy, key, **holder):
    write_atomic(toy.root / key / lock.LOCK_FILE, json.dumps({"at": 0.0, **holder}))


def test_a_run_that_another_process_holds_is_left_for_later(toy):
    toy.init(small(), heartbeat=1)
    holder = subprocess.Popen(["sleep", "600"])
    key = toy.queue.records()[0].key
    write_lock(toy, key, pid=holder.pid, host=platform.node(), began=lock.process_start(holder.pid))

    def release(line):
        if "left for later" in line:
            holder.kill()
            holder.wait()

    assert toy.work(say=release) == {"finished": 12, "busy": 1}


def test_a_run_with_a_lock_of_another_program_is_left_for_later(toy):
    toy.init(small(), heartbeat=1)
    path = toy.root / toy.queue.records()[0].key / lock.LOCK_FILE
    write_atomic(path, "{}")

    def delete(line):
        if "left for later" in line:
            path.unlink()

    assert toy.work(say=delete) == {"finished": 12, "busy": 1}


def test_the_lock_of_a_worker_elsewhere_is_removed_once_the_store_calls_it_dead(toy):
    toy.init(small())
    claim = toy.queue.claim({**describe_worker(), "worker": "elsewhere-17"})
    write_lock(toy, claim.record.key, pid=17, host="elsewhere", began="")
    toy.queue.storage.set_trial_state_values(claim.trial, TrialState.FAIL)
    assert toy.work() == {"finished": 12}
    assert not any("left for later" in line for line in toy.messages)


def test_a_worker_asked_to_stop_does_not_take_back_a_run_that_another_has_by_now(toy, monkeypatch):
    toy.init(small())
    others = []

    def busy(queue, claim, run, options):
        """Another process has the lock; it claims the run, and this one is asked to stop."""
        queue.release(claim, pause=60.0)
        others.append(toy.queue.claim({**describe_worker(), "worker": "another"}))
        monkeypatch.setattr(Queue, "requeue_silent", interrupt)
        return {"status": "busy"}

    def interrupt(queue):
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "run_claim", busy)
    with pytest.raises(KeyboardInterrupt):
        toy.work()
    (record,) = (r for r in toy.queue.records() if r.key == others[0].record.key)
    assert (record.status, record.worker["worker"]) == ("running", "another")


def test_the_last_line_of_a_worker_is_printed_without_its_end_too(capsys):
    with PrefixedStream(sys.stdout, "worker 1: ") as lines:
        print("one\ntwo", end="", file=lines)
    assert capsys.readouterr().out == "worker 1: one\nworker 1: two\n"


def test_a_signal_is_deferred_to_the_end_of_a_block_and_a_second_one_is_not():
    done = []

    def raise_signals(times):
        with defer_signals():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            done.append(times)

    with pytest.raises(KeyboardInterrupt):
        raise_signals(1)
    with pytest.raises(KeyboardInterrupt):
        raise_signals(2)
    assert done == [1]


# Full disks


def test_a_full_disk_is_waited_for_and_leaves_nothing_half_written(toy, monkeypatch):
    monkeypatch.setattr(database, "FIRST_WAIT", 0.01)
    toy.init(small())
    failures, finish = [1, 2], RunFolder.finish

    def full(slot, result):
        if failures:
            failures.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        finish(slot, result)

    monkeypatch.setattr(RunFolder, "finish", full)
    assert toy.work() == {"finished": 12}
    assert sum("no space is left on the disk" in line and "trying again" in line for line in toy.messages) == 2
    failures.extend([1] * 1000)
    toy.init(make_sweep(toys(lr=(8.0,))), unequal=True)
    with pytest.raises(RetriesExhausted, match="no space is left"):
        toy.work(patience=0.1)
    assert Counter(toy.statuses()) == {"finished": 12, "waiting": 4}


def test_a_full_disk_under_the_store_is_waited_for_too(toy, monkeypatch):
    monkeypatch.setattr(database, "FIRST_WAIT", 0.01)
    toy.init(small())
    queue = toy.queue
    with queue.storage.engine.connect() as connection:
        pages = connection.connection.cursor().execute("PRAGMA page_count").fetchone()[0]
    full, say = [True], queue.say

    def limit(connection):
        cursor = connection.connection.cursor()
        cursor.execute(f"PRAGMA max_page_count = {pages if full[0] else 2**30}")

    def make_room(line):
        say(line)
        full[0] = False

    event.listen(queue.storage.engine, "begin", limit)
    queue.say = make_room
    queue.add([record.entry for record in queue.records()] * 8)
    assert len(queue.records()) == 9 * 12
    assert any("no space is left on the disk of the store (database or disk is full)" in line for line in toy.messages)


@pytest.mark.parametrize("pages", [2, 12])
def test_init_says_that_the_disk_is_full_for_the_tables(toy, monkeypatch, pages):
    monkeypatch.setattr(database.random, "random", lambda: 0.0)

    def limit(connection, record):
        connection.execute(f"PRAGMA max_page_count = {pages}")

    event.listen(Engine, "connect", limit)
    try:
        with pytest.raises(ConnectionError, match=r"sweeps.db: no space is left on the disk of the store"):
            toy.init(small())
    finally:
        event.remove(Engine, "connect", limit)
    assert len(toy.init(small())) == 12


def test_init_says_that_the_disk_is_full_for_the_sweep(toy, monkeypatch):
    def full(**options):
        raise StorageInternalError("while committing") from OperationalError("INSERT", {}, Exception("disk is full"))

    monkeypatch.setattr(optuna, "create_study", full)
    with pytest.raises(ConnectionError, match=r"no space is left on the disk of the store"):
        toy.init(small())


def test_patience_is_for_waiting_and_not_for_the_duration_of_a_run(monkeypatch):
    """Neither for the hours before the disk was full nor for those until it is full again."""
    clock, durations, output = [0.0], [3600, 1, 1, 3600, 1], []
    monkeypatch.setattr(database.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(database.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))

    def call():
        clock[0] += durations.pop(0)
        if durations:
            raise OSError(errno.ENOSPC, "No space left on device")
        return "done"

    assert database.call_with_retries(call, output.append, 10.0) == "done"
    assert [line.rpartition(" in ")[2] for line in output] == ["0.5 s", "1 s", "2 s", "0.5 s"]
    durations.extend([1] * 99)
    with pytest.raises(RetriesExhausted, match="gave up after 10 s"):
        database.call_with_retries(call, output.append, 10.0)
    assert len(durations) > 90


# Code


def test_recipes_of_other_code_are_not_run(toy, monkeypatch):
    toy.init(small())
    monkeypatch.setattr(Toy, "name", "toy-2")
    with pytest.raises(RuntimeError, match="different versions"):
        toy.work()
    assert set(toy.statuses()) == {"waiting"}


@pytest.mark.parametrize(
    ("maker", "settings"),
    [
        ("os:system", {"command": "touch FILE"}),
        ("subprocess:run", {"args": ["touch", "FILE"]}),
        ("pathlib:Path.touch", {"self": "FILE"}),
        ("sweep_toy:command", {}),  # of the sweep's own module, and not a recipe
        ("mvngrad_lab.recipe:Recipe", {}),
        ("nowhere:Recipe", {}),
    ],
)
def test_a_store_cannot_name_code_to_run(toy, tmp_path, maker, settings):
    toy.init(small())
    settings = json.loads(json.dumps(settings).replace("FILE", str(tmp_path / "executed")))
    attack = {"key": "toy-attack", "stage": "1", "maker": maker, "settings": settings}
    toy.queue.add([attack])
    toy.queue.write_notes(run="os:system")
    with pytest.raises(RuntimeError, match=f"cannot make the recipe of toy-attack: .*{maker}' is not a recipe class"):
        toy.work()
    assert not (tmp_path / "executed").exists()
    assert [r.status for r in toy.queue.records() if r.key == "toy-attack"] == ["waiting"]


def test_workers_of_other_commits_are_noticed(toy, monkeypatch):
    monkeypatch.setenv("MVNGRAD_COMMIT", "aaaa")
    toy.init(staged())
    for _ in range(3):
        toy.queue.finish(toy.queue.claim(describe_worker()), {"status": "finished"}, 9.0)
    monkeypatch.setenv("MVNGRAD_COMMIT", "bbbb")
    toy.work()
    assert "warning: the sweep was made with commit aaaa, this worker has bbbb" in "\n".join(toy.messages)
    assert "warning: 3 runs are of commit aaaa, this worker has bbbb" in "\n".join(toy.messages)
    assert "warning: runs of different commit: bbbb (13), aaaa (3)" in describe_status(toy.queue)


def test_workers_of_another_version_of_the_sweeps_function_are_noticed(toy):
    toy.init(staged())
    for _ in range(3):
        toy.queue.finish(toy.queue.claim(describe_worker(loss)), {"status": "finished"}, 9.0)
    toy.work()
    before, now = (" ".join(describe_function(function).values()) for function in (loss, run))
    assert f"warning: 3 runs are of function {before}, this worker has {now}" in "\n".join(toy.messages)
    assert f"warning: runs of different function: {now} (13), {before} (3)" in describe_status(toy.queue)
    assert {row["function"] for row in make_rows(toy.queue)} == {before, now}  # for the report of an export


def test_a_run_finished_before_the_worker_took_it_keeps_its_commit(toy, monkeypatch):
    monkeypatch.setenv("MVNGRAD_COMMIT", "bbbb")
    toy.init(small())
    early = RunFolder(toys(lr=(2.0,))[1], toy.root)
    early.start({"commit": "toy", "torch": torch.__version__})
    early.finish({"status": "finished", "validation_loss": 1.0, "seconds": 9.0})
    toy.work()
    rows = make_rows(toy.queue)
    commits = {row["key"]: row["commit"] for row in rows}
    assert commits.pop(early.recipe.key) == "toy"
    assert set(commits.values()) == {"bbbb"}
    warnings = [line for line in describe_status(toy.queue) if "different" in line]
    assert warnings == ["warning: runs of different commit: bbbb (11), toy (1)"]
    assert not any("code" in row["metrics"] for row in rows)
    toy.messages.clear()
    toy.work()
    assert "warning: 1 runs are of commit toy, this worker has bbbb" in "\n".join(toy.messages)
