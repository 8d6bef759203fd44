"""Two processes never train one run: a living process keeps its folder, the lock of a dead one is replaced."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tiny import Tiny, TinyTask

from mvngrad_lab.store import lock
from mvngrad_lab.store.lock import Locked, lock_folder
from mvngrad_lab.training.events import EpochEnd
from mvngrad_lab.training.train import Interrupted, train

STALE = json.dumps({"pid": os.getpid(), "host": lock.platform.node(), "began": "an earlier time"})
"""Of a process that has ended, whose id this one has now."""
HOLD = """
import sys
from pathlib import Path
from mvngrad_lab.store.lock import Locked, lock_folder
while not print("ready", flush=True) and sys.stdin.readline():
    try:
        with lock_folder(Path(sys.argv[1])):
            print("held", flush=True)
            sys.stdin.readline()
    except Locked:
        print("locked", flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def process(tmp_path):
    """Start processes that lock the folder when they read a line, and unlock it at the next."""
    processes = []

    def process():
        command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=0))
        return processes[-1]

    yield process
    for each in processes:
        each.kill()
        each.communicate()


def read_line(process):
    return process.stdout.readline().strip()


@pytest.fixture
def holder(process):
    holder = process()
    holder.stdin.write("\n")
    assert [read_line(holder), read_line(holder)] == ["ready", "held"]
    return holder


def test_a_living_process_keeps_its_folder(tmp_path, holder):
    with pytest.raises(Locked, match=f"in use by process {holder.pid} on this machine"), lock_folder(tmp_path / "run"):
        pass
    assert json.loads((tmp_path / "run" / "lock").read_text())["pid"] == holder.pid
    assert not (tmp_path / "run" / lock.TAKEOVER).exists()


def test_training_is_refused_while_another_process_trains(tmp_path, holder):
    (tmp_path / "run").rename(tmp_path / Tiny().key)
    with pytest.raises(Locked, match=str(holder.pid)):
        train(Tiny(), root=tmp_path, task=TinyTask)
    holder.kill()
    holder.wait()
    assert train(Tiny(), root=tmp_path, task=TinyTask, on_event=id).result["status"] == "finished"


@pytest.mark.parametrize("reaped", [True, False])
def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, holder, reaped):
    holder.kill()
    if reaped:
        holder.wait()
    else:  # a zombie still has its process id
        while lock.process_start(holder.pid) is not None:
            time.sleep(0.01)
    with lock_folder(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / "lock").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "run").exists()


def test_only_one_of_many_processes_takes_over(tmp_path, process, holder):
    dead = (tmp_path / "run" / "lock").read_text()
    holder.kill()
    holder.wait()
    others = [process() for _ in range(4)]
    for _ in range(50):
        assert [read_line(other) for other in others] == ["ready"] * 4
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "lock").write_text(dead)
        for other in others:
            other.stdin.write("\n")
        assert sorted(read_line(other) for other in others) == ["held", "locked", "locked", "locked"]
        for other in others:
            other.stdin.write("\n")


def test_a_lock_of_another_machine_or_program_is_left_to_the_user(tmp_path):
    path = tmp_path / "lock"
    path.write_text(json.dumps({"pid": 1, "host": "elsewhere", "began": "1"}))
    with pytest.raises(Locked, match=r"process 1 on elsewhere; wait for it, or delete .*lock"), lock_folder(tmp_path):
        pass
    path.write_text("something else")
    with pytest.raises(Locked, match="not a lock file"), lock_folder(tmp_path):
        pass
    path.unlink()
    with lock_folder(tmp_path):
        (tmp_path / "result.json").write_text("{}")
    assert [left.name for left in tmp_path.iterdir()] == ["result.json"]


FULL = """
import resource, sys
from pathlib import Path
from mvngrad_lab.store.lock import lock_folder
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # every write fails, as on a full disk
try:
    with lock_folder(Path(sys.argv[1])):
        print("locked")
except OSError as error:
    print(type(error).__name__, error.filename)
"""


@pytest.mark.parametrize("dead", [False, True], ids=["new", "taken over"])
def test_a_full_disk_leaves_no_lock_behind(tmp_path, dead):
    """Of a dead process, whose id is this one's by now, the old one."""
    if dead:
        (tmp_path / "lock").write_text(STALE)
    out = subprocess.run([sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, check=True).stdout
    assert out == f"OSError {tmp_path / 'lock'}\n"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("lock", STALE)] * dead
    with lock_folder(tmp_path):
        pass


def test_empty_lock_files_have_no_owner(tmp_path):
    """A full disk leaves them on a file system without hard links."""
    for name in (lock.LOCK_FILE, lock.TAKEOVER):
        (tmp_path / name).touch()
    with lock_folder(tmp_path) as check:
        check()
    assert not tmp_path.exists()


@pytest.mark.parametrize("content", [b"{}", b"[]", b"1", b"\xff\xfe"])
def test_a_lock_of_another_program_is_refused_with_the_remedy(tmp_path, content):
    (tmp_path / lock.LOCK_FILE).write_bytes(content)
    with pytest.raises(Locked, match="not a lock file of this program; if no process uses it, delete it"):
        lock_folder(tmp_path).__enter__()
    assert (tmp_path / lock.LOCK_FILE).read_bytes() == content


@pytest.mark.parametrize("no_hard_links", [None, "EPERM", "ENOTSUP", "ENOSYS", "EMLINK"])
def test_one_process_does_not_hold_a_folder_twice(tmp_path, monkeypatch, no_hard_links):
    """On a file system with hard links, and on those that answer link() with an error."""

    def refuse(*paths):
        raise OSError(getattr(errno, no_hard_links), "no hard links")

    if no_hard_links:
        monkeypatch.setattr(os, "link", refuse)
    with lock_folder(tmp_path), pytest.raises(Locked, match=str(os.getpid())), lock_folder(tmp_path):
        pass


@pytest.mark.parametrize("successor", ["another's lock", None], ids=["at work", "done"])
def test_a_process_that_lost_its_lock_notices_and_leaves_the_new_one(tmp_path, successor):
    path = tmp_path / "run" / "lock"
    with lock_folder(tmp_path / "run") as check:
        check()
        path.unlink()
        if successor is not None:
            path.write_text(successor)
        with pytest.raises(Locked, match="taken by another process, because this one seemed dead"):
            check()
    assert (path.read_text() if path.exists() else None) == successor


def test_two_locks_of_one_process_are_not_the_same(tmp_path):
    with lock_folder(tmp_path):
        first = (tmp_path / "lock").read_text()
    with lock_folder(tmp_path):
        assert (tmp_path / "lock").read_text() != first


def test_a_training_that_lost_its_lock_writes_nothing_more(tmp_path):
    folder, seen = tmp_path / Tiny().key, []

    def take_over(event):
        """After the first row; the next process has started to write a checkpoint."""
        if isinstance(event, EpochEnd) and not seen:
            (folder / "lock").write_text("another's lock")
            (folder / "checkpoints").mkdir(exist_ok=True)
            (folder / "checkpoints" / ".partial.elsewhere-1").write_text("half of it")
            seen.extend(contents(folder))

    def contents(folder):
        return sorted((path.name, path.read_bytes()) for path in folder.rglob("*") if path.is_file())

    with pytest.raises(Locked, match="seemed dead"):
        train(Tiny(), root=tmp_path, task=TinyTask, on_event=take_over, checkpoint_every=0)
    assert len(seen) > 4
    assert contents(folder) == seen


def test_a_training_that_lost_its_lock_still_obeys_a_signal(tmp_path):
    def stopped(event):
        if isinstance(event, EpochEnd):
            (tmp_path / Tiny().key / "lock").write_text("another's lock")
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(Tiny(), root=tmp_path, task=TinyTask, on_event=stopped)
    assert not list(tmp_path.rglob("step-*"))
