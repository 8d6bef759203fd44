"""The sweeps that come with the lab: the paper's grids, and trainings that continue after a worker was killed."""

import signal
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from sweep_toy import freeze, is_unlocked, kill, read_output, silence, wait_for
from tiny import Tiny, TinyTask

from mvngrad_lab.experiments.cifar100.records import table1
from mvngrad_lab.experiments.sweeps import find_sweep, find_sweeps
from mvngrad_lab.recipe import COUPLED, DECOUPLED, Recipe
from mvngrad_lab.store import load_runs, read_rows
from mvngrad_lab.sweep import Outcome, Results, Sweep, grid
from mvngrad_lab.sweep.grids import check_equal_budgets, optimizer_name, optimizers_by_key
from mvngrad_lab.sweep.records import make_entry
from mvngrad_lab.sweep.stages import select_best
from mvngrad_lab.tasks.cifar100 import recipe as cifar100
from mvngrad_lab.tasks.language import recipe as language
from mvngrad_lab.training.events import EpochEnd
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


@pytest.mark.parametrize("name", find_sweeps())
def test_a_grid_has_as_many_runs_as_the_paper_says_and_a_store_can_keep_them(name):
    expanded = find_sweep(name).expand_stages()
    stages = [optimizers_by_key(stage) for stage in expanded]
    for stage, expected in zip(stages, RUNS[name], strict=True):
        counts = dict(Counter(stage.values()))
        assert len(counts) == 4
        assert counts == expected if isinstance(expected, dict) else set(counts.values()) == {expected}
    unequal = any(isinstance(expected, dict) for expected in RUNS[name])
    with pytest.raises(ValueError, match="--unequal") if unequal else nullcontext():
        check_equal_budgets(dict(enumerate(stages)), unequal=False)
    for recipe in (recipe for stage in expanded for recipe in stage):
        assert make_entry(recipe, "1")["key"] == recipe.key


@pytest.mark.parametrize(
    ("name", "selected"),
    [
        ("cifar100-bs1024", [r for r in table1() if (r.batch_size, r.seed) == (1024, 0)]),
        ("wikitext103", [language.wikitext103(o) for o in COUPLED]),
        ("openwebtext", [language.openwebtext(o) for o in DECOUPLED]),
    ],
)
def test_what_the_paper_selected_is_in_its_grid(name, selected):
    keys = {recipe.key for stage in find_sweep(name).expand_stages() for recipe in stage}
    assert len(selected) == 4
    assert {recipe.key for recipe in selected} <= keys


def test_the_second_stage_at_batch_128_reaches_what_the_paper_selected():
    sweep = find_sweep("cifar100-bs128")
    selected = {r.optimizer: r for r in table1() if (r.batch_size, r.seed) == (128, 0)}

    def value(recipe):
        chosen = selected[recipe.optimizer]
        return float((recipe.beta2, recipe.eps_s) == (chosen.beta2, chosen.eps_s))

    first, second = sweep.stages
    followed = second(Results([Outcome(recipe, value(recipe)) for recipe in first], sweep.higher))
    assert {recipe.key for recipe in selected.values()} <= {recipe.key for recipe in followed}


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
    @dataclass(frozen=True)
    class Local(Recipe):
        name = "local"

    for recipe in (Nested(cifar100.paper("adam", 128)), Local()):
        with pytest.raises(ValueError, match="plain values"):
            make_entry(recipe, "1")
    assert optimizer_name(Nested()) == "nested"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing", "choose from cifar100-bs128"),
        ("no.where:x", "No module"),
        ("sweep_toy:nothing", "no attribute 'nothing'"),
        ("sweep_toy:kill", "TypeError: kill"),
        ("sweep_toy:leave", "SystemExit: 3"),
        ("sweep_toy:fail_in_a_stage", "ZeroDivisionError: division by zero"),
        ("sweep_toy:numbers", r"a stage of 'sweep_toy:numbers' is \[1, 2\]; it must be a list of recipes"),
        ("os:getcwd", "returned a str"),
    ],
)
def test_a_sweep_that_cannot_be_loaded_is_named(name, problem):
    with pytest.raises(ValueError, match=problem):
        find_sweep(name)


# Trainings by workers in processes of their own


def run_gated(recipe, *, root, data, device, compile):
    """Train two epochs; the third begins once there is a file "gate" in the folder of runs."""

    def wait(event):
        if isinstance(event, EpochEnd) and event.epoch == 2:
            wait_for((root / "gate").exists)

    return train(recipe, root=root, device=device, checkpoint_every=0, on_event=wait, task=TinyTask)


def tiny():
    metric = {"metric": "train_accuracy", "higher": True}
    return Sweep(stages=(grid(Tiny(epochs=6), lr=(1e-2, 1e-3)),), **metric, seconds=1, hardware="a CPU", run=run_gated)


def one():
    return replace(tiny(), stages=(grid(Tiny(), epochs=(12,)),))


def steps(folder):
    return [row["step"] for row in read_rows(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_the_training_of_a_killed_worker_continues_from_its_checkpoint_to_the_same_weights(toy, tmp_path):
    toy.init(tiny(), "test_sweep_recipes:tiny", heartbeat=1)
    first = toy.start_worker()
    wait_for(lambda: any(len(steps(folder)) == 2 for folder in toy.root.glob("*/")))
    kill(first)
    read_output(first)
    assert load_runs(toy.root) == []
    (toy.root / "gate").touch()
    second = toy.start_worker()
    text = read_output(second)
    assert second.returncode == 0, text
    assert sorted(r.status for r in toy.queue.records()) == ["finished", "finished", "lost"]
    (lost,) = (r for r in toy.queue.records() if r.status == "lost")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as workers have: sums of several threads are in another order
    try:
        whole = train(lost.recipe, root=tmp_path / "whole", on_event=lambda event: None, task=TinyTask)
    finally:
        torch.set_num_threads(threads)
    (interrupted,) = (run for run in load_runs(toy.root) if run.key == lost.key)
    assert interrupted.result["weights"] == whole.result["weights"]
    assert steps(toy.root / lost.key) == [7 * epoch for epoch in range(1, 7)]


@pytest.mark.slow
def test_a_worker_that_was_frozen_on_another_machine_leaves_its_training_to_its_successor(toy):
    toy.init(one(), "test_sweep_recipes:one", heartbeat=1)
    workers = {node: toy.start_worker(TOY_NODE=node) for node in ("host1", "host2")}

    def find_holder():
        """The machine that has the run, and the run's folder once two epochs of it are done."""
        for lock in toy.root.glob("*/lock"):
            if len(steps(lock.parent)) == 2:
                return next(node for node in workers if node in lock.read_text()), lock.parent
        return None

    node, folder = wait_for(find_holder)
    frozen = workers.pop(node)
    (living,) = workers.values()
    freeze(frozen, lambda: is_unlocked(toy.address.file))
    (toy.root / "gate").touch()
    silence(toy.queue, folder.name)
    wait_for(lambda: len(steps(folder)) > 2)  # by the other worker
    kill(frozen, signal.SIGCONT)
    woken, text = read_output(frozen), read_output(living)
    assert (frozen.returncode, living.returncode) == (0, 0), woken + text
    assert f"{folder.name}: this worker sent no heartbeat for {toy.queue.grace} s, so the run was queued again" in woken
    assert "done, 1 taken over" in woken
    assert "done, 1 finished" in text
    assert steps(folder) == [7 * epoch for epoch in range(1, 13)]
    (run,) = load_runs(toy.root)
    assert (run.result["status"], run.result["steps"]) == ("finished", 84)
    assert not (folder / "lock").exists()
    assert len(list((folder / "checkpoints").iterdir())) == 1


def test_the_mnist_sweep_runs_on_a_cpu(toy):
    sweep = find_sweep("mnist-5k")
    firsts = {recipe.optimizer: replace(recipe, epochs=3) for recipe in reversed(sweep.stages[0])}
    toy.init(replace(sweep, stages=(list(firsts.values()),)))
    assert toy.work() == {"finished": 4}
    for record in select_best(toy.queue).values():
        assert record.outcome["validation_loss"] == record.value
        assert record.outcome["test_accuracy"] > 60


def test_help_and_the_grids_need_neither_torch_nor_optuna():
    code = "import sys; from mvngrad_lab.cli.sweep import Sweeps\n"
    code += "from mvngrad_lab.experiments.sweeps import find_sweeps\n"
    code += "[make() for make in find_sweeps().values()]; print([n for n in ('torch', 'optuna') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
