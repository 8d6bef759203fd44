"""State in fewer bits, from the runs that are there, judged by a margin; and which runs a repository keeps."""

import dataclasses
import math

import pytest
from samples import add_tables
from test_table1 import run as made

from mvngrad_lab import store
from mvngrad_lab.experiments.cifar100.records import table1
from mvngrad_lab.experiments.state_precision.records import state_precision
from mvngrad_lab.report.figures import draw
from mvngrad_lab.report.records import keep_runs
from mvngrad_lab.report.statistics import welch, worse_by_at_most
from mvngrad_lab.report.verdicts import CAVEAT, NOT_REPRODUCED, NOT_RUN, REPRODUCED, judge
from mvngrad_lab.training import train as trainings

BYTES = {"float32": 12, "bf16": 6, "int8": 3}


def run(recipe, accuracy=79.6, status="finished"):
    found = made(recipe, accuracy, status)
    return dataclasses.replace(
        found, result={**found.result, "parameters": 1000, "state_bytes": 1000 * BYTES[recipe.state_dtype]}
    )


def runs(**shift):
    return [run(r, 79.6 + 0.05 * (r.seed - 1) + shift.get(r.state_dtype, 0.0)) for r in state_precision()]


def verdict(found):
    return next(v for claim, v in judge(add_tables(found)) if claim.id == "cifar-state-precision")


def test_there_are_nine_runs_and_table_1_has_three():
    recipes = state_precision()
    assert len({recipe.key for recipe in recipes}) == 9
    assert {r.key for r in recipes} & {r.key for r in table1()} == {r.key for r in recipes[:3]}
    assert {(r.optimizer, r.batch_size, r.epochs) for r in recipes} == {("mvngrad", 1024, 200)}


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        ({}, REPRODUCED),
        ({"int8": 1.0}, REPRODUCED),
        ({"int8": -0.25}, CAVEAT),  # on average within the margin, but the bound is not
        ({"int8": -0.25, "bf16": -0.5}, NOT_REPRODUCED),
    ],
)
def test_the_bound_decides_and_not_the_mean(shift, expected):
    found = verdict(runs(**shift))
    assert found.status == expected
    assert found.note == ("Only bf16." if expected == CAVEAT else "")


def test_seeds_that_could_not_show_it_are_said_to():
    noisy = [run(r, 79.6 + 0.4 * (r.seed - 1)) for r in state_precision()]
    assert verdict(noisy).status == NOT_REPRODUCED
    assert verdict(noisy).note == "Seeds vary so much that equal means would fail too."


def test_what_is_missing_or_diverged_is_said():
    assert verdict(runs()[:-1]).note == "Runs to come: 1 with int8."
    assert verdict(runs()[:3]).status == NOT_RUN, "Table 1's alone"
    broken = [*runs()[:-1], run(state_precision()[-1], None, "diverged")]
    assert verdict(broken).status == NOT_REPRODUCED
    assert "diverged: 1 with int8" in verdict(broken).measured


def test_the_table_has_differences_and_bytes():
    table = next(each for each in add_tables(runs(bf16=-0.1)) if each.name == "state-precision")
    rows = draw(table)[0].table.rows
    assert rows[0] == ("float32", "3", "79.60 ± 0.05", "", "", "", "12,000 (12.00)")
    p = 2 * welch([79.45, 79.5, 79.55], [79.55, 79.6, 79.65])
    assert rows[1][3:] == ("-0.10", f"{p:.2g}", "0.19", "6,000 (6.00)")
    assert table.recipe["batch_size"] == 1024
    assert "state_dtype" not in table.recipe
    part = next(each for each in add_tables(runs()[3:5]) if each.name == "state-precision")
    assert [row[2] for row in draw(part)[0].table.rows] == ["to come", "79.57 ± 0.04", "to come"]
    lost = [*runs()[:6], *(run(recipe, None, "diverged") for recipe in state_precision()[6:])]
    table = next(each for each in add_tables(lost) if each.name == "state-precision")
    assert draw(table)[0].table.rows[2][:4] == ("int8", "3, 3 diverged", "diverged", "")


def test_the_bound_is_that_of_welch():
    values, reference = [79.3, 79.5, 79.6], [79.5, 79.6, 79.9]
    bound = worse_by_at_most(values, reference)
    assert welch(reference, [value + bound for value in values]) == pytest.approx(0.05, abs=1e-9)
    assert worse_by_at_most([1.0, 1.0], [1.5, 1.5]) == pytest.approx(0.5)
    assert math.isnan(worse_by_at_most([1.0], [1.0, 2.0]))


# Runs that are kept


def put(root, found):
    folder = root / found.key
    store.write_atomic(folder / "recipe.json", store.json.dumps({"name": found.name, **found.recipe}))
    store.write_atomic(folder / "environment.json", store.json.dumps(found.environment))
    store.write_atomic(folder / "result.json", store.json.dumps(found.result))


def test_what_is_worth_keeping_is_bundled(tmp_path):
    recipes = [table1()[0], state_precision()[-1]]
    gap = store.FinishedRun("cifar-gap-0", "cifar-gap", {}, {}, {"epochs": [], "trained_with": {}, "K": 2, "data": ""})
    kept = [run(recipes[0]), run(recipes[1], None, "diverged")]
    tried = run(dataclasses.replace(recipes[0], train_limit=2048))
    quick = store.FinishedRun("spike-0", "spike", {}, {"quick": True}, {})
    for each in (*kept, tried, quick):
        put(tmp_path / "runs", each)
    store.write_bundle(tmp_path / "results" / "runs.jsonl", [gap])
    assert keep_runs(tmp_path / "runs", tmp_path / "results" / "runs.jsonl") == 2
    assert {each.key for each in store.load_runs(tmp_path / "results")} == {"cifar-gap-0", *(each.key for each in kept)}
    put(tmp_path / "runs", gap)
    assert keep_runs(tmp_path / "runs", tmp_path / "new.jsonl") == 3


def test_what_the_repository_keeps_is_not_trained_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipes, trained, shares = state_precision()[:3], [], []
    put(tmp_path / "runs", run(recipes[0]))
    store.write_bundle(tmp_path / "results" / "runs.jsonl", [run(recipes[1])])
    monkeypatch.setattr(trainings, "train", lambda recipe, **options: trained.append(recipe))
    trainings.train_missing(recipes, tmp_path / "runs", None, shares.append, print)
    assert trained == [recipes[2]]
    assert shares == pytest.approx([1 / 3, 2 / 3, 1])
