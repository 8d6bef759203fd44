"""Both kinds of store: many at once, a server that goes away, and a password that nobody gets to see."""

import json
import re
import signal
from collections import Counter
from urllib.parse import quote, quote_plus, unquote

import pytest
from postgres import server  # noqa: F401
from sweep_toy import command, finished, kill, wait_for

from benchmarks import sweep as benchmark
from mvngrad_lab.sweep.address import address
from mvngrad_lab.sweep.plan import init
from mvngrad_lab.sweep.queue import Queue
from mvngrad_lab.sweep.worker import identity, work

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


def test_the_engine_s_benchmark_measures_runs_that_all_finish(tmp_path, monkeypatch):
    monkeypatch.setenv(benchmark.COUNT, "8")
    monkeypatch.setattr(benchmark, "stores", lambda: {"SQLite": benchmark.sqlite})
    benchmark.main(["--runs", "8", "--workers", "2", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "engine.json").read_text())["rows"]
    assert (row["runs"], row["errors"]) == (8, 0)
    assert 0 < row["milliseconds_quartiles"][0] <= row["milliseconds"] <= row["milliseconds_95"]
    assert "| SQLite | 2 | 8 | " in (tmp_path / "engine.md").read_text()


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
    late = command(*arguments, MVNGRAD_STORAGE=server.url)  # a worker that starts while the store is away
    gone = command("status", MVNGRAD_STORAGE=server.url)
    assert "the store does not answer" in finished(gone)
    assert gone.returncode == 2
    for line in late.stdout:
        if "trying again in 1 s" in line:
            break
    server.start()
    said += [finished(process), finished(late)]
    assert (process.returncode, late.returncode) == (0, 0), said
    assert "does not answer" in "".join(said)
    assert counts(server.url, "sweep_toy:quick") == {"finished": 64}
    assert server.password not in "".join(said)


def test_a_worker_does_not_wait_for_a_server_that_refuses_it(server, tmp_path):  # noqa: F811
    wrong = server.url.replace(server.password, "guess")
    with pytest.raises(ConnectionError, match="password authentication failed"):
        work(address(wrong), "sweep_toy:quick", root=tmp_path, tell=pytest.fail)


def test_workers_in_different_time_zones_agree_on_who_is_silent(server, monkeypatch):  # noqa: F811
    init(address(server.url), "sweep_toy:staged", heartbeat=1, grace=600, **SILENT)
    queues = {}
    for zone in ("America/New_York", "UTC", "Asia/Tokyo"):
        monkeypatch.setenv("PGTZ", zone)
        queues[zone] = Queue(address(server.url), "sweep_toy:staged", **SILENT)
        queues[zone].claim(identity())
    for queue in queues.values():
        queue.judging = 0.0
        queue.reclaim()
    found = Counter(record.status for record in queue.records())
    for queue in queues.values():
        queue.close()
    assert found == {"running": 3, "waiting": 5}


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


@pytest.mark.parametrize(
    "given",
    [
        "me:p%40ss!word@host/runs",
        "me:s3cr%2ft@host/runs",
        "me:s3cr%2Ft@host/runs",
        "me:caf%c3%a9@host/runs",
        "me:a%20b+c@host/runs",
        "me:(tilde~.*)@host/runs",
        "me@host/runs?password=first&password=second+half",
        "me@host/runs?sslpassword=of%2fa%2Fkey",
        "me:short@host/runs?password=shorter",
    ],
)
def test_a_password_is_scrubbed_as_it_was_typed_and_in_every_other_way(given):
    """Also where only some of its characters are quoted, as by a driver with other rules."""
    text = f"postgresql://{given}"
    found = address(text)
    passwords = re.findall("(?:me:|password=)([^@&]+)", text)
    plain = [unquote(part if "me:" in text else part.replace("+", " ")) for part in passwords]
    forms = [*passwords, *plain, *map(quote, plain), *map(quote_plus, plain)]
    forms += [re.sub("%..", lambda code: code[0].lower(), quote(secret, safe="")) for secret in plain]
    assert len(found.secrets) == len(passwords)
    for form in forms:
        assert found.scrubbed(f"before {form} after") == "before *** after"
    assert found.scrubbed("me host runs") == "me host runs"


def test_the_storage_is_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("MVNGRAD_STORAGE", "postgresql://me:{secret}@host/runs?password=other")
    found = address()
    assert str(found) == "postgresql+psycopg://me:***@host/runs"
    assert found.scrubbed("{secret} %7Bsecret%7D other") == "*** *** ***"
    monkeypatch.delenv("MVNGRAD_STORAGE")
    assert str(address()) == "sqlite:///sweeps.db"
