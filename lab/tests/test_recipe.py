"""The identity of a run: a hash of its recipe that new fields do not change."""

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from mvngrad_lab.experiments.cifar100.gap import GapRecipe
from mvngrad_lab.experiments.floor.mnist import MnistDial
from mvngrad_lab.experiments.floor.mnist_table import MnistTable
from mvngrad_lab.experiments.mnist.curves import Curves, Panel
from mvngrad_lab.experiments.mnist.gap import Frozen
from mvngrad_lab.experiments.spikes.mnist import MnistSpikes
from mvngrad_lab.recipe import Recipe, added_field, hash_code
from mvngrad_lab.tasks.cifar100.recipe import Cifar100
from mvngrad_lab.tasks.language.recipe import OpenWebText, WikiText103
from mvngrad_lab.tasks.mnist.recipe import Mnist

RESULTS = Path(__file__).parents[2] / "results"
RECIPES = (Cifar100, WikiText103, OpenWebText, Mnist, GapRecipe, MnistDial, MnistTable, MnistSpikes, Curves, Frozen)
CLASSES = {kind.name: kind for kind in RECIPES}


@dataclasses.dataclass(frozen=True)
class Example(Recipe):
    name: ClassVar[str] = "example"
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


def grown(kind):
    """The class with a field that was added after its runs were stored."""
    options = {"bases": (kind,), "frozen": True}
    return dataclasses.make_dataclass(f"Grown{kind.__name__}", [("novelty", int, added_field(3))], **options)


GROWN = {name: grown(kind) for name, kind in CLASSES.items()}


def make(classes, name, settings):
    if name == "cifar-gap":
        trainings = tuple(make(classes, "cifar100", each) for each in settings["trainings"])
        settings = {**settings, "trainings": trainings, "epochs": tuple(settings["epochs"])}
    if name == "mnist-curves":
        settings = {**settings, "panels": tuple(Panel(**panel) for panel in settings["panels"])}
    return classes[name](**settings)


def stored():
    """Key, name and settings of every stored run."""
    for line in (RESULTS / "runs.jsonl").read_text().splitlines():
        run = json.loads(line)
        yield run["key"], run["name"], run["recipe"]
    for path in RESULTS.glob("sweep-*.json"):
        for run in json.loads(path.read_text())["runs"]:
            yield run["key"], run["key"].rpartition("-")[0], run["settings"]


@pytest.mark.parametrize("classes", [CLASSES, GROWN], ids=["as they are", "with a new field"])
def test_every_stored_run_has_its_key(classes):
    keys = {key: make(classes, name, settings).key for key, name, settings in stored()}
    assert len(keys) > 200
    assert keys == {key: key for key in keys}
    assert {path.stem for path in (RESULTS / "monitors").glob("*.jsonl")} <= keys.keys()


def test_a_new_field_counts_where_it_differs_from_its_first_default():
    kind = grown(Example)
    assert kind(novelty=4).key != kind().key == Example().key
    later = dataclasses.make_dataclass(
        "Later", [("novelty", int, added_field(5, introduced=3))], bases=(Example,), frozen=True
    )
    assert later().key == kind(novelty=5).key
    assert later(novelty=3).key == Example().key
    assert later().settings["novelty"] == 5


def test_a_key_depends_on_the_content_only():
    assert Example().key == Example(betas=(0.9, 0.99)).key
    assert len({Example().key, Example(lr=0.2).key, Example(betas=(0.9, 0.999)).key}) == 3
    # In another process too, where Python's own hashes differ.
    code = "import sys; sys.path[:0] = sys.argv[1:]; from test_recipe import Example; print(Example().key)"
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == Example().key


def test_values_and_names_that_cannot_be_stored_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Wrong(Recipe):
        name: ClassVar[str] = "../wrong"

    with pytest.raises(ValueError, match="has a number that is not finite"):
        _ = Example(lr=float("nan")).key
    with pytest.raises(ValueError, match=r"name='\.\./wrong' of Wrong is invalid"):
        _ = Wrong().key


def test_code_that_was_edited_and_not_imported_again_has_the_hash_of_what_runs(tmp_path, monkeypatch):
    """As in a notebook."""

    def hash_function(value, again=False):
        (tmp_path / "edited.py").write_text(f"def function(): return {value}")
        if again:
            monkeypatch.delitem(sys.modules, "edited", raising=False)
        importlib.import_module("edited")
        return hash_code("edited:function")

    monkeypatch.syspath_prepend(tmp_path)
    before = hash_function(1, again=True)
    assert hash_function(20) == before
    assert hash_function(20, again=True) != before
