"""What a sweep does with its grid, its budgets, its stages and its selection, and what it says and exports of them."""

import csv
import json
import os
import platform
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import sweep_toy
from sweep_toy import OPTIMIZERS, Toy, make_sweep, second, small, staged, toys, unlucky

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.sweep import Sweep
from mvngrad_lab.sweep.queue import Queue, create_study
from mvngrad_lab.sweep.records import latest_by_key
from mvngrad_lab.sweep.stages import add_missing, add_seeds, requeue_errors, select_best
from mvngrad_lab.sweep.summary import describe_selection, describe_status, export, make_rows
from mvngrad_lab.sweep.worker import describe_worker
from mvngrad_lab.tasks.mnist.recipe import Mnist

TWO = ("adam", "mvngrad")


def end_all(queue, end):
    """Claim and finish all that waits: `end` gives the value of a record, or the status of a run that failed."""
    while (claim := queue.claim(describe_worker())) is not None:
        value = end(claim.record)
        failed = isinstance(value, str)
        outcome = {"status": value if failed else "finished", "reason": "no luck"}
        queue.finish(claim, outcome, None if failed else value)


# Grids


def test_a_second_init_adds_nothing_and_a_changed_grid_adds_what_is_new(toy):
    assert len(toy.init(small())) == 12
    assert toy.init() == []
    assert "0 configurations are new, 12 were there" in toy.messages[-1]
    toy.messages.clear()
    assert len(toy.init(make_sweep(toys(lr=(1.0, 2.0, 3.0, 4.0))))) == 8
    assert "8 configurations are new, 8 were there" in "\n".join(toy.messages)
    assert "4 that are there are not in the grid any more" in "\n".join(toy.messages)


def test_init_says_what_a_sweep_takes(toy):
    toy.init(staged())
    assert toy.messages[0] == "stage 1: adam 2, laprop 2, adabelief 2, mvngrad 2"
    assert toy.messages[1].startswith("stage 2: adabelief 2, adam 2, laprop 2, mvngrad 2 (if")
    assert "16 different runs, then 8 more seeds" in toy.messages[2]
    assert "about 2.4 hours of a toy" in toy.messages[2]


@pytest.mark.parametrize(
    ("known", "end"),
    [
        ({}, "validation_loss"),
        ({"hardware": "a toy"}, "validation_loss"),
        ({"seconds": 60}, "validation_loss: about 24.0 minutes"),
    ],
)
def test_a_sweep_of_unknown_duration_is_announced_without_one(toy, known, end):
    toy.init(Sweep(stages=(toys(lr=(1.0, 2.0, 3.0, 4.0)),), metric="validation_loss", higher=False, **known))
    assert toy.messages[1] == f"16 different runs, then 8 more seeds of those selected by {end}"


def test_a_second_init_keeps_the_pace_and_says_what_it_changes(toy):
    toy.init(small(), heartbeat=300, grace=7200)
    toy.messages.clear()
    toy.init()
    assert (toy.queue.notes["heartbeat"], toy.queue.notes["grace"]) == (300, 7200)
    assert not any("is 300 s" in line for line in toy.messages)
    toy.init(grace=900)
    assert (toy.queue.notes["heartbeat"], toy.queue.notes["grace"]) == (300, 900)
    assert "grace was 7200 s and is 900 s, for workers that start from now on" in toy.messages
    with pytest.raises(ValueError, match="grace=200 must exceed heartbeat=300"):
        toy.init(grace=200)


def test_settings_may_be_sequences(toy):
    assert len(toy.init(make_sweep(toys(betas=((0.9, 0.99), (0.8, 0.99), (0.5,)))))) == 12
    assert toy.work() == {"finished": 12}


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        (Toy(optimizer="adam", floor=[1.0]), "plain values"),
        *(
            (Mnist(optimizer=optimizer, lr=1e-3, beta1=0.9, beta2=0.99), problem)
            for optimizer, problem in (
                ("torch:Adan", "torch.optim has no optimizer 'Adan'"),
                ("torch:SGD", "torch:SGD does not take betas"),
                ("torch:LBFGS", "needs a closure"),
                ("torch:Adam,amsgrad", "cannot be read"),
                ("torch:Muon", "torch:Muon does not take betas"),
            )
        ),
    ],
)
def test_what_cannot_be_stored_or_trained_is_refused_before_a_store_is_created(toy, recipe, problem):
    with pytest.raises(ValueError, match=problem):
        toy.init(make_sweep([recipe]))
    assert not toy.address.file.exists()


def test_a_sweep_that_init_did_not_write_to_its_end_names_the_remedy(toy):
    create_study(toy.address, "toy", higher=False)
    toy.sweep, toy.queue = small(), Queue(toy.address, "toy")
    with pytest.raises(LookupError, match="is not whole; run `mvngrad sweep init toy` again"):
        toy.work()
    assert "sweep init` again" in describe_status(toy.queue)[0]


def test_the_metric_is_fixed_once_and_is_not_of_test_data(toy):
    with pytest.raises(ValueError, match=r"test_loss.*test data"):
        make_sweep(toys(), metric="test_loss")
    assert make_sweep(toys(), metric="test_loss", test_because="there is no other").metric == "test_loss"
    toy.init(small())
    with pytest.raises(ValueError, match="chooses by validation_loss, which was named before"):
        toy.init(make_sweep(toys(), metric="validation_accuracy", higher=True))


# Budgets


def test_unequal_budgets_are_refused_without_the_option(toy):
    unfair = make_sweep([*toys(), Toy(optimizer="mvngrad", lr=2.0)])
    with pytest.raises(ValueError, match=r"2 runs of mvngrad and 1 of .*--unequal"):
        toy.init(unfair)
    assert not toy.address.file.exists()
    assert len(toy.init(unfair, unequal=True)) == 5


def test_a_changed_grid_has_equal_budgets_together_with_what_was_tried_before(toy):
    toy.init(small())
    other = make_sweep([r if r.optimizer != "mvngrad" else replace(r, lr=r.lr + 0.5) for r in small().stages[0]])
    with pytest.raises(ValueError, match=r"stage 1 of the store has 6 runs of mvngrad and 3 of .*another storage"):
        toy.init(other)
    assert len(toy.init(other, unequal=True)) == 3


def test_nothing_is_selected_among_runs_of_an_earlier_grid(toy):
    toy.init(make_sweep(toys(TWO, lr=(2.0, 3.0)), second))
    assert toy.work() == {"finished": 8}
    assert {record.settings["lr"] for record in select_best(toy.queue).values()} == {3.0}
    toy.init(make_sweep(toys(TWO, lr=(1.0, 2.0)), second))
    assert "6 that are there are not in the grid any more; they stay, and nothing is chosen" in toy.messages[-1]
    assert toy.work() == {"finished": 6}
    assert {record.settings["lr"] for record in select_best(toy.queue).values()} == {2.0}
    assert "6 more in the store are not in the grid any more" in "\n".join(describe_selection(toy.queue))
    assert len(add_seeds(toy.queue, toy.sweep, 2)) == 2
    assert {record.settings["lr"] for record in toy.queue.records() if record.status == "waiting"} == {2.0}
    assert len(make_rows(toy.queue)) == 16


def test_a_worker_whose_code_has_another_grid_runs_that_of_the_store(toy):
    stored = make_sweep(toys(TWO, lr=(1.0, 2.0)))
    toy.init(stored)
    toy.sweep = small()
    assert toy.work() == {"finished": 4}
    assert "warning: this code has another grid than the store; `mvngrad sweep init" in "\n".join(toy.messages)
    toy.messages.clear()
    toy.sweep = stored
    assert toy.work() == {}
    assert toy.messages == []


# Stages, seeds and selection


def test_a_second_stage_follows_from_the_first_and_seeds_from_both(toy):
    toy.init(staged())
    toy.queue.finish(toy.queue.claim(describe_worker()), {"status": "finished"}, 9.0)
    assert toy.init() == []
    with pytest.raises(RuntimeError, match="7 runs of toy are not done"):
        add_seeds(toy.queue, toy.sweep, 3)
    assert toy.work() == {"finished": 15}
    followed = [record.settings for record in toy.queue.records() if record.stage == "2"]
    assert {(s["optimizer"], s["lr"], s["steps"]) for s in followed} == {
        (optimizer, 2.0, steps) for optimizer in OPTIMIZERS for steps in (1, 2)
    }
    selected = select_best(toy.queue)
    assert {name: record.settings["lr"] for name, record in selected.items()} == dict.fromkeys(OPTIMIZERS, 2.0)
    assert len(add_seeds(toy.queue, toy.sweep, 3)) == 8
    assert add_seeds(toy.queue, toy.sweep, 3) == []
    assert toy.work() == {"finished": 8}
    assert select_best(toy.queue) == selected
    assert any(line.startswith("adam: 1.125 ± 0.125 over 3 seeds  (lr 2.0") for line in describe_selection(toy.queue))


def test_the_selection_says_how_many_seeds_diverged_and_how_many_are_to_come(toy):
    toy.init(small())
    toy.work()
    add_seeds(toy.queue, toy.sweep, 4)
    for outcome, value in (({"status": "finished"}, 2.0), ({"status": "diverged", "reason": "no luck"}, None)):
        claim = toy.queue.claim(describe_worker())
        toy.queue.finish(claim, outcome, value)
    lines = {line.partition(":")[0]: line for line in describe_selection(toy.queue)}
    assert " over 2 seeds, 1 of 4 diverged, 1 to come  (" in lines[claim.record.optimizer]
    assert lines["mvngrad"] == "mvngrad: 4, 3 to come  (lr 2.0)"


def test_seeds_of_the_grid_count_whichever_they_are(toy):
    toy.init(make_sweep(toys(("adam",), lr=(1.0,), seed=(3, 7))))
    toy.work()
    for seeds, new in ((2, []), (4, [4, 5])):
        keys = add_seeds(toy.queue, toy.sweep, seeds)
        assert [latest_by_key(toy.queue.records())[key].settings["seed"] for key in keys] == new


@pytest.fixture
def breaking(toy):
    """A sweep of two stages; all runs of mvngrad in the first stage raise until its cause is fixed."""
    fixed = []

    def run(recipe, **options):
        if recipe.fate == "raises" and not fixed:
            raise MemoryError(f"lr={recipe.lr}")
        return sweep_toy.run(replace(recipe, fate=""), **options)

    first = [replace(r, fate="raises" if r.optimizer == "mvngrad" else "") for r in toys(TWO, lr=(1.0, 2.0))]
    toy.init(make_sweep(first, second, run=run))
    with pytest.raises(RuntimeError, match=r"2 runs of toy raised an error.*`mvngrad sweep retry"):
        toy.work()
    return fixed


def count_second_stage(queue):
    records = latest_by_key(queue.records()).values()
    return Counter(record.optimizer for record in records if record.stage == "2")


def test_no_stage_and_no_seeds_are_selected_before_errors_are_tried_again(breaking, toy):
    with pytest.raises(RuntimeError, match="`mvngrad sweep retry"):
        add_seeds(toy.queue, toy.sweep, 2)
    requeue_errors(toy.queue)
    breaking.append(True)
    assert toy.work() == {"finished": 2 + 4}
    assert count_second_stage(toy.queue) == {"adam": 2, "mvngrad": 2}


def test_an_optimizer_without_results_is_not_left_out_of_a_stage_silently(breaking, toy):
    requeue_errors(toy.queue)
    with pytest.raises(ValueError, match=r"stage 2 of the store has 2 runs of .* and 0 of mvngrad.*--unequal"):
        toy.work()
    toy.init(unequal=True)
    assert toy.work() == {"finished": 2}
    assert count_second_stage(toy.queue) == {"adam": 2}


def test_a_stage_that_is_queued_stays_as_it_is(toy):
    """Even if the third try of a run that raised twice gives the best result."""
    toy.init(staged())
    queue, key = toy.queue, toy.queue.records()[0].key
    end_all(queue, lambda record: "raised" if record.key == key else 9.0)
    requeue_errors(queue)
    end_all(queue, lambda record: "raised" if record.key == key else 9.0)
    assert len(add_missing(queue, toy.sweep)) == 8
    requeue_errors(queue)
    end_all(queue, lambda record: 0.0 if record.key == key else 9.0)
    assert select_best(queue)["adam"].key == key
    assert add_missing(queue, toy.sweep) == []
    assert count_second_stage(queue) == dict.fromkeys(OPTIMIZERS, 2)


# Status and exports


def test_the_export_has_every_run(toy, tmp_path):
    toy.init(unlucky(), unequal=True)
    toy.work()
    for suffix in ("json", "csv"):
        assert export(toy.queue, tmp_path / f"runs.{suffix}") == 10
    whole = json.loads((tmp_path / "runs.json").read_text())
    assert (whole["metric"], whole["higher"], len(whole["selected"])) == ("validation_loss", False, 4)
    row = next(row for row in whole["runs"] if row["key"] == whole["selected"]["mvngrad"])
    assert row["settings"]["lr"] == 1.0
    assert (row["status"], row["value"], row["metrics"]["validation_loss"]) == ("finished", 7.0, 7.0)
    assert row["worker"] == f"{platform.node()}-{os.getpid()}"
    assert row["commit"] == describe_worker()["commit"]
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["key"], r["status"]) for r in rows] == [(r["key"], r["status"]) for r in whole["runs"]]
    assert {r["reason"] for r in rows} == {"", "diverged at step 3", "ZeroDivisionError: lr=3.0 is cursed"}
    with pytest.raises(ValueError, match="neither"):
        export(toy.queue, tmp_path / "runs.txt")


def test_status_says_how_much_of_their_time_workers_trained(toy):
    """Two runs of one worker, with a second between them, and one run of another, which shows nothing."""
    times = {"a": [(0, 4.0, 3.5), (5, 5.0, 9.0)], "b": [(0, 1.0, 0.1)]}
    toy.init(small())
    assert not any("of their time" in line for line in describe_status(toy.queue))

    def finish(worker, start, length, trained, **more):
        claim = toy.queue.claim({**describe_worker(), "worker": worker})
        began = f"2026-01-01T00:00:{start:02d}+00:00"
        outcome = {"status": "finished", "began": began, "worker_seconds": length, "seconds": trained, **more}
        assert toy.queue.finish(claim, outcome, 1.0)

    for worker, runs in times.items():
        for entry in runs:
            finish(worker, *entry)
    finish("a", 59, 0.01, 9.0, code={})  # was finished before
    (line,) = (line for line in describe_status(toy.queue) if "of their time" in line)
    assert line.startswith("workers trained 85% of their time")


def test_a_stage_follows_in_the_direction_of_the_store(toy):
    toy.init(staged())
    end_all(toy.queue, lambda record: sweep_toy.loss(record.recipe))
    add_missing(toy.queue, replace(staged(), higher=True))  # by a worker whose code was edited since
    assert {record.settings["lr"] for record in toy.queue.records() if record.stage == "2"} == {2.0}


def test_seeds_of_the_grid_are_in_the_mean(toy):
    toy.init(make_sweep(toys(("adam",), lr=(1.0, 2.0), seed=(0, 1, 2))))
    end_all(toy.queue, lambda record: sweep_toy.loss(record.recipe))
    assert any(line.startswith("adam: 1.125 ± 0.125 over 3 seeds  (lr 2.0") for line in describe_selection(toy.queue))


def test_one_lucky_seed_of_the_grid_selects_nothing(toy):
    toy.init(make_sweep(toys(("adam",), lr=(1.0, 2.0, 3.0), seed=(0, 1, 2))))
    losses = {(1.0, 0): 0.1, (3.0, 0): 0.01, (3.0, 1): "diverged"}  # a seed of lr=3 diverges
    end_all(
        toy.queue,
        lambda record: losses.get(
            (record.settings["lr"], record.settings["seed"]), 0.2 if record.settings["lr"] == 2.0 else 0.9
        ),
    )
    assert {name: record.settings["lr"] for name, record in select_best(toy.queue).items()} == {"adam": 2.0}


def test_a_configuration_is_selected_once_all_its_seeds_are_done(toy):
    toy.init(make_sweep(toys(("adam",), lr=(1.0, 2.0), seed=(0, 1))))
    claim = toy.queue.claim(describe_worker())
    toy.queue.finish(claim, {"status": "finished"}, 0.1)
    assert select_best(toy.queue) == {}
    assert "adam: no configuration has a result with every seed" in describe_selection(toy.queue)


@dataclass(frozen=True, kw_only=True)
class NamedToy(Toy):
    name: ClassVar[str] = "named-toy"
    worker: str = "a"
    outcome: str = "b"
    double: str = "c"


def test_settings_may_have_the_names_of_the_engines_attributes(toy):
    toy.init(make_sweep([NamedToy(optimizer="adam")]))
    end_all(toy.queue, lambda record: sweep_toy.loss(record.recipe))
    (record,) = toy.queue.records()
    assert (record.status, record.settings["worker"]) == ("finished", "a")


def test_a_setting_that_is_not_finite_is_refused(toy):
    with pytest.raises(InvalidInput, match=r"lr=inf.* has a number that is not finite"):
        toy.init(make_sweep(toys(("adam",), lr=(float("inf"),))))
