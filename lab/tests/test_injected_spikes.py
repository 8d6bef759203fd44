"""Bad batches in trainings: what is injected, how runs are compared, and verdicts on generated comparisons."""

import dataclasses
import json
import math
import re
from functools import partial
from statistics import fmean, median

import numpy as np
import pytest
import torch
from texts import write_text

from mvngrad_lab.experiments.spikes import compare, figure as figures, mnist, recipes, records, run, tasks
from mvngrad_lab.report import Sources, TableResult
from mvngrad_lab.report.page import draw
from mvngrad_lab.report.verdicts import CAVEAT, NOT_REPRODUCED, NOT_RUN, REPRODUCED, UNDECIDED, Verdict, find_judges
from mvngrad_lab.tasks.language.data.prepare import prepare_folder_tokens
from mvngrad_lab.training import queue, step

CPU = torch.device("cpu")
JUDGES = find_judges()


@pytest.fixture(autouse=True)
def _small(monkeypatch, no_data, letters, small_images):
    """Events in short runs."""
    for name, value in (("FIRST", 4), ("EVERY", 16), ("WITHIN", 4), ("BURST", 2), ("CLIP", 0.1)):
        monkeypatch.setattr(recipes, name, value)


SMALL_IMAGES = {"batch_size": 10, "epochs": 10, "eval_every": 10, "precision": "float32", "randaugment_operations": 0}
SMALL_TEXT = {
    "text": "words", "model": "tiny", "batch_size": 4, "micro_batch_size": 4, "steps": 40, "epoch_steps": 10,
    "warmup_steps": 2, "precision": "float32",
}  # fmt: skip


def small_image_recipe(**settings):
    return recipes.image_recipe("mvngrad", **{"seed": 1, "lr": 1e-3, **SMALL_IMAGES, **settings})


def plans(task, recipe):
    """The plans of all epochs, as one."""
    epochs = [task.plan_epoch(recipe, epoch) for epoch in range(recipe.epochs)]
    return {name: torch.cat([epoch[name] for epoch in epochs]) for name in epochs[0]}


def test_queues_pair_every_run_with_one_without_bad_batches():
    rates = [recipe for name in ("text-rates", "text-short-rates") for recipe in recipes.make_queue(name, {})]
    assert len({recipe.key for recipe in rates}) == 2 * 4 * 4
    tuned = {recipe.key: {"status": "finished", "validation_loss": abs(recipe.lr - 1e-3)} for recipe in rates}
    for task, (count, kinds) in {"text": (240, 4), "text-short": (96, 4), "images": (180, 3)}.items():
        whole = recipes.make_queue(task, tuned)
        assert sorted({recipe.lr for recipe in whole}) == pytest.approx([1e-3, 3e-3])
        keys = {recipe.key for recipe in whole}
        assert len(whole) == len(keys) == count
        assert len({recipe.injection for recipe in whole}) == kinds
        assert all(dataclasses.replace(recipe, injection="none").key in keys for recipe in whole)
        assert [recipe.seed for recipe in whole] == sorted(recipe.seed for recipe in whole)


def test_each_cell_has_the_best_of_its_rates():
    losses = {
        recipe.key: {"status": "finished", "validation_loss": 4.0 + (recipe.lr != best)}
        for recipe in recipes.make_queue("text-rates", {})
        for best in [{"adam": 3e-4, "mvngrad": 1e-2}.get(recipe.optimizer, 3e-3)]
    }
    rates = {"adam": 3e-4, "laprop": 3e-3, "adabelief": 3e-3, "mvngrad": 1e-2}
    assert recipes.find_best_rates("text", losses) == rates
    assert {round(r.lr / rates[r.optimizer], 6) for r in recipes.make_queue("text", losses)} == {1, 3}
    with pytest.raises(ValueError, match="run the queue text-short-rates first"):
        recipes.make_queue("text-short", losses)
    adam = [recipe.key for recipe in recipes.make_queue("text-rates", {}) if recipe.optimizer == "adam"]
    losses[adam[0]] = {"status": "diverged", "validation_loss": math.nan}
    losses[adam[1]]["validation_loss"] = None
    losses[adam[2]]["validation_loss"] = 4.5
    assert recipes.find_best_rates("text", losses)["adam"] == 3e-3
    with pytest.raises(ValueError, match="all runs of text-rates with adam diverged; try lower rates"):
        recipes.find_best_rates("text", {**losses, **{key: {"status": "diverged"} for key in adam}})


@pytest.mark.parametrize("injection", ["labels", "scaled"])
def test_injection_changes_the_plan_of_bad_images_alone(injection):
    recipe = small_image_recipe(injection=injection)
    task = tasks.SpikedImagesTask(recipe, None, CPU)
    clean, bad = (plans(task, dataclasses.replace(recipe, injection=kind)) for kind in ("none", injection))
    events = recipes.find_events(1, 40)
    assert len(events) == 2
    steps = {event + at for event in events for at in range(2 if injection == "labels" else 1)}
    assert all(torch.equal(clean[name], bad[name]) for name in ("order", "uniforms", "lam"))
    assert set(bad["shift"].any(1).nonzero().flatten().tolist()) == (steps if injection == "labels" else set())
    assert set((bad["scale"] != 1).nonzero().flatten().tolist()) == (steps if injection == "scaled" else set())
    assert not clean["shift"].any()
    for at in range(40):
        before, after = (
            task.make_batch({name: value[at] for name, value in plan.items()})[1].argmax(1) for plan in (clean, bad)
        )
        same = (before == after).float().mean()
        assert same < 0.5 if injection == "labels" and at in steps else same == 1


@pytest.mark.parametrize("injection", ["labels", "scaled"])
def test_injection_changes_bad_digits_alone(injection):
    recipe = mnist.make_training(
        mnist.MnistSpikes("mnist-5k"), (0.9, 0.7), "adam", lr=1e-3, seed=1, injection=injection
    )
    task = tasks.SpikedMnistTask(recipe, None, CPU)
    clean, bad = (plans(task, dataclasses.replace(recipe, injection=kind)) for kind in ("none", injection))
    events = recipes.find_events(1, len(clean["order"]))
    steps = {event + at for event in events for at in range(2 if injection == "labels" else 1)}
    model = task.build_model()
    for at in range(len(clean["order"])):
        batches = [task.make_batch({name: value[at] for name, value in plan.items()}) for plan in (clean, bad)]
        (images, labels, _), (bad_images, bad_labels, scale) = batches
        assert torch.equal(images, bad_images)
        wrong = (labels != bad_labels).float().mean()
        assert wrong == (1 if injection == "labels" and at in steps else 0)
        assert scale == (recipes.SCALE if injection == "scaled" and at in steps else 1)
        if at in steps and injection == "scaled":
            torch.testing.assert_close(task.loss(model, batches[1]), recipes.SCALE * task.loss(model, batches[0]))


def test_mnist_is_trained_in_both_regimes_at_the_best_rate_of_each_cell(monkeypatch):
    """The trainings are small, and their losses are replaced by numbers that say which rate is best."""
    trained = []

    def train(recipe, data):
        trained.append(recipe)
        steps = recipe.epochs * 26
        slow = recipe.optimizer in ("adam", "adabelief") and recipe.beta2 == 0.7 and recipe.injection != "none"
        losses = [1.0 if slow else 0.0] * steps
        return {
            "status": "finished",
            "losses": losses,
            "validation_loss": abs(recipe.lr - 1e-3),
            "test_loss": slow + 0.0,
        }

    monkeypatch.setattr(mnist, "train", train)
    monkeypatch.setattr(mnist, "count_cores", lambda: 1)
    ticks = []
    result = mnist.run(mnist.MnistSpikes("mnist-5k", epochs=1), None, ticks.append)
    assert result["networks"] == len(trained) == 2 * (4 * 5 + 10 * 2 * 3 * 8)
    assert ticks == sorted(ticks)
    assert ticks[-1] == pytest.approx(1)
    assert sorted({recipe.lr for recipe in trained if recipe.seed}) == pytest.approx([1e-3, 3e-3])
    for regime, betas, status in (("usual", [0.9, 0.99], UNDECIDED), ("short", [0.9, 0.7], REPRODUCED)):
        part = result["regimes"][regime]
        assert (part["betas"], set(part["best"].values())) == (betas, {1e-3})
        assert part["done"] == part["of"] == 480
        assert {row["rate"] for row in part["rows"]} == {"1x", "3x"}
        for claim in ("recovery", "damage"):
            assert JUDGES[f"spikes-mnist-{regime}-{claim}"](result).status == status
    figures = draw(TableResult("spikes-mnist", {}, {}, result, ("a",), 0))
    assert [figure.title for figure in figures] == [f"After a bad batch, betas (0.9, {beta})" for beta in (0.99, 0.7)]
    assert len({panel.svg for figure in figures for panel in figure.panels}) == 8


def test_quick_has_one_regime_and_judges_no_other():
    recipe = mnist.make_recipe(True, None)
    assert list(recipe.betas) == ["short"]
    assert JUDGES["spikes-mnist-usual-damage"]({"regimes": {}}).status == NOT_RUN


def test_a_small_network_is_trained_until_it_diverges():
    of = mnist.MnistSpikes("mnist-5k", epochs=1)
    good, bad = (mnist.make_training(of, (0.9, 0.99), "mvngrad", lr=lr, seed=1) for lr in (1e-3, 1e30))
    finished = mnist.train(good, None)
    assert finished["status"] == "finished"
    assert len(finished["losses"]) == 26
    assert finished["losses"][-1] < finished["losses"][0]
    assert math.isfinite(finished["test_loss"])
    diverged = mnist.train(bad, None)
    assert diverged["status"] == "diverged"
    assert "validation_loss" not in diverged, "the best rate is chosen among finite losses"
    assert not math.isfinite(diverged["losses"][-1])


@pytest.mark.parametrize("injection", ["shuffled", "repeated", "scaled"])
def test_injection_changes_the_plan_of_bad_text_alone(tmp_path, injection):
    write_text(tmp_path / "words" / "a.txt", *(f"{n} words and {n * n} more" * 20 for n in range(60)))
    write_text(tmp_path / "words" / "validation.txt", "some words and more " * 10)
    name, _ = prepare_folder_tokens(tmp_path / "words", tmp_path / "data", workers=1)
    recipe = recipes.text_recipe("adam", seed=1, lr=1e-3, **{**SMALL_TEXT, "text": name}, injection=injection)
    task = tasks.SpikedTextTask(recipe, tmp_path / "data", CPU)
    clean, bad = (plans(task, dataclasses.replace(recipe, injection=kind)) for kind in ("none", injection))
    events = recipes.find_events(1, 40)
    changed = [at for at in range(40) if not torch.equal(clean["tokens"][at], bad["tokens"][at])]
    assert changed == ([] if injection == "scaled" else events)
    for at in changed:
        windows = bad["tokens"][at]
        if injection == "repeated":
            assert torch.equal(windows, clean["tokens"][at][:, :1].expand_as(windows))
        else:
            assert torch.equal(windows.flatten().sort().values, clean["tokens"][at].flatten().sort().values)
    assert bad["scale"][events].tolist() == [recipes.SCALE if injection == "scaled" else 1.0] * 2
    batch = task.make_batch({key: value[events[0]] for key, value in bad.items()})
    model = task.build_model()
    torch.testing.assert_close(task.loss(model, batch), batch[-1] * task.loss(model, (*batch[:-1], torch.ones(()))))


def test_queue_is_trained_exported_and_compared(tmp_path, monkeypatch):
    kinds = ("none", "labels", "scaled")
    some = [small_image_recipe(injection=kind, **clip) for clip in ({}, {"clip": 0.1}) for kind in kinds]
    monkeypatch.setattr(recipes, "make_queue", lambda task, runs: some if task == "images" else [])
    options = {"device": "cpu", "task": tasks.SpikedImagesTask, "every_step": True}
    assert queue.train_queue(some, tmp_path, finished={}, stop_after=600, run_seconds=0, **options) == 0
    stored = records.read_runs(tmp_path)
    assert run.export(tmp_path / queue.FINISHED, tmp_path / "results") == ({"spikes-images.json": 6}, [])
    exported = records.read_runs(tmp_path / "results")
    assert exported.keys() == stored.keys() == {recipe.key for recipe in some}
    first = recipes.find_events(1, 40)[0]
    clean, labels, scaled = (exported[recipe.key]["losses"] for recipe in some[:3])
    assert len(clean) == 40
    assert clean[:first] == labels[:first] == scaled[:first], "nothing differs before the first event"
    assert scaled[first] == pytest.approx(1000 * clean[first], rel=1e-3)
    assert scaled[first + 1] != clean[first + 1]
    assert exported[some[3].key]["losses"] != clean, "clipping has its own run without bad batches"

    monkeypatch.setattr(compare, "SHOWN", 11)
    (table,) = records.collect(Sources((tmp_path / "results",), {}, warn=pytest.fail))
    assert [(row["protection"], row["injection"]) for row in table.result["rows"]] == [
        (name, kind) for name in ("no clipping", "norm clipping") for kind in ("labels", "scaled")
    ]
    row = table.result["rows"][0]
    metric = "test_accuracy"
    assert row["damage"] == exported[some[0].key][metric] - exported[some[1].key][metric]
    events, bad = recipes.find_events(1, 40), 2
    after = [[b - a for a, b in zip(clean, labels, strict=True)][event + bad :] for event in events]
    means = [median(fmean(each[start : start + 10]) for each in after) for start in (0, 1)]
    assert table.result["mean_excess"]["labels"]["1x"]["mvngrad"] == pytest.approx(means)
    (figure,) = draw(table)
    assert len(figure.table.rows) == 4
    assert [panel.title for panel in figure.panels] == [
        f"{kind}, 1x the best rate" for kind in ("Wrong labels", "Loss times 1,000")
    ]
    assert "damage to the final test accuracy" in figure.caption


def test_text_is_trained_at_the_best_rate_of_each_cell(tmp_path, monkeypatch):
    """The command of the GPU queues, with a tiny model on a CPU."""
    write_text(tmp_path / "words" / "a.txt", *(f"{n} words and {n * n} more" * 20 for n in range(60)))
    write_text(tmp_path / "words" / "validation.txt", "some words and more " * 10)
    name, _ = prepare_folder_tokens(tmp_path / "words", tmp_path / "data", workers=1)
    size = {**SMALL_TEXT, "text": name, "batch_size": 1, "micro_batch_size": 1, "steps": 20}
    small = recipes.Queue(partial(recipes.text_recipe, **size), ("none", "scaled"), (1e-9, 1e-2), clipped=False)
    monkeypatch.setitem(recipes.TASKS, "text-short", small)
    for key, value in (("COUPLED", ("mvngrad",)), ("SEEDS", (1,)), ("RATE_FACTORS", (3.0,))):
        monkeypatch.setattr(recipes, key, value)
    folders = ["--runs", f"{tmp_path / 'runs'}", "--results", f"{tmp_path}", "--data", f"{tmp_path / 'data'}"]
    monkeypatch.setattr("sys.argv", ["run", "text-short-rates", "text-short", "--device", "cpu", *folders])
    run.main()
    counts = {"spikes-text-short-rates.json": 2, "spikes-text-short.json": 2}
    assert run.export(tmp_path / "runs" / queue.FINISHED, tmp_path) == (counts, [])
    monkeypatch.setattr(compare, "SHOWN", 11)
    (table,) = records.collect(Sources((tmp_path,), {}, warn=pytest.fail))
    assert (table.name, table.result["done"], table.left) == ("spikes-text-short", 2, 0)
    assert [row["rate"] for row in table.result["rows"]] == ["3x"]
    rows = json.loads((tmp_path / "spikes-text-short.json").read_text())["runs"]
    assert {row["settings"]["lr"] for row in rows} == {3e-2}
    (figure,) = draw(table)
    assert len(figure.panels) == 1


def test_runs_that_differ_in_clipping_share_what_is_compiled():
    made = [
        step.get_training_step(
            small_image_recipe(clip=clip), None, CPU, compiled=False, captured=False, task_class=tasks.SpikedImagesTask
        )
        for clip in (None, 0.5, 0.5)
    ]
    assert made[0].device_task is made[1].device_task
    assert made[0] is not made[1] is made[2]
    assert [each.clip for each in made] == [math.inf, 0.5, 0.5]


# Verdicts


def make_rows(recovery=None, damage=None, diverged=(), clipped=1.0, seed=0):
    """Rows of a whole images queue: by cell a mean, noise of 0.1, and damage multiplied by `clipped` under clipping."""
    rng = np.random.default_rng(seed)
    rows = []
    for recipe in recipes.make_queue("images", {}):
        if recipe.injection == "none":
            continue
        protection = "z_clip" if recipe.z_clip else "norm clipping" if recipe.clip else "no clipping"
        lost = recipe.optimizer in diverged and protection == "no clipping"
        factor = 1.0 if protection == "no clipping" else clipped
        rows.append(
            {
                "cell": recipe.optimizer, "protection": protection, "rate": f"{recipe.lr:g}", "seed": recipe.seed,
                "injection": recipe.injection, "diverged": lost, "comparable": True,
                "recovery": None if lost else (recovery or {}).get(recipe.optimizer, 10) + rng.normal(0, 0.1),
                "damage": None if lost else factor * ((damage or {}).get(recipe.optimizer, 1) + rng.normal(0, 0.1)),
            }
        )  # fmt: skip
    return {"rows": rows, "betas": [0.9, 0.99], "mean_excess": {}, "done": 180, "of": 180}


SLOW_FIRST = {"adam": 11, "adabelief": 11}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (make_rows(SLOW_FIRST, clipped=0.5), {"recovery": CAVEAT, "clipping": CAVEAT}),
        (make_rows({"adam": 11}), {"recovery": CAVEAT, "divergence": UNDECIDED}),
        (make_rows({"laprop": 11, "mvngrad": 11}), {"recovery": NOT_REPRODUCED}),
        (make_rows(clipped=2.0), {"clipping": NOT_REPRODUCED}),
        (make_rows(), {"recovery": UNDECIDED, "damage": UNDECIDED}),
        (make_rows(damage={"adam": 2, "adabelief": 2}), {"damage": CAVEAT}),
        (make_rows(diverged=("adam", "adabelief")), {"divergence": CAVEAT, "recovery": CAVEAT}),
        (make_rows(diverged=("mvngrad",)), {"divergence": NOT_REPRODUCED, "damage": NOT_REPRODUCED}),
        ({**make_rows(), "done": 179}, {"recovery": NOT_RUN, "clipping": NOT_RUN, "divergence": NOT_RUN}),
    ],
)  # fmt: skip
def test_verdicts_follow_the_true_differences(rows, expected):
    verdicts = {claim: JUDGES[f"spikes-images-{claim}"](rows) for claim in expected}
    assert {claim: verdict.status for claim, verdict in verdicts.items()} == expected
    for verdict in verdicts.values():
        assert (verdict.strip is None) == (verdict.status == NOT_RUN)
        assert verdict.strip is None or len(verdict.strip.rows) == 4


@pytest.mark.parametrize("lost", [1, 3])
def test_costs_are_named_without_the_runs_that_nothing_can_be_compared_with(lost):
    """At the best rate the runs without bad batches of `lost` of Adam's three seeds diverged."""
    result = make_rows(SLOW_FIRST)
    for row in result["rows"]:
        row["rate"] = "1x" if row["rate"] == "0.001" else "3x"
        if (row["cell"], row["rate"]) == ("adam", "1x") and row["seed"] <= lost:
            row |= {"comparable": False, "recovery": None, "damage": None}
    not_run = dict.fromkeys(("spikes-text-damage", "spikes-text-clipping"), Verdict(NOT_RUN, ""))
    verdicts = {"spikes-text-short-damage": JUDGES["spikes-images-damage"](result), **not_run}
    text = figures.describe_text(result, verdicts)
    names = re.findall(r"[01]\.\d\d with ([\w-]+)", text)
    assert {*names} == {"Adam", "LaProp", "AdaBelief", "MVN-Grad"} - ({"Adam"} if lost == 3 else set())
    assert text.endswith(" (3 seeds).")


@pytest.mark.parametrize(
    ("first", "clipped", "diverged", "expected"),
    [
        (0.2, 0.0, None, (REPRODUCED, REPRODUCED)),
        (0.2, 0.2, None, (REPRODUCED, UNDECIDED)),
        (-0.2, 0.0, None, (NOT_REPRODUCED, NOT_REPRODUCED)),
        (0.0, 0.0, None, (UNDECIDED, UNDECIDED)),
        (0.2, 0.0, ("adam", None), (REPRODUCED, REPRODUCED)),
        (0.2, 0.0, ("adam", 0.1), (REPRODUCED, UNDECIDED)),
    ],
)
def test_without_clipping_the_order_of_momentum_is_judged_by_seed(first, clipped, diverged, expected, monkeypatch):
    """By how much momentum first is worse without and with clipping; `diverged`: a cell with that clipping, seed 4."""
    rng = np.random.default_rng(0)
    rates = recipes.make_queue("text-rates", {})
    runs = {recipe.key: {"status": "finished", "validation_loss": abs(recipe.lr - 1e-3)} for recipe in rates}
    whole = recipes.make_queue("text-unclipped", runs)
    assert len({recipe.key for recipe in whole}) == len(whole) == 4 * 2 * 8
    assert not {recipe.seed for recipe in whole} & {*recipes.SEEDS, recipes.TUNING_SEED}
    assert {recipe.injection for recipe in whole} == {"none"}
    for recipe in whole:
        worse = (clipped if recipe.clip else first) if recipe.optimizer in ("adam", "adabelief") else 0.0
        loss = 5.9 + worse + 0.01 * recipe.seed + rng.normal(0, 0.01)
        lost = (recipe.optimizer, recipe.clip, recipe.seed) == (*(diverged or ("", 0)), 4)
        runs[recipe.key] = {"status": "diverged"} if lost else {"status": "finished", "validation_loss": loss}
    monkeypatch.setattr(records, "read_runs", lambda *folders: runs)
    (table,) = records.collect(Sources((), {}, warn=pytest.fail))
    judges = [JUDGES[f"spikes-text-unclipped-{name}"] for name in ("loss", "gain")]
    assert tuple(judge(table.result).status for judge in judges) == expected
    (figure,) = draw(table)
    unclipped = [loss for loss in table.result["losses"]["adam"]["unclipped"].values() if loss is not None]
    middle = np.median([*unclipped, np.inf][:8])  # a diverged run is the worst
    assert f"unclipped {middle:.3f};" in figure.panels[0].svg
    del runs[whole[0].key]
    (table,) = records.collect(Sources((), {}, warn=pytest.fail))
    assert [judge(table.result).status for judge in judges] == [NOT_RUN] * 2
    assert "8 seeds; 63 of 64 runs are done" in draw(table)[0].caption


def test_pairs_of_a_seed_count_once_if_seeds_are_compared():
    """All in favour: twelve pairs show it, the means of three seeds cannot."""
    result = make_rows(SLOW_FIRST)
    of_mnist = {"regimes": {"usual": result}}
    verdict = JUDGES["spikes-images-recovery"](result)
    assert (verdict.status, verdict.note) == (CAVEAT, "Pairs of one seed are not independent, so p is nominal.")
    assert JUDGES["spikes-mnist-usual-recovery"](of_mnist).status == UNDECIDED
    assert {row.n for row in JUDGES["spikes-mnist-usual-recovery"](of_mnist).strip.rows} == {3}
    nothing = {**result, "rows": [{**row, "comparable": False} for row in result["rows"]]}
    assert JUDGES["spikes-images-clipping"](nothing).status == UNDECIDED


def test_clipping_that_harms_after_one_kind_of_bad_batch_is_named():
    result = make_rows(clipped=0.1)
    for row in result["rows"]:
        if row["injection"] == "labels" and row["protection"] == "norm clipping":
            row["damage"] += 1.5
    verdict = JUDGES["spikes-images-clipping"](result)
    assert "Damage by wrong labels is larger with norm clipping (p = 6e-08)." in verdict.note
    assert "z_clip" not in verdict.note


def test_stored_results_of_single_steps_are_averaged():
    result = {**make_rows(), "excess": {"1x": {"adam": [0.0] * 10 + [1.0] * 90}}}
    del result["mean_excess"]
    (figure,) = draw(TableResult("spikes-images", {}, {}, result, ("a",), 0))
    (panel,) = figure.panels
    assert "Adam 0 at first, 1 at last" in panel.svg
    assert "events and kinds of bad batches" in figure.caption


def test_figure_shows_where_the_median_run_diverged():
    (figure,) = draw(TableResult("spikes-images", {}, {}, make_rows(diverged=("adam",)), ("a",), 0))
    table = figure.table
    lost = {(row[1], name) for row in table.rows for name, cell in zip(table.head, row, strict=True) if "div" in cell}
    assert lost == {("no clipping", "Adam")}
