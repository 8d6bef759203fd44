"""Table 1 from the runs that are there: what is missing stays missing, and the rules decide the rest."""

import dataclasses
from pathlib import Path

import pytest
from samples import add_tables

from mvngrad_lab import store
from mvngrad_lab.experiments.cifar100.records import table1
from mvngrad_lab.experiments.state_precision.records import state_precision
from mvngrad_lab.report.figures import draw
from mvngrad_lab.report.tables import OPTIMIZERS
from mvngrad_lab.report.verdicts import CAVEAT, NOT_REPRODUCED, NOT_RUN, REPRODUCED, UNDECIDED, judge
from mvngrad_lab.tasks.cifar100.recipe import SELECTED

PAPER = {
    128: {"adam": 77.82, "laprop": 77.72, "adabelief": 79.93, "mvngrad": 79.94},
    1024: {"adam": 78.26, "laprop": 78.40, "adabelief": 79.34, "mvngrad": 79.63},
}
RESULTS = Path(__file__).parents[2] / "results"


def run(recipe, accuracy, status="finished"):
    found = {"test_accuracy": accuracy, "train_accuracy": 99.0} if status == "finished" else {}
    result = {"status": status, **found, "seconds": 100.0, "data": "made up"}
    return store.FinishedRun(recipe.key, recipe.name, recipe.settings, {"device": "H200", "commit": "abc"}, result)


def beside(found):
    """As it is where another run had the same GPU."""
    return dataclasses.replace(
        found, environment={**found.environment, "beside": "another"}, result={**found.result, "seconds": 900.0}
    )


def diverged(found):
    return dataclasses.replace(found, result={"status": "diverged", "seconds": 100.0})


def runs(shift=lambda recipe: 0.0):
    """All 24, each the paper's number but for a shift and a little for the seed."""
    return [run(r, PAPER[r.batch_size][r.optimizer] + 0.02 * (r.seed - 1) + shift(r)) for r in table1()]


def verdicts(found):
    return {claim.id: verdict for claim, verdict in judge(add_tables(found)) if claim.target == "table1"}


def statuses(found):
    """Of what is judged; train accuracy is not the paper's, and seconds are only compared."""
    judged = verdicts(found).items()
    return {name: verdict.status for name, verdict in judged if "train" not in name and name != "time-cifar"}


def test_there_are_24_runs_and_seeds_are_neighbours():
    recipes = table1()
    assert len({recipe.key for recipe in recipes}) == 24
    assert [recipe.seed for recipe in recipes] == [0, 1, 2] * 8
    assert all(recipe.epochs == 200 for recipe in recipes)
    assert {(recipe.optimizer, recipe.batch_size) for recipe in recipes} == SELECTED.keys()
    assert {recipe.optimizer for recipe in recipes} == set(OPTIMIZERS.values())


def test_the_papers_own_numbers_reproduce_it():
    assert set(statuses(runs()).values()) == {REPRODUCED}


def test_seconds_are_compared_and_not_judged():
    found = [dataclasses.replace(each, result={**each.result, "seconds": 50.0 + i}) for i, each in enumerate(runs())]
    compared = verdicts(found)["time-cifar"]
    assert compared.status == UNDECIDED
    assert "56 s at batch 128 (n=12); 68 s at batch 1024 (n=12)" in compared.measured
    shared = verdicts([beside(each) for each in found])["time-cifar"]
    assert shared.status == NOT_RUN


def test_a_cell_outside_its_band_is_named():
    found = verdicts(runs(lambda r: -1.0 * (r.optimizer == "adam" and r.batch_size == 128)))
    assert found["cifar-test-128"].status == CAVEAT
    assert found["cifar-test-128"].note == "Outside 0.6 points: Adam."
    assert found["cifar-test-1024"].status == REPRODUCED


def test_all_outside_is_not_reproduced():
    assert statuses(runs(lambda r: 5.0))["cifar-test-1024"] == NOT_REPRODUCED


def test_equal_accuracies_have_no_order():
    level = statuses(runs(lambda r: 79.0 - PAPER[r.batch_size][r.optimizer]))
    assert level["cifar-order-128"] == level["cifar-order-1024"] == NOT_REPRODUCED


def test_a_best_that_may_be_chance_is_a_caveat():
    found = verdicts(runs(lambda r: -0.29 * (r.optimizer == "mvngrad" and r.batch_size == 1024)))
    assert found["cifar-order-1024"].status == CAVEAT
    assert "MVN-Grad less AdaBelief: -0.00" in found["cifar-order-1024"].note.replace("+0.00", "-0.00")


def test_what_is_missing_is_not_run_and_said():
    found = [r for r in runs() if not (r.recipe["optimizer"] == "laprop" and r.recipe["batch_size"] == 128)]
    assert verdicts(found)["cifar-test-128"].status == NOT_RUN
    assert verdicts(found)["cifar-test-128"].note == "Runs to come: 3 of LaProp."
    assert verdicts(found)["cifar-test-1024"].status == REPRODUCED
    assert {v.status for v in verdicts([]).values()} == {NOT_RUN}


def test_a_run_with_another_setting_is_no_run_of_the_table():
    other = dataclasses.replace(table1()[0], weight_decay=1e-4)
    assert add_tables([run(other, 77.0)]) == [run(other, 77.0)]


def test_a_diverged_run_is_not_left_out_in_silence():
    found = runs()
    found[0] = diverged(found[0])
    assert verdicts(found)["cifar-test-128"].status == NOT_REPRODUCED
    assert "diverged: 1 of Adam" in verdicts(found)["cifar-test-128"].measured


def test_the_table_is_drawn_with_the_papers_numbers_beside():
    table = next(each for each in add_tables(runs()) if each.name == "table1")
    (figure,) = draw(table)
    assert len(figure.table.rows) == 2 * len(OPTIMIZERS)
    assert figure.table.rows[-1][:5] == ("1024", "MVN-Grad", "3", "79.63 ± 0.02", "79.63")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ([beside], ("3", "77.82 ± 0.02", "99.00 ± 0.00", "100")),
        ([beside] * 3, ("3", "77.82 ± 0.02", "99.00 ± 0.00", "")),
        ([diverged], ("3, 1 diverged", "77.83 ± 0.01", "99.00 ± 0.00", "100")),
        ([diverged] * 3, ("3, 3 diverged", "diverged", "diverged", "100")),
    ],
)
def test_a_row_has_the_times_of_runs_alone_and_says_which_diverged(change, expected):
    found = runs()
    found[: len(change)] = [what(each) for what, each in zip(change, found, strict=False)]
    table = next(each for each in add_tables(found) if each.name == "table1")
    row = draw(table)[0].table.rows[0]
    assert (row[1], *row[2:4], row[5], row[7]) == ("Adam", *expected)


def test_the_kept_runs_are_runs_of_the_tables():
    """Recipes may not change under results that are kept: the keys would no longer be theirs."""
    kept = [each for each in store.load_runs(RESULTS) if each.name == "cifar100"]
    if not kept:
        pytest.skip("no results are kept here")
    assert {each.key for each in kept} <= {recipe.key for recipe in (*table1(), *state_precision())}
