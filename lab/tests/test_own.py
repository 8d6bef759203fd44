"""A user's own optimizer and task, by the command line."""

import json
import sys
from pathlib import Path

import pytest

from mvngrad_lab import cli
from mvngrad_lab.store import read_run

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def mvngrad(monkeypatch, capsys, tmp_path, no_data):
    """Runs the command in an empty folder with the examples; returns what it prints."""
    for path in EXAMPLES.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*words, code=0):
        """What the command prints, to stderr if it fails."""
        try:
            exit_code = cli.main(list(map(str, words)))
        except SystemExit as error:
            exit_code = error.code
        output = capsys.readouterr()
        run.warnings = output.err
        assert exit_code == code, output.err
        return output.err if code else output.out

    yield run
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)


def get_folder(output):
    return Path(output.splitlines()[-1].removeprefix("results: "))


def load_recipe(output):
    return json.loads((get_folder(output) / "recipe.json").read_text())


# The command line


def test_mnist_trains_without_a_download_and_says_on_what(mvngrad):
    assert load_recipe(mvngrad("train", "mnist", "--epochs", "1", "--device", "cpu"))["digits"] == "mnist-5k"
    assert "trains on the 5,000 digits in this package" in mvngrad.warnings
    assert "only its sample is here" in mvngrad("train", "mnist", "--digits", "mnist", "--device", "cpu", code=2)


def test_the_worked_example_has_at_most_40_lines_and_trains(mvngrad):
    assert len((EXAMPLES / "spirals.py").read_text().splitlines()) <= 40
    assert "Tell two spirals apart." in mvngrad("train", "spirals:spirals", "--help")
    output = mvngrad("train", "spirals:spirals", "--optimizer", "adamw", "--epochs", "6", "--device", "cpu")
    assert "  starts: spirals:spirals with adamw, lr 0.003; 360 steps of 50, in runs/own-" in output
    recipe, metrics = load_recipe(output), read_run(get_folder(output)).result
    assert (recipe["task"], recipe["optimizer"], recipe["eps_s"]) == ("spirals:spirals", "adamw", None)
    assert metrics["validation_accuracy"] > 0.9


def test_a_users_optimizer_is_trained_with_its_options_and_its_code_names_the_run(mvngrad, tmp_path):
    words = ("train", "mnist", "--epochs", "1", "--lr", "3e-4", "--device", "cpu", "--optimizer")
    first = load_recipe(mvngrad(*words, "signs:SignMomentum,beta=0.95"))["optimizer"]
    assert first.startswith("signs:SignMomentum@")
    assert first.endswith(",beta=0.95")
    sys.modules.pop("signs")
    (tmp_path / "signs.py").write_text((tmp_path / "signs.py").read_text() + "\n")
    assert load_recipe(mvngrad(*words, "signs:SignMomentum,beta=0.95"))["optimizer"] != first
    for name, problem in (
        ("signs:SignMomentum,betta=1", "does not take betta=1; it takes lr, beta"),
        ("signs:torch", "signs has no optimizer 'torch'"),
        ("nowhere:X", "nowhere cannot be imported: ModuleNotFoundError"),
        (first.replace("@", "@0"), "signs has changed since"),
    ):
        assert problem in mvngrad(*words, name, code=2)


@pytest.mark.parametrize(
    "words", [("mnist", "--optimizer", "exported:SignMomentum"), ("exported:spirals",), ("exported:cached",)]
)
def test_the_code_behind_an_imported_name_names_the_run(mvngrad, monkeypatch, tmp_path, words):
    """As a package does, whose __init__.py imports what other files define."""
    code = "import functools, spirals as s\nfrom signs import SignMomentum\nfrom spirals import spirals\n"
    (tmp_path / "exported.py").write_text(f"{code}cached = functools.cache(s.spirals)\n")
    keys = set()
    for _ in range(2):
        for name in ("exported", "signs", "spirals"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        keys.add(get_folder(mvngrad("train", *words, "--epochs", "1", "--device", "cpu")))
        for name in ("signs.py", "spirals.py"):
            (tmp_path / name).write_text((tmp_path / name).read_text() + "\n")
    assert len(keys) == 2


@pytest.mark.parametrize("option", [("--optimizer", "{}"), ("--optimizer={}",)])
def test_names_of_optimizers_and_their_options_may_have_underscores(mvngrad, option):
    words = ("train", "mnist", "--epochs=1", "--device=cpu", "--batch_size=500", "--runs=runs")
    recipe = load_recipe(mvngrad(*words, *(word.format("torch:SGD,weight_decay=0.1") for word in option)))
    assert (recipe["optimizer"], recipe["batch_size"]) == ("torch:SGD,weight_decay=0.1", 500)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere:x", "No module"),
        ("json:nothing", "no attribute"),
        ("time:time", "returned a float"),
        ("json:loads", "TypeError"),
    ],
)
def test_a_task_that_cannot_be_loaded_is_named(mvngrad, name, problem):
    assert problem in mvngrad("train", name, code=2)


def test_the_examples_sweep_selects(mvngrad):
    mvngrad("sweep", "init", "valley:valley")
    assert "12 of 12 done" in mvngrad("sweep", "work", "valley:valley")
    assert "by distance, lowest; 12 of 12 runs are done" in mvngrad("sweep", "select", "valley:valley")


MODULE = """
import torch
from torch import nn
from mvngrad_lab.tasks.own.task import OwnTask

def data():
    x = torch.randn(40, 4)
    return x, x.sum(1, keepdim=True)

def make(model=lambda: nn.Linear(4, 1), **settings):
    loss = lambda model, x, y: (model(x) - y).square().mean()
    return OwnTask(model=model, loss=loss, train=data(), validation=data(), settings={"batch_size": 20, **settings})

class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.directions, self.head = torch.ones(4), torch.randn(4, 8), nn.Linear(8, 1)

class Masked(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
        self.mask = torch.eye(4).to_sparse()
        self.register_buffer("saved_mask", self.mask)

class Viewed(nn.Module):  # its weights and the outputs of its layers must be contiguous
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Conv2d(1, 4, (1, 2)), nn.Conv2d(4, 4, (1, 2))

    def forward(self, x):
        values = self.head(self.layer(x.view(-1, 1, 2, 2).repeat(1, 1, 1, 2))).view(len(x), -1)
        return values.sum(1, keepdim=True) + self.head.weight.view(4, -1).mean()

class Extra(nn.Linear):
    def get_extra_state(self):
        return {}

def adam(): return make(optimizer="torch:Adam", beta1=0.5, beta2=0.6, eps=1e-3, epochs=1)
def text(): return make(epochs="2")
def share(): return make(epochs=2.5)
def rate(): return make(lr="high")
def no_rate(): return make(lr=None)
def normed(): return make(lambda: nn.utils.weight_norm(nn.Linear(4, 1)), epochs=1)
def spectral(): return make(lambda: nn.utils.spectral_norm(nn.Linear(4, 1)), epochs=1)
def masked(): return make(Masked, epochs=1)
def viewed(): return make(Viewed, epochs=1)
def features(): return make(Features, seed=1)
def lazy(): return make(lambda: nn.LazyLinear(1))
def extra(): return make(lambda: Extra(4, 1))
def shared(model=nn.Linear(4, 1)): return make(lambda: nn.Sequential(model))
def frozen(): return make(lambda: nn.Linear(4, 1).requires_grad_(False))
"""


@pytest.fixture
def variants(tmp_path):
    (tmp_path / "variants.py").write_text(MODULE)
    yield "variants"
    sys.modules.pop("variants", None)


def test_settings_of_a_task_are_the_defaults_of_its_third_party_optimizer(mvngrad, variants):
    recipe = load_recipe(mvngrad("train", "variants:adam", "--device", "cpu"))
    assert (recipe["beta1"], recipe["beta2"], recipe["eps"]) == (0.5, 0.6, 1e-3)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", ["normed", "spectral", "masked", "viewed"])
def test_models_with_weights_that_hooks_compute_and_with_sparse_tensors_and_views_are_trained(mvngrad, variants, name):
    for seed in (0, 1):
        assert "results: " in mvngrad("train", f"variants:{name}", "--device", "cpu", "--seed", seed)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("text", "epochs='2' is invalid; it must be an integer"),
        ("share", "epochs=2.5 is invalid; it must be an integer"),
        ("rate", "lr='high' is invalid; it must be a number"),
        ("no_rate", "lr=None is invalid; it must be a number"),
        ("features", "has a tensor directions, which is random or changes in training"),
        ("shared", "returned parameters that it had returned before"),
        ("lazy", "returned a lazy module"),
        ("extra", "_extra_state, which is not a tensor"),
        ("frozen", "all frozen"),
    ],
)
def test_settings_and_models_that_cannot_be_trained_are_named(mvngrad, variants, name, problem):
    assert problem in mvngrad("train", f"variants:{name}", "--device", "cpu", code=2)
