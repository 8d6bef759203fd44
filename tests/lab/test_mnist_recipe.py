"""What every recipe of the training loop checks and keeps, shown on the smallest one."""

import json
from functools import partial
from pathlib import Path

import pytest

from mvngrad.lab.recipes.cifar100 import Cifar100
from mvngrad.lab.recipes.mnist import Mnist

RESULTS = Path(__file__).parents[2] / "results" / "runs.jsonl"
recipe = partial(Mnist, optimizer="adam", lr=1e-3, beta1=0.9, beta2=0.999)


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("digits", "mnist_5k", "mnist, mnist-5k"),
        ("precision", "fp32", "bf16, float32"),
        ("state_dtype", "int4", "float32, bf16, int8"),
    ],
)
def test_what_is_none_of_the_choices_is_refused_with_them(name, value, valid):
    with pytest.raises(ValueError, match=f"^{name}='{value}' is invalid; choose of {valid}$"):
        recipe(**{name: value})


def test_recipes_that_are_equal_are_one_run():
    whole, real = recipe(lr=1, eps=0, weight_decay=2), recipe(lr=1.0, eps=0.0, weight_decay=2.0)
    assert whole == real
    assert whole.key == real.key
    assert recipe(epochs=5).settings["epochs"] == 5
    assert isinstance(recipe(epochs=5).settings["epochs"], int)


def test_kept_results_have_the_keys_of_their_recipes():
    kept = [run for run in map(json.loads, RESULTS.read_text().splitlines()) if run["name"] == Cifar100.name]
    assert len(kept) > 20
    assert [Cifar100(**run["recipe"]).key for run in kept] == [run["key"] for run in kept]
