"""Workers that die, freeze and come back: every configuration ends once, none is lost. On both kinds of store."""

import signal
from collections import Counter

import pytest
from postgres import server  # noqa: F401
from sweep_toy import at_work, command, crowd, finished, freeze, kill, wait_for, writable

from mvngrad_lab.sweep.address import address
from mvngrad_lab.sweep.plan import init
from mvngrad_lab.sweep.queue import Queue
from mvngrad_lab.sweep.records import by_key

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


def frozen_at_work(worker, url, root):
    """Stop a process in the middle of a run, and of no transaction; the run's folder."""
    wait_for(lambda: at_work(root, worker.pid))
    free = url.startswith("postgresql")
    return freeze(worker, lambda: (free or writable(address(url).file)) and at_work(root, worker.pid))


def test_killed_frozen_and_restarted_workers_finish_every_configuration_once(store, tmp_path):
    url, restart = store
    root = tmp_path / "runs"
    init(address(url), NAME, heartbeat=1, grace=3, tell=lambda text: None)
    workers = [start(url, root) for _ in range(4)]
    dead, frozen, alive = workers[:2], workers[2], workers[3]
    resumed = {}
    for each in dead:
        resumed[each.pid] = frozen_at_work(each, url, root)
        kill(each)
    held = frozen_at_work(frozen, url, root)
    restart()
    queue = Queue(address(url), NAME, tell=lambda text: None)
    # The living worker finds the others silent, and queues their runs again.
    wait_for(lambda: any((r.key, r.status) == (held.name, "lost") for r in queue.records()))
    kill(frozen, signal.SIGCONT)
    woken = f"{held.name}: this worker was thought dead, and the run is queued again"
    assert any(woken in line for line in frozen.stdout)
    for each in (frozen, alive):
        wait_for(lambda worker=each: at_work(root, worker.pid) or worker.poll() is not None)
        kill(each)
    said = [finished(each) for each in workers]
    assert "silent; queued again" in said[3]
    others = [start(url, root) for _ in range(2)]
    said = [finished(each) for each in others]
    assert {each.returncode for each in others} == {0}, said
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
