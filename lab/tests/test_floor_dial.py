"""Verdicts on the dial, batch 128, mixed images and beta_mean, on generated runs whose truth is known."""

import dataclasses
import json

import numpy as np
import pytest
from floor_runs import JUDGES, NOISE, collect, judge, write_runs

from mvngrad_lab.experiments.floor import arms, mnist, mnist_table, records
from mvngrad_lab.experiments.floor.effects import compute_mnist_effects
from mvngrad_lab.recipe import RULES, has_eps_s
from mvngrad_lab.report import TableResult
from mvngrad_lab.report.page import draw
from mvngrad_lab.report.verdicts import CAVEAT, NOT_REPRODUCED, NOT_RUN, REPRODUCED, UNDECIDED
from mvngrad_lab.tasks.cifar100.recipe import Cifar100


def dial_results(gain, harm):
    """Accuracy and loss by floor, the middle rate best."""
    for queue, floors, metric in (
        (arms.dial(), arms.DIAL, "test_accuracy"),
        (arms.language_dial(), arms.LANGUAGE_DIAL, "validation_loss"),
    ):
        rates = iter(queue)
        for floor, tried in floors.items():
            for _ in arms.COUPLED if floor < 1 else ("sgd",):
                for at, recipe in enumerate(next(rates) for _ in tried):
                    floored = 1e-3 <= floor < 1
                    value = 72 + gain * floored if metric == "test_accuracy" else 4 + harm * floored
                    yield recipe, {metric: value - (at != 1 if metric == "test_accuracy" else -float(at != 1))}


@pytest.mark.parametrize(("gain", "harm", "expected"), [(2, 0.3, REPRODUCED), (0.5, 0.04, NOT_REPRODUCED)])
def test_dial_takes_the_best_rate_of_each_floor(tmp_path, gain, harm, expected):
    write_runs(tmp_path, list(dial_results(gain, harm)))
    dial = collect(tmp_path)["floor-dial"]
    assert dial.result["images"]["cells"]["laprop"]["0.001"] == {
        "best": 72 + gain, "lr": 1e-2, "done": 3, "of": 3, "rates": [4e-3, 1e-2, 2.5e-2],
    }  # fmt: skip
    assert dial.result["images"]["cells"]["sgd"]["1"]["lr"] == 10
    assert dial.result["language"]["gradient_rms"] == 1e-3
    for task in ("images", "language"):
        verdict = JUDGES[f"floor-dial-{task}"](dial.result)
        assert verdict.status == expected
        assert [row.value for row in verdict.strip.rows] == pytest.approx([gain if task == "images" else harm] * 4)
    (figure,) = draw(dial)
    assert [panel.title for panel in figure.panels] == ["Images: CIFAR-100", "Language: GPT-2 30M"]
    assert f"LaProp 72 at none, 72 at 0.01, 72 at 0.1, {72 + gain:g} at 1" in figure.panels[0].svg
    assert "to come" not in figure.caption
    assert "that counts: 1 point" in figure.panels[0].svg
    assert "that counts: 0.03 nats" in figure.panels[1].svg


def test_dial_shows_which_rates_are_at_an_end_of_their_grid(tmp_path):
    def count_hollow(results):
        write_runs(tmp_path, results)
        return draw(collect(tmp_path)["floor-dial"])[0].panels[0].svg.count("fill:var(--paper")

    results = list(dial_results(2, 0.3))
    middle = count_hollow(results)
    assert count_hollow([(results[0][0], {"test_accuracy": 80}), *results[1:]]) == middle + 1


def test_a_loss_between_none_and_the_needed_one_decides_nothing(tmp_path):
    write_runs(tmp_path, list(dial_results(2, 0.07)))
    assert judge(tmp_path, "floor-dial-language", "floor-dial").status == UNDECIDED


@pytest.mark.parametrize(
    ("gain", "best_rate", "expected"),
    [(0.5, 0.01, REPRODUCED), (0.5, 0.1, CAVEAT), (-0.5, 0.01, NOT_REPRODUCED), (0.0, 0.01, UNDECIDED)],
)
def test_the_dial_on_mnist_is_judged_at_the_floor_that_its_rule_names(gain, best_rate, expected):
    noise = [0.05, -0.05, 0.02, -0.02, 0.0]

    def point(test):
        return {"test": test, "lr": best_rate, "validation": {str(lr): 0.0 for lr in (0.001, 0.01, 0.1)}}

    floors = {"0": [94.0] * 5, "0.001": [99.0] * 5, "0.01": [94 + gain + by for by in noise]}
    cells = {cell: {floor: point(test) for floor, test in floors.items()} for cell in arms.COUPLED}
    result = {"cells": cells, "seeds": arms.MNIST_SEEDS, "gradient_rms": 1e-3, "data": "digits"}
    verdict = JUDGES["floor-mnist"](result)
    assert verdict.status == expected
    assert [row.value for row in verdict.strip.rows] == pytest.approx([gain] * 4)
    assert ("at an end of its grid" in verdict.note) == (best_rate == 0.1)
    assert JUDGES["floor-mnist"]({**result, "seeds": [1, 2, 3, 4, 5]}).status == NOT_RUN


def make_mnist_table(gain, variance, order, sgd, by_eps_s=0.0, seeds=arms.MNIST_TABLE_SEEDS, lr=2e-3):
    rng = np.random.default_rng(3)
    means = {
        arm: 94 + gain * arm.endswith("-floor") + variance * has_eps_s(cell) + order * RULES[cell].momentum_last
        for arm, cell in arms.GRID_ARMS.items()
    }
    means["sgd"] = 94 + gain + (variance + order) / 2 + sgd
    means |= {arm: means[arm.replace("-eps", "-floor")] - by_eps_s for arm in arms.EPS_ARMS}
    values = {arm: {str(seed): mean + rng.normal(0, 0.36) for seed in seeds} for arm, mean in means.items()}
    selected = {arm: {"lr": lr, "validation": {"0.001": 90, "0.002": 91, "0.003": 90}} for arm in values}
    return {"arms": values, "selected": selected, "data": "digits"}


@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        ((0.5, 0, 0, 0), [REPRODUCED] * 4),
        ((0.0, 0, 0, 0), [NOT_REPRODUCED, REPRODUCED, REPRODUCED, REPRODUCED]),
        ((0.5, 0.4, 0, 0), [REPRODUCED, NOT_REPRODUCED, REPRODUCED, REPRODUCED]),
        ((0.5, 0, -0.4, 0), [REPRODUCED, REPRODUCED, NOT_REPRODUCED, REPRODUCED]),
        ((0.5, 0, 0, 0.4), [REPRODUCED, REPRODUCED, REPRODUCED, NOT_REPRODUCED]),
        ((0.5, 0.2, 0, 0), [REPRODUCED, UNDECIDED, REPRODUCED, REPRODUCED]),
    ],
)
def test_the_table_on_mnist_finds_the_effects_that_are_there(effects, expected):
    result = make_mnist_table(*effects)
    verdicts = [JUDGES[f"floor-mnist-{claim}"](result) for claim in ("gain", "variance", "order", "sgd")]
    assert [verdict.status for verdict in verdicts] == expected
    for verdict, effect in zip(verdicts, effects, strict=True):
        assert verdict.strip.rows[0].value == pytest.approx(effect, abs=0.15)
        assert "n = 100 seeds (21 to 120)" in verdict.measured
    (figure,) = draw(TableResult("floor-mnist-table", {}, {}, result, ("a",), 0))
    assert f"floor +{effects[0]:.1f}"[:8] in figure.panels[0].svg.replace("-0.0", "+0.0")
    assert len(figure.table.rows) == 11


@pytest.mark.parametrize(
    ("variance", "by_eps_s", "expected"),
    [(0.0, 0.0, REPRODUCED), (0.2, 0.2, REPRODUCED), (0.2, 0.0, NOT_REPRODUCED), (0.07, 0.0, UNDECIDED)],
)
def test_the_table_on_mnist_tells_the_variance_from_the_place_of_epsilon(variance, by_eps_s, expected):
    result = make_mnist_table(0.5, variance, 0, 0, by_eps_s)
    assert JUDGES["floor-mnist-epsilon"](result).status == expected
    effects = compute_mnist_effects(result)
    assert effects["eps in all four: variance"].estimate == pytest.approx(variance - by_eps_s, abs=0.1)
    assert effects["eps_s less eps"].estimate == pytest.approx(by_eps_s, abs=0.1)


def test_the_table_on_mnist_needs_all_seeds_and_rates_inside_their_grids():
    few = make_mnist_table(0.5, 0, 0, 0, seeds=arms.MNIST_TABLE_SEEDS[:3])
    assert JUDGES["floor-mnist-gain"](few).status == NOT_RUN
    verdict = JUDGES["floor-mnist-gain"](make_mnist_table(0.5, 0, 0, 0, lr=3e-3))
    assert verdict.status == CAVEAT
    assert "at an end of its grid: Adam with a floor, " in verdict.note


def test_the_table_on_mnist_selects_rates_with_other_seeds(monkeypatch):
    trained = []

    def train(jobs, recipe, data, tick):
        trained.extend(jobs)
        tick(1.0)
        return {job: {"validation": 90 + (job.lr in (3e-3, 2.5e-2, 1.0)), "test": float(job.seed)} for job in jobs}

    monkeypatch.setattr(mnist_table, "train_jobs", train)
    recipe, ticks = mnist_table.make_recipe(False, None), []
    result = mnist_table.run(recipe, None, ticks.append)
    assert not {*recipe.seeds} & {*recipe.tuning_seeds}
    assert not {*recipe.seeds} & {*arms.MNIST_SEEDS, *range(1, 6)}
    assert result["networks"] == len(trained) == len({*trained}) == 11 * (6 * 10 + 100)
    assert ticks == [pytest.approx(660 / 1760), 1.0]
    assert {arm: row["lr"] for arm, row in result["selected"].items()} == {
        **dict.fromkeys(arms.GRID_ARMS, 3e-3),
        **{arm: 2.5e-2 for arm in (*arms.GRID_ARMS, *arms.EPS_ARMS) if not arm.endswith("-none")},
        "sgd": 1.0,
    }
    judged = [job for job in trained if job.seed in recipe.seeds]
    assert {(mnist_table.name_arm(job), job.lr) for job in judged} == {
        (arm, row["lr"]) for arm, row in result["selected"].items()
    }
    assert {job.cell for job in judged if job.eps} == {"adabelief", "mvngrad"}
    assert {job.floor for job in judged if job.eps} == {1e-2}
    assert all(row == {str(seed): float(seed) for seed in recipe.seeds} for row in result["arms"].values())


def test_the_dial_on_mnist_has_intervals_over_seeds():
    def count_intervals(seeds):
        test = [94.0, 94.5, 95.0][:seeds]
        point = {"best": 94.5, "test": test, "lr": 0.01, "validation": {"0.01": 95.0}, "done": 1, "of": 1}
        cells = {cell: dict.fromkeys(("0", "0.001"), point) for cell in arms.COUPLED} | {"sgd": {"1": point}}
        result = {"cells": cells, "seeds": [6, 7, 8][:seeds], "gradient_rms": 1e-3, "data": "digits"}
        (figure,) = draw(TableResult("floor-mnist", {}, {}, result, ("a",), 0))
        assert f"mean over {seeds} seeds" in figure.caption
        return figure.panels[0].svg.count("stroke-width:1.2;")

    assert (count_intervals(1), count_intervals(3)) == (0, 4 * 2 + 1)


def test_dial_relates_floors_to_the_gradient_at_the_lowest_floor_that_kept_it(tmp_path):
    write_runs(tmp_path, list(dial_results(2, 0.3)))
    path = tmp_path / records.get_file_name("made-up")
    rows = {row["key"]: row for row in json.loads(path.read_text())["runs"]}
    for recipe in arms.language_dial()[: 4 * 3]:  # without a floor
        del rows[recipe.key]["gradient_rms"]
    for recipe in arms.language_dial()[4 * 3 : 8 * 3]:  # at 1e-6
        rows[recipe.key]["gradient_rms"] = [2e-4]
    for recipe in arms.language_dial()[8 * 3 :]:
        rows[recipe.key]["gradient_rms"] = [1.5e-4]
    path.write_text(json.dumps({"runs": list(rows.values())}))
    dial = collect(tmp_path)["floor-dial"]
    assert dial.result["language"]["gradient_rms"] == 2e-4
    (figure,) = draw(dial)
    assert "is 1.00 to 1.00 of it on CIFAR-100 and falls to 0.75 of it on GPT-2 30M" in figure.caption


def test_dial_leaves_out_points_with_runs_to_come(tmp_path):
    results = list(dial_results(2, 0.3))
    write_runs(tmp_path, results[:20])  # all of floor 0, two cells of 1e-5 and two rates of the third
    dial = collect(tmp_path)["floor-dial"]
    assert JUDGES["floor-dial-images"](dial.result).status == NOT_RUN
    (figure,) = draw(dial)
    description = figure.panels[0].svg
    assert "20 of 135 runs of both tasks are done" in figure.caption
    assert description.count("72 at none, 72 at 0.01") == 2, "Adam and LaProp"
    assert description.count("72 at none;") + description.count("72 at none.") == 2, "AdaBelief and MVN-Grad"
    assert "to come" in description, "SGD"


def batch_128_results(gain, best=2):
    rng, grid = np.random.default_rng(5), arms.batch_128_grid()
    for recipes in grid.values():
        yield from ((r, {"test_accuracy": 70.0 + (at == best)}) for at, r in enumerate(recipes))
    for arm, recipes in grid.items():
        mean = 78 + gain * arm.endswith("-floor")
        yield from ((r, {"test_accuracy": mean + rng.normal(0, NOISE)}) for r in arms.table_runs({arm: recipes[best]}))


@pytest.mark.parametrize(("gain", "status"), [(2.0, REPRODUCED), (0.0, NOT_REPRODUCED), (1.0, UNDECIDED)])
def test_batch_128_has_seeds_as_blocks(tmp_path, gain, status):
    write_runs(tmp_path, list(batch_128_results(gain)))
    verdict = judge(tmp_path, "floor-batch-128", "floor-batch-128")
    assert verdict.status == status
    assert "6 degrees of freedom; Adam with a floor " in verdict.measured


def test_batch_128_names_arms_whose_best_rate_is_the_lowest(tmp_path):
    assert arms.BATCH_128_RATES[4] == min(arms.BATCH_128_RATES)
    at_the_end = "The best rate is at an end of its grid: Adam with a floor, MVN-Grad with a floor, "
    for best, note in ((2, ""), (4, at_the_end)):
        write_runs(tmp_path, list(batch_128_results(2.0, best)))
        verdict = judge(tmp_path, "floor-batch-128", "floor-batch-128")
        assert verdict.status == REPRODUCED
        assert verdict.note.startswith(note)
        assert bool(verdict.note) == bool(note)


def test_batch_128_says_what_is_left(tmp_path):
    grid, long_runs = (list(batch_128_results(2.0))[part] for part in (slice(20), slice(20, None)))
    write_runs(tmp_path, grid[:-1])
    verdict = judge(tmp_path, "floor-batch-128", "floor-batch-128")
    assert (verdict.status, verdict.note) == (NOT_RUN, "The grid is not done: MVN-Grad without a floor 4 of 5.")
    write_runs(tmp_path, [*grid, *long_runs[:-1]])
    verdict = judge(tmp_path, "floor-batch-128", "floor-batch-128")
    assert (verdict.status, verdict.note) == (NOT_RUN, "Fewer than three seeds are done of MVN-Grad without a floor.")


@pytest.mark.parametrize(
    ("shift", "status"),
    [
        ({}, REPRODUCED),
        ({"adam": 2.0}, CAVEAT),
        ({"adam": 2.0, "laprop": 2.0}, UNDECIDED),
        (dict.fromkeys(arms.COUPLED, 5.0), NOT_REPRODUCED),
    ],
)
def test_train_accuracy_on_mixed_images_is_compared_with_the_paper(tmp_path, shift, status):
    mixed = {"adam": 83.15, "laprop": 83.05, "adabelief": 85.89, "mvngrad": 85.89}
    write_runs(
        tmp_path,
        [
            (r, {"train_accuracy_mixed": mixed[r.optimizer] + shift.get(r.optimizer, 0), "train_accuracy": 99.0})
            for r in arms.as_published_runs()
        ],
    )
    verdict = judge(tmp_path, "floor-train-mixed-1024", "floor-as-published")
    assert verdict.status == status
    assert (verdict.note == "A shift of +5.00 of all four.") == (len(shift) == 4)


def test_beta_mean_is_compared_with_the_default(tmp_path):
    results = []
    for recipe in arms.beta_mean_runs():
        image = isinstance(recipe, Cifar100)
        for run, shift in ((recipe, 1.5), (dataclasses.replace(recipe, beta_mean=None), 0.0)):
            results.append((run, {"test_accuracy": 70 + shift} if image else {"validation_loss": 4 + shift / 100}))
    write_runs(tmp_path, results)
    verdict = judge(tmp_path, "floor-beta-mean", "floor-beta-mean")
    assert [round(row.value, 2) for row in verdict.strip.rows] == [1.5, 1.5, 0.5], "of 1 point, and of 0.03 of loss"
    assert "language +0.015, to 4.015" in verdict.measured


@pytest.mark.parametrize("eps", [True, False])
def test_a_floor_by_eps_leaves_eps_s_alone(monkeypatch, eps):
    """The job's optimizer: the floor is in eps, or in eps_s, and not in both."""

    class Stop(Exception):
        pass

    def stop(settings, *_, **__):
        raise Stop(settings.eps, settings.eps_s)

    monkeypatch.setattr("mvngrad_lab.experiments.floor.mnist.get_training_step", stop)
    job = mnist_table.Job("mvngrad", 1e-2, 1e-3, 21, eps)
    with pytest.raises(Stop) as caught:
        mnist.train(job, mnist_table.MnistTable(), None)
    assert caught.value.args == ((1e-2, 1e-16) if eps else (1e-8, pytest.approx(1e-6)))
