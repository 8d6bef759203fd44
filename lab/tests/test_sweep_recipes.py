"""The sweeps that come with the package: the paper's grids, and trainings that a killed worker goes on with."""

import signal
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from sweep_toy import HERE, command, finished, freeze, kill, wait_for, writable
from tiny import TinyTask

from mvngrad_lab import recipe as training
from mvngrad_lab.experiments.sweeps.plans import SWEEPS, Outcome, Results, contestant, grid, named
from mvngrad_lab.recipe import Recipe
from mvngrad_lab.store import load_runs
from mvngrad_lab.store.metrics import read_rows
from mvngrad_lab.sweep import budget, plan
from mvngrad_lab.sweep.address import address
from mvngrad_lab.sweep.queue import Queue
from mvngrad_lab.sweep.records import kept
from mvngrad_lab.sweep.worker import work
from mvngrad_lab.tasks.cifar100 import recipe as cifar100
from mvngrad_lab.tasks.language import recipe as language
from mvngrad_lab.training.train import train

RUNS = {
    "cifar100-bs128": [{"adam": 6, "laprop": 6, "adabelief": 12, "mvngrad": 12}, 16],
    "cifar100-bs128-equal": [6, 16],
    "cifar100-bs1024": [6, 32],
    "cifar100-bs1024-scaled": [16],
    "wikitext103": [12, {"adam": 16, "laprop": 16, "adabelief": 32, "mvngrad": 32}],
    "wikitext103-equal": [12, 16],
    "openwebtext": [9],
    "mnist": [24],
    "mnist-5k": [24],
}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_grid_has_as_many_runs_as_the_paper_says(name):
    for stage, expected in zip(budget.planned(named(name)), RUNS[name], strict=True):
        counts = dict(Counter(budget.tried(stage).values()))
        assert len(counts) == 4
        assert counts == expected if isinstance(expected, dict) else set(counts.values()) == {expected}
    stages = {str(number): budget.tried(stage) for number, stage in enumerate(budget.planned(named(name)), start=1)}
    unequal = any(isinstance(expected, dict) for expected in RUNS[name])
    with pytest.raises(ValueError, match="--unequal") if unequal else nullcontext():
        budget.refuse_unequal(stages, unequal=False)


@pytest.mark.parametrize("name", SWEEPS)
def test_every_recipe_can_be_made_again_from_a_store(name):
    for stage in budget.planned(named(name)):
        for recipe in stage:
            assert kept(recipe, "1")["key"] == recipe.key


@pytest.mark.parametrize(
    ("name", "selected"),
    [
        ("cifar100-bs1024", [r for r in cifar100.table1() if (r.batch_size, r.seed) == (1024, 0)]),
        ("wikitext103", [language.wikitext103(o) for o in training.COUPLED]),
        ("openwebtext", [language.openwebtext(o) for o in training.DECOUPLED]),
    ],
)
def test_what_the_paper_selected_is_in_its_grid(name, selected):
    keys = {recipe.key for stage in budget.planned(named(name)) for recipe in stage}
    assert len(selected) == 4
    assert {recipe.key for recipe in selected} <= keys


def test_the_second_stage_at_batch_128_reaches_what_the_paper_selected():
    sweep = named("cifar100-bs128")
    selected = {r.optimizer: r for r in cifar100.table1() if (r.batch_size, r.seed) == (128, 0)}

    def value(recipe):
        chosen = selected[recipe.optimizer]
        return float((recipe.beta2, recipe.eps_s) == (chosen.beta2, chosen.eps_s))

    first, second = sweep.stages
    found = second(Results([Outcome(recipe, value(recipe)) for recipe in first], sweep.higher))
    assert {recipe.key for recipe in selected.values()} <= {recipe.key for recipe in found}


def test_the_best_is_by_direction_and_never_one_without_a_value():
    low, middle, high, gone = grid(cifar100.paper("adam", 128), lr=(1.0, 2.0, 3.0, 4.0))
    outcomes = [Outcome(low, 0.0), Outcome(middle, 1.0), Outcome(high, 2.0), Outcome(gone, None)]
    assert Results(outcomes, higher=True).best["adam"].recipe == high
    assert Results(outcomes, higher=False).best["adam"].recipe == low
    assert Results(outcomes[3:], higher=True).best == {}


@dataclass(frozen=True)
class Nested(Recipe):
    name = "nested"
    inner: object = None


def test_recipes_that_a_store_cannot_keep_are_refused():
    with pytest.raises(ValueError, match="plain values"):
        kept(Nested(cifar100.paper("adam", 128)), "1")
    assert contestant(Nested()) == "nested"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing", "choose of cifar100-bs128"),
        ("no.where:x", "No module"),
        ("sweep_toy:nothing", "no attribute 'nothing'"),
        ("os:getcwd", "returned a str"),
    ],
)
def test_a_sweep_that_is_not_there_is_named(name, problem):
    with pytest.raises(ValueError, match=problem):
        named(name)


# Trainings, in a module of their own that the worker's process can import.
TRAINED = """
import time
from dataclasses import replace
from tiny import Tiny, TinyTask
from mvngrad_lab.experiments.sweeps.plans import Sweep, grid
from mvngrad_lab.training.train import train

def run(recipe, *, root, data, device, compile):
    def slowly(event):
        time.sleep(0.3)
    return train(recipe, root=root, device=device, checkpoint_every=0, on_event=slowly, task=TinyTask)

def sweep():
    recipes = grid(Tiny(epochs=6), lr=(1e-2, 1e-3))
    chosen = {"metric": "train_accuracy", "higher": True}
    return Sweep(stages=(recipes,), **chosen, seconds=1, hardware="a CPU", run="trained:run")

def one():
    return replace(sweep(), stages=(grid(Tiny(), epochs=(12,)),))
"""


def steps(folder):
    return [row["step"] for row in read_rows(folder / "metrics.jsonl")]


def test_a_killed_worker_s_training_goes_on_from_its_checkpoint_to_the_same_weights(tmp_path, monkeypatch):
    (tmp_path / "trained.py").write_text(TRAINED)
    monkeypatch.syspath_prepend(str(tmp_path))
    place, root = address(f"sqlite:///{tmp_path}/sweeps.db"), tmp_path / "runs"
    plan.init(place, "trained:sweep", heartbeat=1, grace=2, tell=lambda text: None)
    arguments = ("work", "trained:sweep", "--runs", root, "--device", "cpu", "--storage", f"sqlite:///{place.file}")
    paths = {"PYTHONPATH": f"{tmp_path}:{HERE}"}
    first = command(*arguments, **paths)
    wait_for(lambda: list(root.glob("*/checkpoints/step-*")), 90)
    wait_for(lambda: any(len(p.read_text().splitlines()) >= 2 for p in root.glob("*/metrics.jsonl")), 90)
    kill(first)
    finished(first)
    assert load_runs(root) == []
    second = command(*arguments, **paths)
    text = finished(second)
    assert second.returncode == 0, text
    queue = Queue(place, "trained:sweep")
    assert sorted(r.status for r in queue.records()) == ["finished", "finished", "lost"]
    (lost,) = (r for r in queue.records() if r.status == "lost")
    queue.close()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as workers have: sums of several threads are in another order
    try:
        whole = train(lost.recipe, root=tmp_path / "whole", on_event=lambda event: None, task=TinyTask)
    finally:
        torch.set_num_threads(threads)
    (interrupted,) = (run for run in load_runs(root) if run.key == lost.key)
    assert interrupted.result["weights"] == whole.result["weights"]
    assert steps(root / lost.key) == [7 * epoch for epoch in range(1, 7)]


def test_a_worker_that_was_frozen_on_another_machine_leaves_its_training_to_who_took_it(tmp_path, monkeypatch):
    (tmp_path / "trained.py").write_text(TRAINED)
    monkeypatch.syspath_prepend(str(tmp_path))
    place, root = address(f"sqlite:///{tmp_path}/sweeps.db"), tmp_path / "runs"
    plan.init(place, "trained:one", heartbeat=1, grace=2, tell=lambda text: None)
    arguments = ("work", "trained:one", "--runs", root, "--device", "cpu", "--storage", f"sqlite:///{place.file}")
    first, second = (
        command(*arguments, PYTHONPATH=f"{tmp_path}:{HERE}", TOY_NODE=f"host{number}") for number in (1, 2)
    )
    locks = {}

    def under_way():
        """A worker has the run, and an epoch of it is done."""
        for lock in root.glob("*/lock"):
            if steps(lock.parent):
                locks["host1" if "host1" in lock.read_text() else "host2"] = lock.parent
        return locks

    ((node, folder),) = wait_for(under_way, 90).items()
    frozen, living = (first, second) if node == "host1" else (second, first)
    freeze(frozen, lambda: writable(place.file))
    seen = len(steps(folder))
    wait_for(lambda: len(steps(folder)) > seen, 90)  # by who took it
    kill(frozen, signal.SIGCONT)
    told, text = finished(frozen), finished(living)
    assert (frozen.returncode, living.returncode) == (0, 0), told + text
    assert f"{folder.name}: this worker was thought dead, and the run is queued again" in told
    assert "done, 1 another's" in told
    assert "done, 1 finished" in text
    assert steps(folder) == [7 * epoch for epoch in range(1, 13)]
    (run,) = load_runs(root)
    assert (run.result["status"], run.result["steps"]) == ("finished", 84)
    assert not (folder / "lock").exists()
    assert len(list((folder / "checkpoints").iterdir())) == 1


def test_the_mnist_sweep_runs_on_a_cpu(tmp_path, monkeypatch):
    whole = named("mnist-5k")
    firsts = {contestant(recipe): replace(recipe, epochs=3) for recipe in reversed(whole.stages[0])}
    monkeypatch.setitem(SWEEPS, "mnist-5k", lambda: replace(whole, stages=(list(firsts.values()),)))
    place = address(f"sqlite:///{tmp_path}/sweeps.db")
    plan.init(place, "mnist-5k", tell=lambda text: None)
    assert work(place, "mnist-5k", root=tmp_path / "runs", tell=lambda text: None) == {"finished": 4}
    queue = Queue(place, "mnist-5k")
    for record in plan.select(queue).values():
        assert record.outcome["validation_loss"] == record.value
        assert record.outcome["test_accuracy"] > 60
    queue.close()


def test_help_and_the_grids_need_no_torch():
    code = "import sys; from mvngrad_lab.cli.sweep import SweepCommand\n"
    code += "from mvngrad_lab.experiments.sweeps.plans import SWEEPS\n"
    code += "[make() for make in SWEEPS.values()]; print([n for n in ('torch', 'optuna') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
