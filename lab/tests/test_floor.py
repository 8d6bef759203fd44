"""The arms of the floor experiment, and its runs in the report."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from mvngrad import MVNGrad
from mvngrad_lab.experiments.floor import arms, figure, records
from mvngrad_lab.experiments.sweeps.sweeps import cifar100_bs1024_scaled
from mvngrad_lab.report import Sources, load_records
from mvngrad_lab.report.page import render
from mvngrad_lab.report.verdicts import judge
from mvngrad_lab.tasks.cifar100 import recipe as cifar100_recipe
from mvngrad_lab.tasks.language import recipe as language_recipe
from mvngrad_lab.training.optimizers import make_optimizer

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
    assert [len(recipes) for recipes in small.values()] == [5] * 4
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
    assert after.startswith("A floor under the divisor of all four optimizers: ")


def test_the_report_has_no_figure_without_new_runs(tmp_path):
    assert records.collect(Sources((tmp_path,), {}, warn=pytest.fail)) == []
