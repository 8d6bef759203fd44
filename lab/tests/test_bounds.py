"""Recipes refuse invalid values by name; equal recipes are one run."""

import math
from dataclasses import replace

import pytest
import torch

import mvngrad
from mvngrad_lab.experiments.cifar100.records import table1
from mvngrad_lab.experiments.language.records import on_stand_in
from mvngrad_lab.experiments.state_precision.records import state_precision
from mvngrad_lab.recipe import RULES, has_eps_s
from mvngrad_lab.tasks.cifar100.recipe import paper
from mvngrad_lab.tasks.language.recipe import openwebtext, wikitext103
from mvngrad_lab.tasks.mnist.recipe import Mnist
from mvngrad_lab.training.optimizers import CLASSES

IMAGES, TEXT = paper("mvngrad", 128), wikitext103("mvngrad")
DIGITS = Mnist(optimizer="mvngrad", lr=1e-3, beta1=0.9, beta2=0.999, eps_s=1e-8)

SHARED = [
    ("batch_size", 0, "at least 1"),
    ("eval_every", -1, "at least 1"),
    ("lr", -1.0, "at least 0"),
    ("lr", math.nan, "finite"),
    ("eps", -1.0, "at least 0"),
    ("eps_s", -1.0, "at least 0"),
    ("eps_s", math.inf, "finite"),
    ("weight_decay", -1.0, "at least 0"),
    ("beta1", 1.5, "at least 0 and less than 1"),
    ("beta1", -0.1, "at least 0 and less than 1"),
    ("beta1", 0.0, "more than 0 with optimizer='mvngrad'"),
    ("beta2", 1.0, "at least 0 and less than 1"),
    ("beta2", math.nan, "finite"),
    ("seed", -1, r"at least 0 and less than 2\*\*32"),
    ("seed", 2**32, r"at least 0 and less than 2\*\*32"),
]
OWN = [
    (IMAGES, "epochs", 0, "at least 1"),
    (IMAGES, "crop", -1, "from 0 to 31"),
    (IMAGES, "crop", 32, "from 0 to 31"),
    (IMAGES, "mixup", -1.0, "at least 0"),
    (IMAGES, "mixup", math.nan, "finite"),
    (IMAGES, "label_smoothing", 2.0, "from 0 to 1"),
    (IMAGES, "randaugment_operations", -1, "0, 1 or 2"),
    (IMAGES, "randaugment_operations", 3, "0, 1 or 2"),
    (IMAGES, "randaugment_magnitude", 31, "from 0 to 30"),
    (IMAGES, "train_limit", 0, "from 1 to 50000"),
    (IMAGES, "train_limit", -3, "from 1 to 50000"),
    (IMAGES, "train_limit", 50001, "from 1 to 50000"),
    (TEXT, "steps", 0, "at least 1"),
    (TEXT, "clip", math.inf, "finite"),
    (TEXT, "clip", -1.0, "more than 0"),
    (TEXT, "lr_end", math.nan, "finite"),
    (TEXT, "lr_end", 1.5, "from 0 to 1"),
    (DIGITS, "epochs", 0, "at least 1"),
    (DIGITS, "hidden", 0, "at least 1"),
]


@pytest.mark.parametrize(
    ("recipe", "name", "value", "valid"),
    [*((recipe, *case) for recipe in (IMAGES, TEXT, DIGITS) for case in SHARED), *OWN],
    ids=lambda part: part.name if hasattr(part, "name") else str(part),
)
def test_a_number_out_of_range_is_refused_by_name(recipe, name, value, valid):
    with pytest.raises(ValueError, match=rf"^{name}={value!r} is invalid; it must be {valid}"):
        replace(recipe, **{name: value})


def accepted(make, *arguments, **options):
    try:
        make(*arguments, **options)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lr", value) for value in (0.0, 100.0, -1e-9)),
        *(("weight_decay", value) for value in (0.0, 100.0, -1e-9)),
        *(("eps", value) for value in (0.0, 100.0, -1e-9)),
        *(("eps_s", value) for value in (0.0, 100.0, -1e-9)),
        *((beta, value) for beta in ("beta1", "beta2") for value in (-1e-9, 0.0, 0.5, 1 - 1e-9, 1.0)),
    ],
)
@pytest.mark.parametrize("cell", RULES)
@pytest.mark.filterwarnings("ignore:.*barely normalized")  # of the largest valid values
def test_recipes_and_optimizers_accept_the_same_values(cell, name, value):
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "eps_s": 1e-8 if has_eps_s(cell) else None}
    if name == "eps_s" and not has_eps_s(cell):
        return
    settings |= {"weight_decay": 0.0, name: value}
    options = {**settings, "betas": (settings["beta1"], settings["beta2"])}
    del options["beta1"], options["beta2"]
    optimizer = getattr(mvngrad, CLASSES[cell])
    assert accepted(Mnist, optimizer=cell, **settings) == accepted(
        optimizer, [torch.nn.Parameter(torch.ones(1))], **options
    )


def test_betas_of_third_party_optimizers_are_not_checked():
    others = replace(DIGITS, optimizer="zoo:Anything", beta1=-0.8, beta2=1.0, eps=None, eps_s=None)
    assert (others.beta1, others.beta2) == (-0.8, 1.0)
    with pytest.raises(ValueError, match=r"^beta2=nan is invalid; it must be finite"):
        replace(others, beta2=math.nan)


def test_bounded_fields_exist():
    """The hash of a recipe names stored results: no bound may change one."""
    assert len([*table1(), *state_precision(), *on_stand_in()]) == 77
    assert IMAGES.key == "cifar100-8a79455119d6"
    assert TEXT.key == "wikitext103-2f04db9ac65b"
    assert openwebtext("mvngradw").key == "openwebtext-bd58bad9c383"
    assert DIGITS.key == "mnist-838752b7a99a"


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("digits", "mnist_5k", "mnist, mnist-5k, auto"),
        ("precision", "fp32", "bf16, float32"),
        ("state_dtype", "int4", "float32, bf16, int8"),
    ],
)
def test_an_invalid_choice_is_refused_with_the_valid_ones(name, value, valid):
    with pytest.raises(ValueError, match=f"^{name}='{value}' is invalid; choose from {valid}$"):
        replace(DIGITS, **{name: value})


def test_equal_recipes_have_one_key():
    whole, real = replace(DIGITS, lr=1, eps=0), replace(DIGITS, lr=1.0, eps=0.0)
    assert whole == real
    assert whole.key == real.key
    assert isinstance(whole.settings["epochs"], int)
