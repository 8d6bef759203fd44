"""A sweep over a function of one's own, from a recipe to a dict, and over tasks of one's own."""

import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import sweep_toy
import torch
from test_own_training import noisy

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.recipe import Recipe
from mvngrad_lab.store import read_run
from mvngrad_lab.sweep import Sweep, grid
from mvngrad_lab.sweep.function_code import describe_function
from mvngrad_lab.sweep.records import latest_by_key
from mvngrad_lab.sweep.stages import requeue_errors
from mvngrad_lab.sweep.summary import describe_progress, describe_selection
from mvngrad_lab.sweep.worker import check_taken
from mvngrad_lab.tasks.own.task import make_recipe


@dataclass(frozen=True)
class Bowl(Recipe):
    optimizer: str = "sgd"
    lr: float = 0.1
    seed: int = 0


def descend(recipe):
    """A tensor, so that the engine has to make a number of it."""
    if recipe.lr == 7.0:
        return [recipe.lr]
    return {"loss": torch.tensor(float("nan") if recipe.lr > 4 else (recipe.lr - 0.3) ** 2)}


def bowl(run=descend, lrs=(0.01, 0.1, 0.3, 5.0, 7.0)):
    return Sweep(stages=(grid(Bowl(), lr=lrs),), run=run, metric="loss", higher=False, seconds=1, hardware="a CPU")


def test_a_function_from_recipe_to_dict_is_a_sweep(toy):
    toy.init(bowl())
    assert Counter(toy.work()) == {"finished": 3, "diverged": 1, "raised": 1}
    records = {record.settings["lr"]: record for record in latest_by_key(toy.queue.records()).values()}
    assert records[0.1].value == pytest.approx(0.04)
    assert "it must return a dict" in records[7.0].outcome["reason"]
    run = read_run(toy.root / records[0.1].key)
    assert (run.name, run.result["loss"]) == ("bowl", records[0.1].value)
    lines = "\n".join(toy.messages)
    assert re.search(rf"{records[0.1].key}: sgd, lr 0\.1: loss 0\.04; 2 of 5 done, about \d+ s left", lines)
    assert f"{records[5.0].key}: sgd, lr 5.0: diverged (loss is not finite); 4 of 5 done" in lines


def test_the_time_left_is_that_of_runs_without_compilation_shared_by_running_workers(toy):
    toy.init(sweep_toy.small())
    assert describe_progress(toy.queue.records()) == "0 of 12 done"
    for began, seconds in (("2026-01-01", 100.0), ("2026-01-02", 20.0), ("2026-01-03", 22.0)):
        claim = toy.queue.claim({"worker": "a"})
        outcome = {"status": "finished", "began": began, "worker_seconds": seconds, "seconds": 18.0}
        toy.queue.finish(claim, outcome, 1.0)
        if began == "2026-01-01":
            assert describe_progress(toy.queue.records()) == "1 of 12 done, about 3.3 minutes left"
    assert describe_progress(toy.queue.records()) == "3 of 12 done, about 3.1 minutes left"
    toy.queue.claim({"worker": "b"})
    assert describe_progress(toy.queue.records()) == "3 of 12 done, about 1.8 minutes left with 2 workers"


def test_a_function_gets_the_options_that_it_has_parameters_for(toy):
    seen = []

    def run(recipe, device, folder):
        seen.append((device, folder.name))
        return {"loss": recipe.lr}

    toy.init(bowl(run, lrs=(0.5,)))
    toy.work(device="cpu")
    assert seen == [("cpu", grid(Bowl(), lr=(0.5,))[0].key)]
    check_taken(run, data=None, device="cuda", compile=False)
    with pytest.raises(InvalidInput, match=r"the sweep's function test_own_sweeps:.*run has no parameter compile"):
        check_taken(run, compile=True)


def first(recipe):
    return {"loss": recipe.lr}


def second(recipe):
    return {"loss": 100 + recipe.lr}


def third(recipe, offset, notes=None):
    return {"loss": offset + recipe.lr}


def with_offset_of(offset):
    return lambda recipe: third(recipe, offset)


class Fourth:
    def __init__(self, factor=2):
        self.factor = factor

    def __call__(self, recipe):
        return {"loss": self.factor * recipe.lr}

    def method(self, recipe):
        self.factor += 1
        return self(recipe)


@pytest.mark.parametrize(
    ("one", "two", "name"),
    [
        (first, second, "first"),
        (partial(third, offset=1), partial(third, offset=2), "third"),
        (with_offset_of(1), with_offset_of(2), "with_offset_of.<locals>.<lambda>"),
        (Fourth(), first, "Fourth"),
        (Fourth(), Fourth(3), "Fourth"),
        (Fourth().method, Fourth(3).method, "Fourth.method"),
    ],
    ids=["functions", "partials", "closures", "objects", "states", "methods"],
)
def test_results_of_another_function_are_not_taken(toy, tmp_path, one, two, name):
    toy.init(bowl(one, lrs=(0.5,)))
    assert toy.work() == {"finished": 1}
    (tmp_path / "other").mkdir()
    other = sweep_toy.Bench(tmp_path / "other")
    other.init(bowl(two, lrs=(0.5,)))
    assert other.work(root=toy.root) == {"raised": 1}
    (record,) = other.queue.records()
    other.close()
    assert "has the result of another function" in record.outcome["reason"]
    assert f"test_own_sweeps:{name}; use another --runs" in record.outcome["reason"]


USED = """
from dataclasses import dataclass
from mvngrad_lab.recipe import Recipe

SCALE = 1.0
GRID = (1, 2)
@dataclass(frozen=True)
class Setting(Recipe):
    lr: float = 0.1
try:
    def half(x): return SCALE * x / 2
finally:
    pass
def run(recipe: Setting): return {"loss": half(recipe.lr)}
class Net:
    def loss(self, x): return half(x) + 3
    def run(self, recipe): return {"loss": self.loss(recipe.lr)}
method = Net().run
short = lambda recipe: {"loss": half(recipe.lr)}
def make(helper): return lambda recipe: {"loss": helper(recipe.lr)}
closure = make(half)
"""


def test_a_function_is_another_one_after_a_change_of_what_it_uses(tmp_path, monkeypatch):
    """Of its module; but not after a change of the grid or of recipes. An imported function is what it was."""

    def describe(old="", new="", name="run"):
        (tmp_path / "used.py").write_text(USED.replace(old, new) + "#" * len(new))  # caches know files by their size
        monkeypatch.delitem(sys.modules, "used", raising=False)
        return describe_function(getattr(import_module("used"), name))

    monkeypatch.syspath_prepend(tmp_path)
    before, function = describe(), sys.modules["used"].run
    assert describe("(1, 2)", "(1, 2, 3)") == describe("lr: float = 0.1", "lr: float = 0.25") == before
    assert describe("1.0", "2.00") != before
    assert describe_function(function) == before
    for name in ("run", "method", "short", "closure"):
        assert describe("x / 2", "x / 2.5", name) != describe(name=name) == describe("(1, 2)", "(1, 2, 3)", name)
    assert describe("+ 3", "+ 3.5", "method") != describe(name="method")


def test_a_function_bound_to_the_same_values_is_the_same():
    """Of values that are no plain ones only the type counts: their text may have an address."""
    once, again = (describe_function(partial(third, offset=1, notes=object())) for _ in range(2))
    assert once == again


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ({"los": 1.0}, "the run has no 'loss'"),
        ({"loss": "low"}, "loss='low'; it must be a number"),
        ({"loss": torch.ones(2)}, "loss=[1.0, 1.0]; it must be a number"),
        ({"loss": 1.0, "seconds": "3 s"}, "seconds='3 s'; it must be a number"),
        ({"loss": 1.0, "code": "abc"}, "returned code, which the store uses itself"),
    ],
)
def test_a_result_that_cannot_be_used_is_not_stored_and_can_be_repaired(toy, result, reason):
    answers = [result]

    def run(recipe):
        return answers[-1]

    toy.init(bowl(run, lrs=(0.5,)))
    assert toy.work() == {"raised": 1}
    (record,) = toy.queue.records()
    assert reason in record.outcome["reason"]
    answers.append({"loss": 2.0})
    requeue_errors(toy.queue)
    assert toy.work() == {"finished": 1}


def test_a_file_of_the_function_is_not_taken_for_the_result(toy):
    """As one with the best epoch so far: a worker that takes the run again finds it."""

    def run(recipe, folder):
        (folder / "result.json").write_text('{"loss": -1.0}')
        return {"loss": 1.0}

    toy.init(bowl(run, lrs=(0.5,)))
    for _ in range(2):
        assert toy.work() == {"raised": 1}
        assert "wrote result.json, which is the worker's" in toy.queue.records()[-1].outcome["reason"]
        requeue_errors(toy.queue)


def test_a_function_may_exit_and_change_the_folder(toy, tmp_path, monkeypatch):
    def run(recipe, folder):
        os.chdir(folder)
        if recipe.lr == 0.5:
            sys.exit(2)
        return {"loss": recipe.lr}

    monkeypatch.chdir(tmp_path)
    toy.init(bowl(run, lrs=(0.5, 1.0, 2.0)))
    assert toy.work(root=Path("runs")) == {"raised": 1, "finished": 2}


@dataclass(frozen=True)
class BowlWithBetas(Bowl):
    betas: tuple[float, float] = (0.9, 0.99)


@pytest.mark.parametrize(
    ("result", "status", "selection"),
    [
        (
            {"status": "diverged"},
            "diverged (diverged); 1 of 1 done",
            "sgd: no configuration has a result with every seed",
        ),
        ({"loss": 1}, "loss 1; 1 of 1 done", "sgd: 1"),
    ],
)
def test_a_run_without_steps_and_settings_that_vary_is_described(toy, result, status, selection):
    toy.init(bowl(lambda recipe: result, lrs=(0.5,)))
    toy.work()
    assert toy.messages[-1].endswith(f": sgd: {status}")
    assert describe_selection(toy.queue)[-1] == selection


def test_a_setting_may_be_a_tuple(toy):
    pairs = ((0.9, 0.99), (0.8, 0.9))
    settings = {"run": lambda recipe: {"loss": recipe.betas[0]}, "metric": "loss", "higher": False}
    toy.init(Sweep(stages=(grid(BowlWithBetas(), betas=pairs),), seconds=1, hardware="a CPU", **settings))
    assert toy.work() == {"finished": 2}
    assert describe_selection(toy.queue)[-1] == "sgd: 0.8  (betas [0.8, 0.9])"


def test_a_selected_value_at_the_edge_of_the_grid_is_named(toy):
    toy.init(sweep_toy.make_sweep(sweep_toy.toys(("adam", "laprop"), lr=(0.0, 2.0, 3.0, 9.0), steps=(1, 2))))
    toy.work()
    lines = describe_selection(toy.queue)
    assert not any("lr 3.0 is at the edge" in line for line in lines)
    assert sum(" is at the edge of the grid, the " in line for line in lines) == 2, "of steps, which have no effect"
    toy.init(sweep_toy.make_sweep(sweep_toy.toys(("adam", "laprop"), lr=(1.0, 2.0))))
    toy.work()
    lines = describe_selection(toy.queue)
    edge = "  lr 2.0 is at the edge of the grid, the largest of 1.0, 2.0: a larger one may be better"
    assert lines.count(edge) == 2


def own():
    recipes = grid(make_recipe(noisy, epochs=1), lr=(1e-3, 1e-2))
    return Sweep(stages=(recipes,), metric="validation_loss", higher=False, seconds=1, hardware="a CPU")


ATTACKS = {
    ("task", "sweep_toy:small"): "not of this command or sweep",
    ("task", "os:getcwd"): "not of this command or sweep",
    ("task", "evil:run"): "not of this command or sweep",
    ("optimizer", "evil:run"): "of a module that is imported",
    ("optimizer", "sweep_toy:small"): "has no optimizer 'small'",
}


def test_a_store_can_name_only_tasks_and_optimizers_that_the_worker_has(toy, tmp_path, monkeypatch):
    """The store's recipes are of the sweep's class, their settings are an attacker's."""
    monkeypatch.setattr("mvngrad_lab.sweep.worker.ERRORS_IN_A_ROW", 100)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\ndef run(*_): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    toy.init(own(), "test_own_sweeps:own")
    problems = {}
    for (field, value), problem in ATTACKS.items():
        more = {"beta1": None, "beta2": None, "eps": None} if field == "optimizer" else {}
        recipe = replace(make_recipe(noisy), **{field: value}, **more)
        maker = "mvngrad_lab.tasks.own.recipe:Own"
        toy.queue.add([{"key": recipe.key, "stage": "1", "maker": maker, "settings": recipe.settings}])
        problems[recipe.key] = problem
    assert toy.work() == {"finished": 2, "raised": len(ATTACKS)}
    reasons = {record.key: record.outcome["reason"] for record in toy.queue.records() if record.status == "raised"}
    assert all(problem in reasons[key] for key, problem in problems.items()), reasons
    assert not (tmp_path / "executed").exists()
    assert "evil" not in sys.modules
