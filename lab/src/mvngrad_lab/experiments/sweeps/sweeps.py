"""The sweeps that come with the lab: the paper's grids (app:hparams-cifar, app:hparams-lm), and MNIST. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mvngrad_lab.recipe import COUPLED, DECOUPLED, has_eps_s
from mvngrad_lab.sweep import Results, Sweep, grid
from mvngrad_lab.tasks.cifar100 import recipe as cifar100
from mvngrad_lab.tasks.language import recipe as language
from mvngrad_lab.tasks.mnist.recipe import Digits, Mnist

cifar100_sweep = partial(
    Sweep,
    metric="test_accuracy",
    higher=True,
    hardware="an H200",
    test_because="the paper has no validation images: what its figures call validation is what its text calls test "
    "accuracy",
)
loss_sweep = partial(Sweep, metric="validation_loss", higher=False)


def cifar100_bs1024() -> Sweep:
    """36 different configurations for each optimizer; no stage depends on results.

    The paper varies no eps_s here; it is 1e-8, as selected.
    """
    bases = [cifar100.paper(optimizer, 1024) for optimizer in COUPLED]
    coarse = {"beta1": (0.9,), "beta2": (0.99, 0.999), "lr": (2e-3, 3e-3, 4e-3)}
    focused = {"beta1": (0.7, 0.8, 0.9, 0.95), "beta2": (0.99, 0.999), "lr": (1e-4, 1e-3, 4e-3, 1e-2)}
    stages = tuple([recipe for base in bases for recipe in grid(base, **values)] for values in (coarse, focused))
    return cifar100_sweep(stages=stages, seconds=111)


def cifar100_bs1024_scaled() -> Sweep:
    """Half of the paper's focused grid at 30 epochs for 200, including what it selected for each optimizer.

    It has all rates, all beta1 and both beta2, with the betas tied to each other: beta2 = 0.99 alone would favour the
    variance cells, for which the paper selected it.
    """
    recipes = [
        recipe
        for optimizer in COUPLED
        for beta1, beta2 in ((0.7, 0.99), (0.8, 0.999), (0.9, 0.99), (0.95, 0.999))
        for recipe in grid(
            dataclasses.replace(cifar100.paper(optimizer, 1024), epochs=30, warmup_epochs=1),
            beta1=(beta1,),
            beta2=(beta2,),
            lr=(1e-4, 1e-3, 4e-3, 1e-2),
        )
    ]
    return cifar100_sweep(stages=(recipes,), seconds=18)


def cifar100_bs128(floors: Sequence[float] = (1e-6, 1e-8)) -> Sweep:
    """The second stage varies lr and beta1; the paper does not say at which beta2 and eps_s. Ours are the first stage's
    best.

    With the paper's two eps_s, the variance cells have twice the runs of the others in the first stage, although the
    paper claims the same budget for all.
    """
    coarse = [
        recipe
        for optimizer in COUPLED
        for recipe in grid(
            cifar100.paper(optimizer, 128),
            beta1=(0.9,),
            beta2=(0.99, 0.999),
            eps_s=floors if has_eps_s(optimizer) else (None,),
            lr=(1e-4, 5e-4, 1e-3),
        )
    ]

    def focused(results: Results) -> list[Any]:
        return [
            recipe
            for best in results.best.values()
            for recipe in grid(best.recipe, beta1=(0.7, 0.8, 0.9, 0.95), lr=(5e-4, 1e-3, 5e-3, 1e-2))
        ]

    return cifar100_sweep(stages=(coarse, focused), seconds=196)


def wikitext103(floors: Sequence[float] = (0.0, 1e-8)) -> Sweep:
    """The paper's two grids. The coarse one is for learning rates: its eps_s is 0, as selected in the end."""
    coarse, focused = [], []
    for optimizer in COUPLED:
        base = language.wikitext103(optimizer)
        coarse += grid(base, beta1=(0.9, 0.95), beta2=(0.99, 0.999), lr=(1e-4, 1e-3, 1e-2))
        focused += grid(
            base,
            beta1=(0.6, 0.7, 0.9, 0.95),
            beta2=(0.95, 0.99),
            eps_s=floors if has_eps_s(optimizer) else (None,),
            lr=(5e-4, 1e-3),
        )
    return loss_sweep(stages=(coarse, focused), seconds=100_000 * 0.0327, hardware="an H200", seeds=4)


PAIRS = (
    (0.6, 0.99), (0.6, 0.999), (0.7, 0.95), (0.7, 0.99), (0.7, 0.999),
    (0.8, 0.9), (0.8, 0.99), (0.8, 0.999), (0.9, 0.95),
)  # fmt: skip
"""beta1 and beta2 of the OpenWebText sweep."""


def openwebtext() -> Sweep:
    """Nine pairs of betas at one learning rate."""
    recipes = [
        dataclasses.replace(language.openwebtext(optimizer), beta1=beta1, beta2=beta2)
        for optimizer in DECOUPLED
        for beta1, beta2 in PAIRS
    ]
    return loss_sweep(stages=(recipes,), seconds=120_000 * 0.859, hardware="an H200")


def mnist(digits: Digits = "mnist") -> Sweep:
    """24 configurations for each cell, on a CPU; not in the paper, which tuned nothing on MNIST."""
    epochs, seconds = {"mnist": (3, 5.0), "mnist-5k": (10, 2.0)}[digits]
    recipes = [
        recipe
        for optimizer in COUPLED
        for recipe in grid(
            Mnist(
                optimizer=optimizer,
                digits=digits,
                epochs=epochs,
                eps_s=1e-16 if has_eps_s(optimizer) else None,
                lr=1e-3,
                beta1=0.9,
                beta2=0.999,
            ),
            beta1=(0.7, 0.9, 0.95),
            beta2=(0.99, 0.999),
            lr=(3e-4, 1e-3, 3e-3, 1e-2),
        )
    ]
    return loss_sweep(stages=(recipes,), seconds=seconds, hardware="a CPU core")


SWEEPS: dict[str, Callable[[], Sweep]] = {
    "cifar100-bs128": cifar100_bs128,
    "cifar100-bs128-equal": partial(cifar100_bs128, floors=(1e-8,)),
    "cifar100-bs1024": cifar100_bs1024,
    "cifar100-bs1024-scaled": cifar100_bs1024_scaled,
    "wikitext103": wikitext103,
    "wikitext103-equal": partial(wikitext103, floors=(0.0,)),
    "openwebtext": openwebtext,
    "mnist": mnist,
    "mnist-5k": partial(mnist, digits="mnist-5k"),
}
"""By their names on the command line. Those that end in -equal try one eps_s: all optimizers have as many runs."""
