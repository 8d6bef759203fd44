"""Workers as processes and as jobs of a cluster: killed, frozen and restarted, they run every configuration once."""

import os
import re
import signal
from collections import Counter

import pytest
import torch
from postgres import server  # noqa: F401
from sweep_toy import (
    HERE,
    PATIENCE,
    Bench,
    command,
    crowd,
    find_current_run,
    freeze,
    gated,
    is_unlocked,
    kill,
    make_sweep,
    read_output,
    silence,
    small,
    talkative,
    toys,
    wait_for,
)
from test_pool import alive

from mvngrad_lab.errors import InvalidInput, NotPossible
from mvngrad_lab.experiments.sweeps import find_sweep
from mvngrad_lab.sweep import local_workers
from mvngrad_lab.sweep.database import parse_address
from mvngrad_lab.sweep.local_workers import WorkerOptions, choose_device, submit_jobs
from mvngrad_lab.sweep.records import latest_by_key

# Several workers


def test_workers_of_a_machine_are_spread_over_its_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose_device("auto", index) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert choose_device("cpu", 1) == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto", 1) == "cpu"
    with pytest.raises(ValueError, match="sees no GPU"):
        choose_device("cuda", 0)


@pytest.mark.parametrize(("error", "traceback"), [(KeyError("host"), True), (InvalidInput("no grid"), False)])
def test_a_bug_in_one_of_several_workers_keeps_its_traceback(tmp_path, monkeypatch, capsys, error, traceback):
    def find_sweep(name):
        raise error

    monkeypatch.setattr(local_workers, "call_after_parent", lambda act: None)  # this process is no child
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = WorkerOptions("toy", find_sweep, tmp_path, None, "cpu", compile=False)
    with pytest.raises(SystemExit):
        local_workers._run_process(1, 2, parse_address("sqlite:///sweeps.db"), options)
    text = capsys.readouterr().err
    assert text.startswith("worker 2: ")
    assert ("in find_sweep" in text) == traceback


def test_jobs_of_a_cluster_run_a_sweep_to_its_end(tmp_path, monkeypatch):
    """submitit's local executor replaces SLURM. Files and sweeps are looked for in the folder of the command."""
    pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", ""))))
    bench = Bench(tmp_path)
    bench.init(small(), "sweep_toy:small", heartbeat=1)
    options = WorkerOptions(bench.name, find_sweep, tmp_path / "runs", None, "cpu", compile=False)
    jobs = submit_jobs(2, "sqlite:///sweeps.db", options, ["timeout_min=10"], cluster="local")
    assert [job.result() for job in jobs] == [True, True]
    assert set(bench.statuses()) == {"finished"}
    bench.close()


@pytest.mark.parametrize(
    ("storage", "options", "message"),
    [
        *(
            (f"postgresql://{rest}", (), "password would be in a job's files")
            for rest in (
                "me:secret@host/runs",
                "me:secret%40!@host/runs",
                "me:secret%2f@host/runs",
                "me@host/runs?password=a&password=secret",
                "me@host/runs?sslpassword=secret",
            )
        ),
        ("sqlite:///sweeps.db", ("timeout",), "slurm_options='timeout' is not KEY=VALUE"),
    ],
)
def test_passwords_and_malformed_options_are_not_submitted_to_a_cluster(tmp_path, storage, options, message):
    pytest.importorskip("submitit")
    worker_options = WorkerOptions("sweep_toy:small", find_sweep, tmp_path, None, "cpu", compile=False)
    with pytest.raises(ValueError, match=message) as refused:
        submit_jobs(1, storage, worker_options, options, cluster="local")
    assert "secret" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_slurm_is_named(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", "")
    worker_options = WorkerOptions("sweep_toy:small", find_sweep, tmp_path, None, "cpu", compile=False)
    with pytest.raises(NotPossible, match="jobs of SLURM cannot be submitted here"):
        submit_jobs(1, None, worker_options)


# Processes, on both kinds of store


@pytest.fixture(params=["sqlite", "postgresql"])
def bench(request, tmp_path):
    url = request.getfixturevalue("server").url if request.param == "postgresql" else None
    bench = Bench(tmp_path, url)
    yield bench
    bench.close()


def freeze_in_a_run(process, bench):
    """Stop a process in the middle of a run, and outside of transactions; the run's folder."""
    wait_for(lambda: find_current_run(bench.root, process.pid))
    free = not bench.address.is_sqlite
    return freeze(
        process, lambda: (free or is_unlocked(bench.address.file)) and find_current_run(bench.root, process.pid)
    )


@pytest.mark.slow
def test_killed_frozen_and_restarted_workers_finish_every_configuration_once(bench, request):
    bench.init(crowd(), "sweep_toy:crowd", heartbeat=1)
    workers = [bench.start_worker() for _ in range(4)]
    dead, frozen, alive = workers[:2], workers[2], workers[3]
    resumed = {}
    for process in dead:
        resumed[process.pid] = freeze_in_a_run(process, bench)
        kill(process)
    frozen_run = freeze_in_a_run(frozen, bench)
    if not bench.address.is_sqlite:
        database_server = request.getfixturevalue("server")
        database_server.stop()
        database_server.start()
    silence(bench.queue, frozen_run.name)
    # The living worker finds the frozen one silent, and queues its run again.
    wait_for(lambda: any((r.key, r.status) == (frozen_run.name, "lost") for r in bench.queue.records()))
    kill(frozen, signal.SIGCONT)
    woken = f"{frozen_run.name}: this worker sent no heartbeat for {bench.queue.grace} s, so the run was queued again"
    assert any(woken in line for line in frozen.stdout)
    for process in (frozen, alive):
        wait_for(lambda process=process: find_current_run(bench.root, process.pid) or process.poll() is not None)
        kill(process)
    output = [read_output(process) for process in workers]
    assert f"{frozen_run.name}: its worker is silent; queued again" in output[3]
    others = [bench.start_worker() for _ in range(2)]
    output = [read_output(process) for process in others]
    assert {process.returncode for process in others} == {0}, output
    records = bench.queue.records()
    expected = {recipe.key for recipe in crowd().stages[0]}
    assert len(expected) == 64
    assert Counter(r.key for r in records if r.status == "finished") == Counter(expected)
    assert {r.status for r in latest_by_key(records).values()} == {"finished"}
    assert {r.status for r in records} <= {"finished", "lost", "duplicate"}
    for pid, folder in resumed.items():
        first, *later = (line.split() for line in (folder / "log").read_text().splitlines())
        assert first == [str(pid), "0"]
        assert later
        assert all(int(step) >= 2 for _, step in later)


def test_inits_at_the_same_time_queue_each_configuration_once(bench):
    bench.name = "sweep_toy:small"
    url = bench.address.url.render_as_string(hide_password=False)
    starting = [command("init", bench.name, "--heartbeat", "1", MVNGRAD_STORAGE=url) for _ in range(3)]
    texts = [read_output(process) for process in starting]
    assert all(process.returncode == 0 for process in starting), texts
    process = bench.start_worker()
    text = read_output(process)
    assert process.returncode == 0, text
    bench.init(small())
    counts = Counter(record.status for record in bench.queue.records())
    assert counts.pop("finished") == 12
    assert counts.keys() <= {"duplicate"}


@pytest.mark.slow
def test_eight_workers_share_one_file(toy):
    toy.init(make_sweep(toys(lr=range(16))), "sweep_toy:quick", heartbeat=1)
    process = toy.start_worker("--workers", 8)
    text = read_output(process)
    assert process.returncode == 0, text
    assert not re.search("locked|error|does not answer|later|sent no heartbeat", text, re.IGNORECASE), text
    assert toy.statuses() == ["finished"] * 64


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_asked_to_stop_leave_their_runs_to_the_next(toy, workers):
    toy.init(crowd(), "sweep_toy:crowd", heartbeat=1)
    process = toy.start_worker("--workers", workers)
    wait_for(lambda: len(list(toy.root.glob("*/log"))) > workers)
    kill(process, signal.SIGTERM)
    assert "Interrupted" in read_output(process)
    assert process.returncode == 130
    assert set(toy.statuses()) == {"finished", "waiting"}


def test_workers_end_when_the_process_that_started_them_is_killed(toy):
    toy.init(gated(), "sweep_toy:gated", heartbeat=1)
    process = toy.start_worker("--workers", 2)
    try:
        wait_for(lambda: sum(bool(log.read_text()) for log in toy.root.glob("*/log")) == 2)
        workers = [int(log.read_text().split()[0]) for log in toy.root.glob("*/log")]
        kill(process)
        wait_for(lambda: not any(map(alive, workers)))
        text = read_output(process)
    finally:
        (toy.root / "gate").touch()  # ends runs that were not interrupted
    assert set(toy.statuses()) == {"waiting"}, text


def test_a_worker_whose_output_is_closed_leaves_its_run_to_the_next(toy):
    """As by `mvngrad sweep work NAME | head`."""
    toy.init(talkative(), "sweep_toy:talkative")
    process = toy.start_worker()
    wait_for(lambda: process.stdout.readline().startswith("step"))
    process.stdout.close()
    assert process.wait(PATIENCE) == 141
    assert set(toy.statuses()) <= {"finished", "waiting"}
    assert "waiting" in toy.statuses()
