"""What the report reads of the queues: stores, exported files and bundles, whole and damaged."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import samples

from mvngrad_lab import store
from mvngrad_lab.experiments.floor import arms
from mvngrad_lab.experiments.spikes import recipes, records as spikes
from mvngrad_lab.experiments.state_precision import records as state_precision
from mvngrad_lab.report import build, keep_runs, load_records
from mvngrad_lab.store import FinishedRun
from mvngrad_lab.tasks.cifar100.recipe import paper

RESULTS = Path(__file__).parents[2] / "results"


def write_run(root, recipe, losses=(), **metrics):
    """A finished run in a store."""
    folder = store.RunFolder(recipe, root)
    folder.start({})
    folder.finish({"status": "finished", **metrics})
    if losses:
        row = {"step": len(losses), "epoch": 1, "losses": losses}
        (folder.path / "metrics.jsonl").write_text(json.dumps(row) + "\n")


def export_run(path, recipe, **metrics):
    """A file with one run, as a queue exports it."""
    row = {"key": recipe.key, "status": "finished", "settings": recipe.settings, "metrics": metrics, "losses": [3.0]}
    store.write_atomic(path, json.dumps({"runs": [row]}))


@pytest.mark.parametrize("records", [spikes, state_precision], ids=["spikes", "state_precision"])
def test_runs_are_read_from_the_first_folder_that_has_them(tmp_path, records):
    """A user's own runs come before those of results/."""
    recipe = recipes.make_queue("images", {})[0]
    trained, exported, others = folders = [tmp_path / name for name in ("trained", "exported", "others")]
    write_run(trained, recipe, [1.0, 2.0], test_accuracy=1.0)
    export_run(exported / records.get_file_name("images"), recipe, test_accuracy=2.0)
    export_run(others / records.get_file_name("images"), recipe, test_accuracy=3.0)
    alone = {folder: records.read_runs(folder) for folder in folders}
    assert all(runs.keys() == {recipe.key} for runs in alone.values())
    for first, second in itertools.permutations(folders, 2):
        assert records.read_runs(first, second) == alone[first] != alone[second]


def test_spike_runs_of_a_bundle_are_left_out_of_the_comparison(tmp_path):
    """A bundle has no loss of every step."""
    kept = recipes.make_queue("images", {})[:12]
    assert {recipe.injection for recipe in kept} > {"none"}
    for recipe in kept:
        write_run(tmp_path / "runs", recipe, test_accuracy=70.0)
    store.write_bundle(tmp_path / store.BUNDLE, store.load_runs(tmp_path / "runs"))
    records = load_records(tmp_path, warn=pytest.fail)
    assert {record.key for record in records} == {recipe.key for recipe in kept}, "the runs, and no table"
    (tmp_path / "spikes-images.json").write_text((RESULTS / "spikes-images.json").read_text())
    assert "spikes-images" in {record.name for record in load_records(tmp_path, warn=pytest.fail)}


def test_a_damaged_file_is_left_out_of_the_report_with_a_warning(tmp_path):
    shutil.copy(RESULTS / "state-precision-images.json", tmp_path)
    path = tmp_path / "spikes-images.json"
    path.write_text((RESULTS / path.name).read_text()[:1000])
    said = []
    assert [record.name for record in load_records(tmp_path, warn=said.append)] == ["state-precision-images"]
    (message,) = said
    assert message.startswith(f"spikes is left out: {path} is damaged")


@pytest.mark.parametrize(
    "row", [{"status": "finished"}, {"status": "finished", "key": 1, "settings": {}, "metrics": {}}]
)
def test_a_file_whose_rows_are_not_runs_is_named(tmp_path, row):
    path = tmp_path / "spikes-images.json"
    path.write_text(json.dumps({"runs": [row]}))
    said = []
    assert load_records(tmp_path, warn=said.append) == []
    assert said == [text for text in said if text.startswith(f"spikes is left out: {path} is damaged")] != []


def test_a_table_is_left_out_if_a_run_is_not_a_training(tmp_path):
    """Its files are whole, and have not what a training writes."""
    folder = store.RunFolder(paper("adam", 128), tmp_path)
    folder.start({})
    folder.finish({})
    said = []
    assert [record.key for record in load_records(tmp_path, warn=said.append)] == [folder.recipe.key]
    assert said == ["cifar100 is left out: KeyError: 'status'"]


def test_results_of_another_version_are_left_out_and_the_rest_is_reported(tmp_path, monkeypatch):
    """An experiment may write other results in a later version; then one old run must not end the whole report."""
    whole = samples.runs()[0]
    lines = [replace(whole, key=f"{whole.name}-old", result={}), replace(whole, key=f"{whole.name}-new")]
    lines += [FinishedRun(f"{name}-old", name, {}, {}, {"seconds": 1.0}) for name in ("moments", "mnist-curves")]
    lines += [FinishedRun("own-0", "own", {}, {"made": "2026"}, {"status": "finished"})]
    store.write_bundle(tmp_path / store.BUNDLE, lines)
    said = []
    page = build(tmp_path, out=tmp_path / "page.html", warn=said.append).read_text()
    left_out = sorted(text.partition(" is left out, because its result is not what this version")[0] for text in said)
    assert left_out == sorted(line.key for line in lines if line.key.endswith("-old"))
    assert "own-0" in page
    assert f"{whole.name}-new" in page
    monkeypatch.setenv("MVNGRAD_DEBUG", "1")
    with pytest.raises(KeyError):
        build(tmp_path, out=tmp_path / "page.html", warn=said.append)


def test_a_run_whose_time_is_not_a_text_is_left_out(tmp_path):
    run = {"key": "own-0", "name": "own", "recipe": {}, "environment": {"made": 5}, "result": {}}
    (tmp_path / store.BUNDLE).write_text(json.dumps(run))
    said = []
    assert store.load_runs(tmp_path, on_problem=said.append) == []
    assert "line 1 is not a run (its environment has made 5)" in said[0]


def test_every_seed_of_the_published_settings_is_kept(tmp_path):
    """`mvngrad report --keep`: seeds 4 and 5 are read for the order of Table 1."""
    queued = [*arms.as_published_runs(), *arms.as_published_runs((4, 5))]
    for recipe in queued:
        write_run(tmp_path / "runs", recipe, test_accuracy=79.0, train_accuracy=99.0, seconds=1.0)
    assert keep_runs(tmp_path / "runs", tmp_path / store.BUNDLE) == len(queued)
    kept = store.load_runs(tmp_path)
    assert {run.key for run in kept} == {recipe.key for recipe in queued}
    assert {run.recipe["seed"] for run in kept} == {3, 4, 5}


def test_a_damaged_run_is_told_to_the_caller(tmp_path):
    recipe = recipes.make_queue("images", {})[0]
    write_run(tmp_path, recipe, test_accuracy=70.0)
    (tmp_path / recipe.key / "result.json").write_text("{")
    warnings = []
    assert load_records(tmp_path, warn=warnings.append) == []
    (warning,) = warnings
    assert recipe.key in warning
