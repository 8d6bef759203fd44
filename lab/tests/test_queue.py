"""Queues of trainings: deadlines, several processes, lines of finished runs, exports."""

import dataclasses
import json
import os
import shutil
from contextlib import ExitStack

import pytest
from tiny import interrupt

from mvngrad_lab import store
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.experiments.floor import arms, dial, records, run
from mvngrad_lab.experiments.spikes import run as spikes
from mvngrad_lab.experiments.state_precision import run as state_precision
from mvngrad_lab.store.lock import lock_folder
from mvngrad_lab.training import queue
from mvngrad_lab.training.train import Interrupted


@pytest.fixture
def small_queue(small_images):
    """Three recipes of the queue's kinds."""
    small = {"batch_size": 20, "epochs": 2, "eval_every": 1, "precision": "float32"}
    return [dataclasses.replace(recipe, **small) for recipe in arms.grid_queue()[:3]]


def test_queue_stops_before_its_deadline_and_continues(tmp_path, small_queue):
    options = {"finished": {}, "device": "cpu"}
    assert queue.train_queue(small_queue, tmp_path, stop_after=5, run_seconds=6, **options) == 3
    assert not (tmp_path / queue.FINISHED).exists()
    assert queue.train_queue(small_queue[:1], tmp_path, stop_after=600, run_seconds=1, **options) == 0
    assert queue.train_queue(small_queue, tmp_path, stop_after=600, run_seconds=1, **options) == 0
    lines = [json.loads(line) for line in (tmp_path / queue.FINISHED).read_text().splitlines()]
    assert [line["key"] for line in lines] == [recipe.key for recipe in small_queue], "each once"
    for line in lines:
        assert [row["epoch"] for row in line["curve"]] == [1, 2]
        assert all(
            {"test_accuracy", "test_loss", "loss", "train_accuracy_mixed"} <= row.keys() for row in line["curve"]
        )
        assert all(1e-4 < row["gradient_rms"] < 1 for row in line["curve"])
        assert line["ended"].endswith("+00:00")
        assert line["result"]["train_accuracy_mixed"] == line["curve"][-1]["train_accuracy_mixed"]
        assert not (tmp_path / line["key"] / "checkpoints").exists()


def test_lines_that_were_cut_or_never_written_are_repaired(tmp_path, small_queue, capsys):
    """A process may die between the result of a run and its line, or within the line."""
    options = {"finished": {}, "device": "cpu", "stop_after": 600, "run_seconds": 1}
    assert queue.train_queue(small_queue[:2], tmp_path, **options) == 0
    path = tmp_path / queue.FINISHED
    first, second = path.read_text().splitlines()
    path.write_bytes(f"{first}\n{second[:100]}".encode() + b"\xff")
    assert queue.train_queue(small_queue, tmp_path, **options) == 0
    assert f"{path}, line 2 was cut and is left out" in capsys.readouterr().err
    lines = queue.read_finished(path)
    assert set(lines) == {recipe.key for recipe in small_queue}
    again = lines[small_queue[1].key]
    assert again["result"] == json.loads(second)["result"]
    assert [row["epoch"] for row in again["curve"]] == [1, 2]


def test_waiting_runs_of_an_exported_sweep_are_not_done(tmp_path):
    rows = [
        {"key": f"cifar100-{status}", "status": status, "settings": {}, "metrics": {}}
        for status in ("waiting", "running", "diverged")
    ]
    path = tmp_path / "sweep-cifar100-bs1024-scaled.json"
    path.write_text(json.dumps({"runs": rows}))
    assert list(records.read_accuracies(tmp_path)) == ["cifar100-diverged"]
    path.write_text(path.read_text()[:40])
    with pytest.raises(InvalidInput, match=r"scaled.json is damaged .* export it again"):
        records.read_accuracies(tmp_path)


def test_command_trains_its_queues_in_order_until_too_little_time_is_left(tmp_path, small_queue, monkeypatch, capsys):
    def make_queue(name, runs):
        queues = {"long": small_queue[:1], "short": small_queue[1:2], "last": small_queue[2:]}
        if name == "last" and small_queue[0].key not in runs:
            raise InvalidInput("runs of the grid are missing")
        return queues[name]

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["run", *arguments, "--runs", str(tmp_path), "--device", "cpu"])
        queues = queue.Queues(("long", "short", "last"), records.read_accuracies, make_queue)
        queue.run_command("", queues, lambda *folders: {})
        return capsys.readouterr().out.splitlines()

    out = run("long", "short", "last", "--stop-after", "300", "--run-seconds", "600", "0", "0")
    assert [line for line in out if line.endswith("left")] == ["1 runs of long are left", "0 runs of short are left"]
    assert out[-1] == "last: runs of the grid are missing"
    with pytest.raises(SystemExit, match="2"):
        run("last")
    assert capsys.readouterr().err == "run: runs of the grid are missing\n"
    assert run("long", "short", "last", "--run-seconds", "0")[-1] == "0 runs of last are left"
    lines = (tmp_path / queue.FINISHED).read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == [small_queue[n].key for n in (1, 0, 2)]
    for wrong in (("long", "short", "--run-seconds", "1", "2", "3"), ("long", "export")):
        with pytest.raises(SystemExit):
            run(*wrong)


def test_runs_of_another_process_come_last_and_are_waited_for(tmp_path, small_queue, monkeypatch, capsys):
    options = {"finished": {}, "device": "cpu", "stop_after": 600, "run_seconds": 1}
    first, second, third = (recipe.key for recipe in small_queue)
    for name, trained in (("died", None), ("finished", tmp_path / "died" / first)):
        root, other = tmp_path / name, ExitStack()
        other.enter_context(lock_folder(root / first))

        def end_other_process(seconds, root=root, other=other, trained=trained):
            if trained is not None:
                shutil.copytree(trained, root / first, dirs_exist_ok=True)
            other.close()

        monkeypatch.setattr(queue.time, "sleep", end_other_process)
        assert queue.train_queue(small_queue, root, **options) == 0
        expected = [second, third] if trained else [second, third, first]
        assert list(queue.read_finished(root / queue.FINISHED)) == expected
        assert capsys.readouterr().out.count(f"left for later: {root / first} is in use by process {os.getpid()}") == 1


def test_a_queue_that_needs_runs_that_are_left_is_skipped(tmp_path, small_queue, monkeypatch, capsys):
    def make_queue(name, runs):
        if name == "seeds" and not {recipe.key for recipe in small_queue[:2]} <= runs.keys():
            raise InvalidInput("runs of the grid are missing")
        return small_queue[:2] if name == "grid" else small_queue[2:]

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["run", *arguments, "--runs", str(tmp_path), "--device", "cpu"])
        queues = queue.Queues(("grid", "seeds"), records.read_accuracies, make_queue)
        queue.run_command("", queues, lambda *folders: {})

    run("grid", "seeds", "--stop-after", "10", "--run-seconds", "20", "0")
    assert capsys.readouterr().out.splitlines() == ["2 runs of grid are left", "seeds: runs of the grid are missing"]
    run("grid", "seeds", "--run-seconds", "0")
    assert capsys.readouterr().out.endswith("0 runs of seeds are left\n")
    with pytest.raises(SystemExit, match="2"):
        run("export", "--again")
    assert "without --again" in capsys.readouterr().err


def test_a_damaged_store_ends_the_command_with_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / records.get_file_name("grid")).write_text("{")
    monkeypatch.setattr("sys.argv", ["run", "grid", "--runs", str(tmp_path), "--device", "cpu"])
    with pytest.raises(SystemExit, match="2"):
        run.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"run: {tmp_path / records.get_file_name('grid')} is damaged")


def test_a_resumed_run_keeps_the_gradients_of_the_epochs_before(tmp_path, small_queue):
    options = {"finished": {}, "device": "cpu", "stop_after": 600, "run_seconds": 1}
    recipe = small_queue[0]
    queue.train_queue([recipe], tmp_path / "whole", **options)
    with pytest.raises(Interrupted):
        queue.train_queue([recipe], tmp_path / "cut", on_event=interrupt(after=1), **options)
    queue.train_queue([recipe], tmp_path / "cut", **options)
    whole, cut = (
        queue.make_exported_row(queue.read_finished(tmp_path / root / queue.FINISHED)[recipe.key])["gradient_rms"]
        for root in ("whole", "cut")
    )
    assert len(whole) == recipe.epochs
    assert cut == whole


@pytest.mark.skipif(os.name != "posix", reason="limits are posix's")
def test_a_line_that_does_not_fit_on_the_disk_is_an_error(tmp_path):
    """The kernel writes a part of it, as on a disk that becomes full."""
    import resource

    run = store.FinishedRun("key", "name", {}, {}, {"status": "finished", "data": "x" * 5000})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=rf"No space left .*{queue.FINISHED}"):
            queue._add_line(tmp_path, run, False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    queue._add_line(tmp_path, run, False)
    lines = (tmp_path / queue.FINISHED).read_text().splitlines()
    assert [len(lines[0]), json.loads(lines[1])["key"]] == [1000, "key"]


def test_queues_are_trained_in_order_and_each_sees_the_runs_before_it(tmp_path, small_queue, monkeypatch):
    def train_on_a_cpu(recipes, root, **options):
        assert (options.pop("device"), options.pop("compile")) == ("cuda", True)
        return train_queue(recipes, root, device="cpu", **options)

    def make_queue(name, runs):
        seen.append((name, len(runs)))
        return small_queue[:1] if name == "first" else small_queue[1:]

    train_queue, seen, shares = queue.train_queue, [], []
    monkeypatch.setattr(queue, "train_queue", train_on_a_cpu)
    monkeypatch.setattr(store, "RESULTS", tmp_path / "results")
    options = {"data": None, "tick": shares.append, "on_event": lambda event: None}
    queue.train_queues(queue.Queues(("first", "second"), records.read_accuracies, make_queue), tmp_path, **options)
    assert seen == [("first", 0), ("second", 1)]
    assert shares == [0.5, 1.0]
    assert queue.read_finished(tmp_path / queue.FINISHED).keys() == {recipe.key for recipe in small_queue}


def test_floor_dial_trains_what_results_has_and_the_report_reads_the_new_runs(tmp_path, small_queue, monkeypatch):
    def train_on_a_cpu(recipes, root, **options):
        assert (options.pop("device"), options.pop("compile")) == ("cuda", True)
        return train_queue(recipes, root, device="cpu", **options)

    results, runs, train_queue, shares = tmp_path / "results", tmp_path / "runs", queue.train_queue, []
    row = {"key": small_queue[0].key, "status": "finished", "settings": {}, "metrics": {"test_accuracy": -1.0}}
    store.write_atomic(results / "floor-dial.json", json.dumps({"runs": [row]}))
    monkeypatch.setattr(store, "RESULTS", results)
    monkeypatch.setitem(arms.FIXED, "dial", lambda: small_queue[:2])
    monkeypatch.setattr(queue, "train_queue", train_on_a_cpu)
    monkeypatch.setattr(dial, "require_gpu", lambda *words: None)
    assert records.read_accuracies(runs, results) == {row["key"]: -1.0}
    dial.train_all(runs, None, shares.append, lambda event: None)
    accuracies = records.read_accuracies(runs, results)
    assert accuracies.keys() == {recipe.key for recipe in small_queue[:2]}
    assert accuracies[row["key"]] >= 0
    assert shares == [1.0]


def test_finished_runs_are_not_trained_again(tmp_path, small_queue):
    finished = {recipe.key: 70.0 for recipe in small_queue}
    assert queue.train_queue(small_queue, tmp_path, finished=finished, stop_after=600, run_seconds=1, device="cpu") == 0
    assert not (tmp_path / queue.FINISHED).exists()


def test_export_adds_each_run_to_the_file_of_its_queue(tmp_path):
    def line(recipe, **metrics):
        result = {"status": "finished", **metrics}
        curve = [{"epoch": 1, "loss": 2.5}, {"epoch": 2, "loss": 2.0, "test_loss": 1.0}]
        notes = {"environment": {"commit": "abc"}, "curve": curve, "ended": "2026-01-01T00:00:00+00:00"}
        return json.dumps(
            {"key": recipe.key, "name": recipe.name, "recipe": recipe.settings, "result": result, **notes}
        )

    def read(queue):
        return json.loads((tmp_path / records.get_file_name(queue)).read_text())

    grid, finished = arms.grid_queue(), tmp_path / queue.FINISHED
    language = next(recipe for recipe in arms.language_dial() if recipe.eps_s)
    finished.write_text("\n".join([line(grid[5], test_accuracy=71.0), line(language, validation_loss=4.0)]))
    assert run.export(finished, tmp_path) == ({"floor-grid.json": 1, "floor-language-dial.json": 1}, [])
    finished.write_text(line(grid[2], test_accuracy=72.0))  # of the dial too
    assert run.export(finished, tmp_path) == ({"floor-grid.json": 2}, [])
    assert [row["key"] for row in read("grid")["runs"]] == [grid[2].key, grid[5].key]
    row = read("grid")["runs"][0]
    assert (row["commit"], row["losses"], row["ended"][:4]) == ("abc", [2.5, 2.0], "2026")
    assert [each["epoch"] for each in row["curve"]] == [2]
    assert records.read_runs(tmp_path)[language.key].result == {"status": "finished", "validation_loss": 4.0}
    assert records.read_accuracies(tmp_path) == {grid[2].key: 72.0, grid[5].key: 71.0, language.key: 0.0}
    published = arms.as_published_runs()[0]
    finished.write_text(line(published, test_accuracy=79.0))  # of Table 1 too
    assert run.export(finished, tmp_path) == ({"floor-as-published.json": 1}, [])
    (stored,) = store.load_runs(tmp_path)
    assert (stored.key, stored.environment["ended"][:4]) == (published.key, "2026")
    long = arms.long_run(grid[0], seed=1)
    finished.write_text(line(long, test_accuracy=72.0))  # the grid has selected nothing yet
    assert run.export(finished, tmp_path) == ({}, [long.key])


@pytest.mark.parametrize("experiment", [run, spikes, state_precision], ids=["floor", "spikes", "state_precision"])
def test_export_names_a_run_that_no_queue_knows(tmp_path, experiment, monkeypatch, capsys):
    """A store may have runs of several experiments."""
    unknown = dataclasses.replace(arms.grid_queue()[0], epochs=7)
    line = {"key": unknown.key, "recipe": unknown.settings, "result": {"status": "finished", "test_accuracy": 71.0}}
    (tmp_path / queue.FINISHED).write_text(json.dumps(line))
    monkeypatch.setattr("sys.argv", ["run", "export", "--runs", f"{tmp_path}", "--results", f"{tmp_path}"])
    experiment.main()
    assert (
        f"1 runs are of no queue here, or of one that needs more runs; the first: {unknown.key}"
        in capsys.readouterr().out
    )
    assert [path.name for path in tmp_path.iterdir()] == [queue.FINISHED]


@pytest.mark.parametrize("content", ["", "[]", '{"runs": [{}]}'])
def test_runs_are_not_added_to_a_damaged_file(tmp_path, content):
    path = tmp_path / "floor-grid.json"
    path.write_text(content)
    with pytest.raises(InvalidInput, match=r"floor-grid.json is damaged .*; restore it first"):
        queue.add_rows(path, {}, {"a": {"key": "a"}}, ["a"])
    assert path.read_text() == content
