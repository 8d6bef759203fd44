"""The commands, servers that go away, stores that are none or damaged, and a password that is never shown."""

import json
import os
import re
import signal
import sqlite3
import sys
from collections import Counter
from dataclasses import replace
from urllib.parse import quote, quote_plus, unquote

import pytest
import sweep_toy
from postgres import server  # noqa: F401
from sqlalchemy import event
from sweep_toy import Bench, command, gated, read_output, small, staged, wait_for

from benchmarks import sweep as benchmark
from mvngrad_lab.cli import main
from mvngrad_lab.sweep.database import DamagedStore, parse_address
from mvngrad_lab.sweep.queue import Queue
from mvngrad_lab.sweep.worker import describe_worker


@pytest.fixture
def do(tmp_path, monkeypatch, capfd):
    """Run `mvngrad sweep ...` in this process; what it prints. Two or more workers are processes of their own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = signal.getsignal(signal.SIGTERM)

    def do(*arguments, code=0, storage=f"sqlite:///{tmp_path}/sweeps.db"):
        returned = main(["sweep", *map(str, arguments), "--storage", storage])
        output = "".join(capfd.readouterr())
        assert returned == code, output
        return output

    yield do
    signal.signal(signal.SIGTERM, before)


# Commands


def test_the_commands_from_the_first_to_the_last(do, tmp_path):
    runs = ("--runs", tmp_path / "runs", "--device", "cpu")
    assert "there is no sweep in" in do("status", code=2)
    assert "there is no sweep 'mnist-7k'; choose from" in do("init", "mnist-7k", code=2)
    assert not (tmp_path / "sweeps.db").exists()
    assert "8 configurations are new" in do("init", "sweep_toy:staged", "--heartbeat", "1")
    assert "has no sweep 'mnist' (it has: sweep_toy:staged)" in do("select", "mnist", code=2)
    assert "worker 2: " in do("work", "sweep_toy:staged", "--workers", "2", *runs)
    assert "sweep_toy:staged: 16 finished" in do("status")
    assert "4 runs are new" in do("rerun", "sweep_toy:staged", "--seeds", "2")
    assert re.search(r"4 are left, about \d+ s of one worker at \S+ s each", do("status"))
    do("work", "sweep_toy:staged", *runs)
    assert "adam: 1.0625 ± 0.08839 over 2 seeds" in do("select", "sweep_toy:staged")
    assert "20 runs are in" in do("export", "sweep_toy:staged", tmp_path / "all.json")


@pytest.mark.parametrize("workers", [1, 2])
def test_work_fails_if_a_run_raised_and_not_if_one_diverged(do, tmp_path, workers):
    runs = ("--workers", workers, "--runs", tmp_path / "runs", "--device", "cpu")
    do("init", "sweep_toy:unlucky", "--unequal", "--heartbeat", "1")
    assert " raised" in do("work", "sweep_toy:unlucky", *runs, code=1)
    assert "nothing was left" in do("work", "sweep_toy:unlucky", *runs)
    do("retry", "sweep_toy:unlucky")
    do("work", "sweep_toy:unlucky", *runs, code=1)


def run_and_print(recipe, **options):
    print("begins", end=" ")
    print(recipe.key)
    return sweep_toy.run(recipe, **options)


def printing():
    return replace(staged(), run=run_and_print)


def test_every_line_of_several_workers_names_its_worker(do, tmp_path):
    do("init", "test_sweep_stores:printing", "--heartbeat", "1")
    output = do("work", "test_sweep_stores:printing", "--workers", "2", "--runs", tmp_path / "runs", "--device", "cpu")
    assert all(re.match("worker [12]: [a-z]", line) for line in output.splitlines()), output
    assert sum(": begins toy-" in line for line in output.splitlines()) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("work", "--slurm-options", "timeout_min=5"), "--slurm-options is for --slurm"),
        (("work", "--slurm", "2", "--workers", "4"), "--workers is for one machine"),
        (("work", "--slurm", "-2"), "slurm=-2"),
        (("work", "--workers", "0"), "workers=0"),
        (("work", "--workers", "100000"), "at most"),
        (("rerun", "--seeds", "0"), "seeds=0"),
        (("rerun", "--seeds", "3000000000"), "at most 1,000"),
    ],
)
def test_options_without_effect_are_refused(do, options, message):
    do("init", "sweep_toy:small")
    assert message in do(options[0], "sweep_toy:small", *options[1:], code=2)


def test_the_engine_s_benchmark_measures_runs_that_all_finish(tmp_path, monkeypatch):
    monkeypatch.setenv(benchmark.COUNT, "8")
    monkeypatch.setattr(benchmark, "get_databases", lambda: {"SQLite": benchmark.sqlite})
    benchmark.main(["--runs", "8", "--workers", "2", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "engine.json").read_text())["rows"]
    assert (row["runs"], row["errors"]) == (8, 0)
    assert 0 < row["milliseconds_quartiles"][0] <= row["milliseconds"] <= row["milliseconds_95"]
    assert "| SQLite | 2 | 8 | " in (tmp_path / "engine.md").read_text()


# A server


def test_a_server_that_goes_away_is_waited_for(server, tmp_path):  # noqa: F811
    bench = Bench(tmp_path, server.url)
    bench.init(gated(), "sweep_toy:gated", heartbeat=1)
    process = bench.start_worker()
    wait_for(lambda: list(bench.root.glob("*/log")))  # it has a run, which waits for the gate
    server.stop()
    late = bench.start_worker()  # it starts while the store is away
    gone = command("status", MVNGRAD_STORAGE=server.url)
    (bench.root / "gate").touch()
    assert "the store does not answer" in read_output(gone)
    assert gone.returncode == 2
    output = []
    for each in (process, late):
        for line in each.stdout:
            output.append(line)
            if "trying again in 1 s" in line:
                break
    server.start()
    output += [read_output(process), read_output(late)]
    assert (process.returncode, late.returncode) == (0, 0), output
    assert "does not answer" in "".join(output)
    assert bench.statuses() == ["finished"] * 16
    bench.close()
    assert server.password not in "".join(output)


def test_a_worker_does_not_wait_for_a_server_that_refuses_it(server, tmp_path):  # noqa: F811
    bench = Bench(tmp_path, server.url.replace(server.password, "guess"))
    bench.sweep = small()
    with pytest.raises(ConnectionError, match="password authentication failed"):
        bench.work(say=pytest.fail)


def test_workers_in_different_time_zones_agree_which_one_is_silent(server, tmp_path, monkeypatch):  # noqa: F811
    bench = Bench(tmp_path, server.url)
    bench.init(staged(), "zones")
    queues = []
    for zone in ("America/New_York", "UTC", "Asia/Tokyo"):
        monkeypatch.setenv("PGTZ", zone)
        queues.append(Queue(bench.address, "zones"))
        queues[-1].claim(describe_worker())
    for queue in queues:
        queue.requeue_from = 0.0
        queue.requeue_silent()
        queue.close()
    assert Counter(bench.statuses()) == {"running": 3, "waiting": 5}
    bench.close()


# Stores that are none, or damaged


def damage_nothing_but_the_header(path):
    path.write_bytes(path.read_bytes()[:100] + b"\xff" * 1000)


def damage_a_table(path):
    """Overwrite the first page of the table of trials."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = connection.execute("PRAGMA page_size").fetchone()[0]
    (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'trials'").fetchone()
    connection.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("not a database"),
        lambda path: path.write_bytes(path.read_bytes()[5:]),
        damage_nothing_but_the_header,
        damage_a_table,
    ],
)
def test_a_damaged_store_is_called_damaged(do, toy, damage):
    toy.init(small(), "sweep_toy:small")
    toy.close()
    damage(toy.address.file)
    for arguments in (("status",), ("status", toy.name), ("work", toy.name, "--device", "cpu"), ("init", toy.name)):
        line = do(*arguments, code=2).splitlines()[-1]
        assert re.match(r"mvngrad: sqlite:///.*sweeps.db is damaged, or not a store: .*; restore a copy", line), line
    with pytest.raises(DamagedStore):
        toy.work(say=pytest.fail)


def test_a_store_that_may_not_be_written_is_not_waited_for(toy):
    """As a user without the permission sees it; root may write every file."""
    toy.init(small())
    event.listen(toy.queue.storage.engine, "connect", lambda driver, record: driver.execute("PRAGMA query_only=1"))
    toy.queue.storage.engine.dispose()
    with pytest.raises(PermissionError, match=r"sweeps.db cannot be written \(.*readonly database\); copy the file"):
        toy.queue.claim(describe_worker())


def test_a_store_in_a_folder_that_may_not_be_written_is_not_waited_for(toy, monkeypatch):
    toy.init(small())
    monkeypatch.setattr(os, "access", lambda path, mode: path != toy.address.file.parent)
    with pytest.raises(PermissionError, match=r"sweeps.db cannot be written \(it or its folder is read-only\); copy"):
        toy.work(say=pytest.fail)


def test_what_is_no_store_is_named(do, tmp_path):
    assert f"{tmp_path} is a folder; name a file: sqlite:///" in do("status", storage=f"sqlite:///{tmp_path}", code=2)
    assert f"{tmp_path} is a folder" in do("init", "sweep_toy:small", storage=f"sqlite:///{tmp_path}", code=2)
    (tmp_path / "empty.db").touch()
    assert "there is no sweep in sqlite:" in do("status", storage=f"sqlite:///{tmp_path}/empty.db", code=2)


# Passwords


@pytest.mark.slow
def test_no_file_and_no_line_has_the_password(server, tmp_path):  # noqa: F811
    folder = tmp_path / "here"
    folder.mkdir()
    name = "sweep_toy:unlucky"
    wrong = server.url.replace(server.password, "gu%2Fess")
    commands = [
        ("init", name, "--unequal", "--storage", server.url),
        ("work", name, "--device", "cpu", "--runs", folder / "runs", "--storage", server.url),
        ("status", f"--storage={server.url}"),
        ("export", name, folder / "all.json", "--storage", server.url),
        ("export", name, folder / "all.csv", "--storage", server.url),
        ("status", "--storage", wrong),
    ]
    output = "".join(read_output(command(*arguments, PGCONNECT_TIMEOUT="60")) for arguments in commands)
    assert "10 runs are in" in output
    assert "password authentication failed" in output
    texts = [output] + [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert len(texts) > 10
    for secret in (server.password, "gu%2Fess", "gu/ess"):
        assert not any(secret in text for text in texts)
    assert f"sweeper:***@127.0.0.1:{server.port}" in output


URLS = ["postgresql://me:secret@host/runs", "postgresql://me:se@cret/secret@host", "pg://me@host/?sslPassword=secret"]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "init", "URL"),
        ("sweep", "init", "mnist", "--storag", "URL"),
        ("sweep", "init", "mnist", "--storag=URL"),
        ("sweep", "work", "mnist", "--data", "URL"),
        ("sweep", "status", "URL", "--storage", "sqlite:////nowhere/sweeps.db"),
        ("sweep", "URL"),
        ("status", "--storage", "URL"),
        ("report", "--runs", "URL"),
        ("train", "mnist", "--storage", "URL"),
        ("URL",),
    ],
)
def test_a_password_in_the_wrong_place_is_not_shown(capfd, monkeypatch, arguments, url):
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        code = main([argument.replace("URL", url) for argument in arguments])
    except SystemExit as ended:
        code = ended.code
    output = "".join(capfd.readouterr())
    assert code == 2
    assert output
    assert "secret" not in output


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("sweeps.db", "not a URL"),
        ("mysql://me:secret@host/runs", "mysql is not supported"),
        ("sqlite://", "in memory"),
        ("postgresql://me:secret@ho st:x/y", "not a URL"),
    ],
)
def test_an_invalid_storage_is_refused_without_repeating_it(url, problem):
    with pytest.raises(ValueError, match=problem) as refused:
        parse_address(url)
    assert "secret" not in str(refused.value)


def test_a_file_as_storage_is_refused_with_its_url(do):
    error = do("init", "sweep_toy:small", storage="my/x.db", code=2)
    assert error == "mvngrad: the storage is not a URL; for the file my/x.db use sqlite:///my/x.db\n"


@pytest.mark.parametrize(
    "url",
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
def test_a_password_is_hidden_as_it_was_typed_and_in_every_other_spelling(url):
    """Also if only some of its characters are quoted, as by a driver with other rules."""
    text = f"postgresql://{url}"
    address = parse_address(text)
    passwords = re.findall("(?:me:|password=)([^@&]+)", text)
    plain = [unquote(part if "me:" in text else part.replace("+", " ")) for part in passwords]
    forms = [*passwords, *plain, *map(quote, plain), *map(quote_plus, plain)]
    forms += [re.sub("%..", lambda code: code[0].lower(), quote(secret, safe="")) for secret in plain]
    assert len(address.passwords) == len(passwords)
    for form in forms:
        assert address.hide_passwords(f"before {form} after") == "before *** after"
    assert address.hide_passwords("me host runs") == "me host runs"


def test_the_default_storage_is_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("MVNGRAD_STORAGE", "postgresql://me:{secret}@host/runs?password=other")
    address = parse_address()
    assert str(address) == "postgresql+psycopg://me:***@host/runs"
    assert address.hide_passwords("{secret} %7Bsecret%7D other") == "*** *** ***"
    monkeypatch.delenv("MVNGRAD_STORAGE")
    assert str(parse_address()) == "sqlite:///sweeps.db"
