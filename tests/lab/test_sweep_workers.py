"""Workers that die, freeze and come back: every configuration ends once, none is lost. On both kinds of store."""

import signal
import sqlite3
from collections import Counter

import pytest
from postgres import server  # noqa: F401
from sweep_toy import at_work, command, crowd, finished, kill, wait_for

from mvngrad.lab.sweep.address import address
from mvngrad.lab.sweep.plan import init
from mvngrad.lab.sweep.queue import Queue
from mvngrad.lab.sweep.records import by_key

NAME = "sweep_toy:crowd"


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request, tmp_path):
    """The URL of an empty store, and what restarts its server."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/sweeps.db", lambda: None
    found = request.getfixturevalue("server")

    def restart():
        found.stop()
        found.start()

    return found.url, restart


def start(url, root):
    return command("work", NAME, "--runs", root, "--device", "cpu", MVNGRAD_STORAGE=url)


def freeze(worker, url, root):
    """Stop a process in the middle of a run; the run's folder. Not in a transaction: it would hold SQLite's lock."""
    while True:
        wait_for(lambda: at_work(root, worker.pid))
        kill(worker, signal.SIGSTOP)
        if (folder := at_work(root, worker.pid)) and (url.startswith("postgresql") or writable(address(url).file)):
            return folder
        kill(worker, signal.SIGCONT)


def writable(path):
    connection = sqlite3.connect(path, timeout=1.0, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return False
    finally:
        connection.close()
    return True


def test_killed_frozen_and_restarted_workers_finish_every_configuration_once(store, tmp_path):
    url, restart = store
    root = tmp_path / "runs"
    init(address(url), NAME, heartbeat=1, grace=3, tell=lambda text: None)
    workers = [start(url, root) for _ in range(4)]
    dead, frozen, alive = workers[:2], workers[2], workers[3]
    resumed = {}
    for each in dead:
        resumed[each.pid] = freeze(each, url, root)
        kill(each)
    held = freeze(frozen, url, root)
    restart()
    queue = Queue(address(url), NAME, tell=lambda text: None)
    # The living worker finds the others silent, and queues their runs again.
    wait_for(lambda: any((r.key, r.status) == (held.name, "lost") for r in queue.records()))
    kill(frozen, signal.SIGCONT)
    wait_for(lambda: (held / "result.json").exists())
    for each in workers[2:]:
        kill(each)
    said = finished(frozen) + finished(alive)
    assert "silent; queued again" in said
    for each in dead:
        each.wait()
        each.stdout.close()

    last = [start(url, root) for _ in range(4)]
    for each in last:
        text = finished(each)
        assert each.returncode == 0, text
    records = queue.records()
    queue.close()
    expected = {recipe.key for recipe in crowd().stages[0]}
    assert len(expected) == 64
    assert Counter(r.key for r in records if r.status == "finished") == Counter(expected)
    assert {r.status for r in by_key(records).values()} == {"finished"}
    assert {r.status for r in records} <= {"finished", "lost", "double"}
    for pid, folder in resumed.items():
        first, *others = (line.split() for line in (folder / "log").read_text().splitlines())
        assert first == [str(pid), "0"]
        assert others
        assert all(int(step) >= 2 for _, step in others)
