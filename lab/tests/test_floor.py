"""The arms of the floor experiment, and the queue that trains them."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from tiny import interrupt
from torch import nn

from mvngrad import MVNGrad
from mvngrad_lab import store
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.experiments.floor import arms, dial, figure, records, run
from mvngrad_lab.experiments.spikes import run as spikes
from mvngrad_lab.experiments.state_precision import run as state_precision
from mvngrad_lab.experiments.sweeps.sweeps import cifar100_bs1024_scaled
from mvngrad_lab.report import Sources, load_records
from mvngrad_lab.report.page import render
from mvngrad_lab.report.verdicts import judge
from mvngrad_lab.tasks.cifar100 import recipe as cifar100_recipe
from mvngrad_lab.tasks.language import recipe as language_recipe
from mvngrad_lab.training import queue
from mvngrad_lab.training.optimizers import make_optimizer
from mvngrad_lab.training.train import Interrupted

RESULTS = Path(__file__).parents[2] / "results"


def accuracies_of(grids, best):
    """Made-up results: 70 for each recipe, 75 for the one at index `best`."""
    return {recipe.key: 75.0 if at == best else 70.0 for recipes in grids.values() for at, recipe in enumerate(recipes)}


# Arms


def test_each_arm_has_16_configurations():
    grid = arms.grid()
    assert {arm: len(recipes) for arm, recipes in grid.items()} == dict.fromkeys(grid, 16)
    assert len(grid) == 9
    assert len({recipe.key for recipes in grid.values() for recipe in recipes}) == 9 * 16


def test_old_arms_are_the_finished_sweep():
    """By key: what results/ has is not trained again, and the arms differ from it in the floor alone."""
    swept = {recipe.key for recipe in cifar100_bs1024_scaled().stages[0]}
    assert {recipe.key for arm in arms.OLD_ARMS for recipe in arms.grid()[arm]} == swept
    finished = {row["key"] for row in json.loads((RESULTS / records.OLD_GRID_FILE).read_text())["runs"]}
    assert swept == finished
    assert not {recipe.key for recipe in arms.grid_queue()} & finished
    for cell, arm in (("adam", "adam-floor"), ("mvngrad", "mvngrad-none")):
        (other,) = [old for old in arms.OLD_ARMS if old.startswith(cell)]
        for new, old in zip(arms.grid()[arm], arms.grid()[other], strict=True):
            assert dataclasses.replace(new, eps=old.eps, eps_s=old.eps_s) == old


def test_queue_is_the_new_part_of_the_grid():
    queue = [recipe.key for recipe in arms.grid_queue()]
    new = [recipe.key for arm in (*arms.NEW_ARMS, "sgd") for recipe in arms.grid()[arm]]
    assert len(queue) == 80
    assert sorted(queue) == sorted(new)
    assert {(r.optimizer, r.beta1) for r in arms.grid_queue()[:12]} == {(cell, 0.7) for cell in arms.COUPLED}


def test_floors_are_what_their_names_say():
    for arm, recipes in arms.grid().items():
        for recipe in recipes:
            floor = recipe.eps if recipe.eps_s is None else (recipe.eps_s / (1 - recipe.beta2)) ** 0.5
            if arm == "sgd":
                assert floor == pytest.approx(1)
            elif arm.endswith("-floor"):
                assert 0.99e-3 < floor < 3.2e-3
            else:
                assert floor < 4e-7


def test_sgd_arm_is_torchs_sgd_with_dampening():
    """To 1e-3 of the distance moved, with the first rates multiplied by the bias correction 1 / (1 - beta1^t)."""
    recipe = arms.sgd_recipe(0.9, 4.0)
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(50)) for _ in range(2))
    decay = {"weight_decay": recipe.weight_decay}
    optimizer = MVNGrad(
        [ours], lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, eps_s=recipe.eps_s, **decay
    )
    sgd = torch.optim.SGD([theirs], momentum=0.9, dampening=0.9, **decay)
    sgd.state[theirs]["momentum_buffer"] = torch.zeros(50)
    for at in range(1, 201):
        ours.grad = 1e-2 * torch.randn(50)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        sgd.param_groups[0]["lr"] = recipe.lr / (1 - 0.9**at)
        sgd.step()
    moved = (theirs - 1).abs().max()
    assert moved > 0.1
    assert (ours - theirs).abs().max() < 1e-3 * moved


def test_selection_needs_the_whole_grid_and_takes_the_best():
    grid = arms.grid()
    accuracies = accuracies_of(grid, best=6)
    selected = arms.select(accuracies, grid)
    assert selected == {arm: recipes[6] for arm, recipes in grid.items()}
    del accuracies[grid["sgd"][3].key]
    with pytest.raises(ValueError, match="1 runs of the grid are missing"):
        arms.select(accuracies, grid)


def test_later_queues_follow_from_the_selection():
    grid = arms.grid()
    accuracies = accuracies_of(grid, best=6)  # betas (0.8, 0.999), rate 1e-2
    double = arms.make_queue("double-rate", accuracies)
    assert {recipe.lr for recipe in double} == {2e-2, 20.0}
    with pytest.raises(ValueError, match="run the queue double-rate first"):
        arms.make_queue("table", accuracies)
    accuracies |= {recipe.key: 60.0 for recipe in double}
    table = arms.make_queue("table", accuracies)
    assert len(table) == 27
    assert [(r.epochs, r.warmup_epochs, r.seed) for r in table] == [(200, 5, seed) for seed in (1, 2, 3) for _ in grid]
    more = arms.make_queue("more-seeds", accuracies)
    assert [recipe.seed for recipe in more] == [4] * 8 + [5] * 8 + [6] * 8 + [4, 5, 6]
    assert {recipe.eps_s for recipe in more[-3:]} == {0.01}, "SGD is last"
    assert {recipe.lr for recipe in table} == {1e-2, 10.0}
    better = accuracies | {double[0].key: 80.0}
    assert 2e-2 in {recipe.lr for recipe in arms.make_queue("table", better)}
    decoupled = arms.make_queue("decoupled-grid", accuracies)
    assert {recipe.optimizer for recipe in decoupled} == {"adamw", "mvngradw"}
    assert len(decoupled) == 2 * 16
    accuracies |= {recipe.key: 70.0 for recipe in decoupled}
    assert len(arms.make_queue("decoupled", accuracies)) == 2 * 3
    floored = arms.make_queue("decoupled-floor-grid", accuracies)
    assert {(recipe.optimizer, recipe.eps, recipe.eps_s) for recipe in floored} == {
        ("adamw", 1e-3, None), ("mvngradw", 1e-8, 1e-8),
    }  # fmt: skip
    with pytest.raises(ValueError, match="32 runs of the grid are missing"):
        arms.make_queue("decoupled-floor", accuracies)
    tuned = arms.make_queue("coupled-grid", accuracies)
    assert {(recipe.optimizer, recipe.eps, recipe.eps_s) for recipe in tuned} == {
        ("adam", 1e-8, None), ("mvngrad", 1e-8, 1e-16),
    }  # fmt: skip
    assert len({recipe.key for recipe in tuned} - accuracies.keys()) == 2 * 12, "5e-4 is in the grid"
    assert {recipe.weight_decay for recipe in arms.make_queue("no-decay", accuracies)} == {0.0}
    small = arms.batch_128_grid()
    assert [len(recipes) for recipes in small.values()] == [4] * 4
    long_runs = {recipe.key for recipe in arms.make_queue("batch-128", accuracies_of(small, 1))}
    assert len(long_runs) == 4 * 3
    known = {cifar100_recipe.paper(cell, 128, seed).key for cell in ("adam", "mvngrad") for seed in (1, 2, 3)}
    assert len(long_runs & known) == 3, "MVN-Grad's rate here is the paper's"


def test_dial_shares_runs_with_the_grid():
    grid = {recipe.key for recipes in arms.grid().values() for recipe in recipes}
    assert len(arms.dial()) == 5 * 4 * 3 + 3
    assert len([recipe for recipe in arms.dial() if recipe.key in grid]) == 4 * 2 + 4 * 2 + 2
    stored = {json.loads(line)["key"] for line in (RESULTS / "runs.jsonl").read_text().splitlines()}
    assert len([recipe for recipe in arms.language_dial() if recipe.key in stored]) == 4 * 3


def test_beta_mean_runs_differ_from_stored_runs_in_beta_mean_alone():
    runs, others = arms.beta_mean_runs(), {recipe.key for recipe in arms.language_dial()}
    others |= {recipe.key for recipes in arms.grid().values() for recipe in recipes}
    assert [run.beta_mean for run in runs] == [0.99] * (8 + 3)
    assert all(dataclasses.replace(run, beta_mean=None).key in others for run in runs)
    assert not {run.key for run in runs} & others
    (group,) = make_optimizer(runs[0], nn.Linear(1, 1), torch.zeros(())).param_groups
    assert group["beta_mean"] == 0.99


# The queue


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
    path.write_text(f"{first}\n{second[:100]}")
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
        queue.run_command("", ("long", "short", "last"), records.read_accuracies, make_queue, lambda *folders: {})
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


def test_processes_train_shares_of_a_queue_in_one_store(tmp_path, small_queue, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["run", "all", *arguments, "--runs", str(tmp_path), "--device", "cpu"])
        queue.run_command("", ("all",), lambda *folders: {}, lambda name, runs: small_queue, lambda *folders: {})
        return [line.split()[3] for line in capsys.readouterr().out.splitlines()[:-1]]

    first, second, third = (recipe.key for recipe in small_queue)
    assert run("--share", "1/2") == [first, third]
    path = tmp_path / queue.FINISHED
    path.write_text(path.read_text() + "\n")
    assert run("--share", "2/2") == [second]
    assert list(queue.read_finished(path)) == [first, third, second]
    assert capsys.readouterr().err == ""
    for wrong in ("0/2", "3/2", "1", "1/2/3", "a/b"):
        with pytest.raises(SystemExit):
            run("--share", wrong)
        assert f"{wrong!r} is not K/N with 1 <= K <= N" in capsys.readouterr().err


def test_a_share_that_skips_a_queue_fails_and_says_so(tmp_path, small_queue, monkeypatch, capsys):
    def make_queue(name, runs):
        if name == "seeds" and not {recipe.key for recipe in small_queue[:2]} <= runs.keys():
            raise InvalidInput("runs of the grid are missing")
        return small_queue[:2] if name == "grid" else small_queue[2:]

    def export(finished, results):
        return queue.Exported({}, [])

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["run", *arguments, "--runs", str(tmp_path), "--device", "cpu"])
        queue.run_command("", ("grid", "seeds"), records.read_accuracies, make_queue, export)

    with pytest.raises(SystemExit) as stopped:
        run("grid", "seeds", "--share", "1/2")
    out, error = capsys.readouterr()
    assert stopped.value.code == 1
    assert out.splitlines()[-2:] == ["0 runs of grid are left", "seeds: runs of the grid are missing"]
    assert error == "skipped: seeds; when all processes have ended, run this again\n"
    run("grid", "seeds", "--share", "2/2")  # the other has trained its own
    assert capsys.readouterr().out.endswith("0 runs of seeds are left\n")
    for option in (("--share", "1/2"), ("--again",)):
        with pytest.raises(SystemExit, match="2"):
            run("export", *option)
        assert "without --share and --again" in capsys.readouterr().err


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
        queue.make_row(queue.read_finished(tmp_path / root / queue.FINISHED)[recipe.key])["gradient_rms"]
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
    queue.train_queues(("first", "second"), records.read_accuracies, make_queue, tmp_path, **options)
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
    assert (read("grid")["left"], row["commit"], row["losses"], row["ended"][:4]) == (78, "abc", [2.5, 2.0], "2026")
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


def test_exported_runs_are_of_recipes_with_the_same_key():
    paths = list(RESULTS.glob(records.get_file_name("*")))
    assert RESULTS / records.get_file_name("grid") in paths
    kinds = {kind.name: kind for kind in (cifar100_recipe.Cifar100, language_recipe.WikiText103)}
    for row in (row for path in paths for row in json.loads(path.read_text())["runs"]):
        recipe = kinds[row["key"].rpartition("-")[0]](**row["settings"])
        assert recipe.key == row["key"]
        assert row["status"] == "diverged" or len(row["losses"]) == recipe.epochs
        if "test_accuracy" in row["metrics"]:
            assert row["metrics"]["test_accuracy"] == row["curve"][-1]["test_accuracy"]


# The report


def test_the_report_shows_the_best_of_each_arm_in_results():
    sources = Sources((RESULTS,), {}, warn=pytest.fail)
    record = next(record for record in records.collect(sources) if record.name == "floor")
    assert record.result["done"] == record.result["of"] == 9 * 17
    (drawn,) = figure.draw(record.result)
    best = {row[:2]: float(row[2]) for row in drawn.table.rows}
    assert best["Adam", "no"] == 73.76, "the 17th configuration"
    assert best["Adam", "yes"] == 74.54
    assert best["SGD", ""] == 73.67
    assert [each.title for each in drawn.panels] == list(figure.TITLES.values())
    (partial,) = figure.draw({**record.result, "done": 152})
    assert ["Nothing is judged before all runs" in each.caption for each in (drawn, partial)] == [False, True]


def test_results_without_a_verdict_are_shown_where_their_claims_will_be(tmp_path):
    for name in ("runs.jsonl", records.OLD_GRID_FILE, *map(records.get_file_name, ("grid", "double-rate"))):
        shutil.copy(RESULTS / name, tmp_path)
    loaded = load_records(tmp_path, warn=pytest.fail)
    page = render(judge(loaded), loaded, version="1", made="now")
    headings = re.findall("<h2>(.*?)</h2>", page)
    after = headings[headings.index("CIFAR-100, Table 1") + 1]
    assert after.startswith("A floor under the divisor, in every cell: ")


def test_the_report_has_no_figure_without_new_runs(tmp_path):
    assert records.collect(Sources((tmp_path,), {}, warn=pytest.fail)) == []
