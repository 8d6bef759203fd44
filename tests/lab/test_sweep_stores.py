"""Both kinds of store: many at once, a server that goes away, and a password that nobody gets to see."""

import re
import signal
from collections import Counter

import pytest
from postgres import server  # noqa: F401
from sweep_toy import command, finished, kill, wait_for

from mvngrad.lab.sweep.address import address
from mvngrad.lab.sweep.plan import init
from mvngrad.lab.sweep.queue import Queue

SILENT = {"tell": lambda text: None}


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/sweeps.db"
    return request.getfixturevalue("server").url


def counts(url, name):
    queue = Queue(address(url), name, **SILENT)
    found = Counter(record.status for record in queue.records())
    queue.close()
    return found


def test_inits_at_the_same_time_queue_each_configuration_once(url, tmp_path):
    starting = [command("init", "sweep_toy:small", "--heartbeat", "1", MVNGRAD_STORAGE=url) for _ in range(3)]
    texts = [finished(process) for process in starting]
    assert all(process.returncode == 0 for process in starting), texts
    worker = command("work", "sweep_toy:small", "--runs", tmp_path / "runs", "--device", "cpu", MVNGRAD_STORAGE=url)
    text = finished(worker)
    assert worker.returncode == 0, text
    found = counts(url, "sweep_toy:small")
    assert found.pop("finished") == 12
    assert found.keys() <= {"double"}


def test_eight_workers_share_one_file(tmp_path):
    url = f"sqlite:///{tmp_path}/sweeps.db"
    init(address(url), "sweep_toy:quick", heartbeat=1, grace=60, **SILENT)
    arguments = ("work", "sweep_toy:quick", "--workers", "8", "--runs", tmp_path / "runs", "--device", "cpu")
    process = command(*arguments, MVNGRAD_STORAGE=url)
    text = finished(process)
    assert process.returncode == 0, text
    assert not re.search("locked|error|does not answer|later|thought dead", text, re.IGNORECASE), text
    assert counts(url, "sweep_toy:quick") == {"finished": 64}


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_asked_to_stop_leave_their_runs_to_the_next(workers, tmp_path):
    url, root = f"sqlite:///{tmp_path}/sweeps.db", tmp_path / "runs"
    init(address(url), "sweep_toy:crowd", heartbeat=1, grace=60, **SILENT)
    arguments = ("work", "sweep_toy:crowd", "--workers", workers, "--runs", root, "--device", "cpu")
    process = command(*arguments, MVNGRAD_STORAGE=url)
    wait_for(lambda: len(list(root.glob("*/log"))) > workers)
    kill(process, signal.SIGTERM)
    assert "Interrupted" in finished(process)
    assert process.returncode == 130
    found = counts(url, "sweep_toy:crowd")
    assert found.keys() == {"finished", "waiting"}, found


def test_a_server_that_goes_away_is_waited_for(server, tmp_path):  # noqa: F811
    init(address(server.url), "sweep_toy:quick", heartbeat=1, grace=60, **SILENT)
    arguments = ("work", "sweep_toy:quick", "--runs", tmp_path / "runs", "--device", "cpu")
    process = command(*arguments, MVNGRAD_STORAGE=server.url)
    wait_for(lambda: list((tmp_path / "runs").glob("*/result.json")))
    server.stop()
    said = []
    for line in process.stdout:
        said.append(line)
        if "trying again in 1 s" in line:
            break
    gone = command("status", MVNGRAD_STORAGE=server.url)
    assert "the store does not answer" in finished(gone)
    assert gone.returncode == 1
    server.start()
    said.append(finished(process))
    assert process.returncode == 0, said
    assert "does not answer" in "".join(said)
    assert counts(server.url, "sweep_toy:quick") == {"finished": 64}
    assert server.password not in "".join(said)


def test_no_file_and_no_line_has_the_password(server, tmp_path):  # noqa: F811
    folder = tmp_path / "here"
    folder.mkdir()
    name = "sweep_toy:unlucky"
    wrong = server.url.replace(server.password, "gu%2Fess")
    commands = [
        ("init", name, "--unequal", "--storage", server.url),
        ("work", name, "--device", "cpu", "--runs", folder / "runs", "--storage", server.url),
        ("status", "--storage", server.url),
        ("export", name, folder / "all.json", "--storage", server.url),
        ("export", name, folder / "all.csv", "--storage", server.url),
        ("status", "--storage", wrong),
    ]
    said = "".join(finished(command(*arguments, PGCONNECT_TIMEOUT="2")) for arguments in commands)
    assert "10 runs are in" in said
    assert "password authentication failed" in said
    texts = [said] + [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert len(texts) > 10
    for secret in (server.password, "gu%2Fess", "gu/ess"):
        assert not any(secret in text for text in texts)
    assert f"sweeper:***@127.0.0.1:{server.port}" in said


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("sweeps.db", "not a URL"),
        ("mysql://me:secret@host/runs", "mysql is not supported"),
        ("sqlite://", "in memory"),
        ("postgresql://me:secret@ho st:x/y", "not a URL"),
    ],
)
def test_a_storage_that_cannot_be_is_refused_without_repeating_it(given, problem):
    with pytest.raises(ValueError, match=problem) as refused:
        address(given)
    assert "secret" not in str(refused.value)


def test_the_storage_is_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("MVNGRAD_STORAGE", "postgresql://me:{secret}@host/runs?password=other")
    found = address()
    assert str(found) == "postgresql+psycopg://me:***@host/runs"
    assert found.scrubbed("{secret} %7Bsecret%7D other") == "*** *** ***"
    monkeypatch.delenv("MVNGRAD_STORAGE")
    assert str(address()) == "sqlite:///sweeps.db"
