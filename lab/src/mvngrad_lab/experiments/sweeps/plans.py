"""Which recipes a sweep tries, and how it chooses: the paper's grids (app:hparams-cifar, app:hparams-lm), and MNIST.

A sweep of your own is a function without arguments that returns a `Sweep`; any field of any recipe may vary. The
command line takes it as `package.module:function`. Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any, TypeAlias, TypeVar

from mvngrad_lab.recipe import CELLS, COUPLED, DECOUPLED, Recipe
from mvngrad_lab.tasks.cifar100 import recipe as cifar100
from mvngrad_lab.tasks.language import recipe as language
from mvngrad_lab.tasks.mnist.recipe import Digits, Mnist

R = TypeVar("R", bound=Recipe)


def contestant(recipe: Recipe) -> str:
    """Between whom a sweep chooses nothing and compares: the optimizer, where a recipe has one."""
    return str(getattr(recipe, "optimizer", recipe.name))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a recipe."""

    recipe: Any
    value: float | None
    """Of the sweep's metric; None where the run diverged or raised."""


@dataclasses.dataclass(frozen=True)
class Results:
    """All that the stages before found, for a stage that depends on it."""

    outcomes: Sequence[Outcome]
    higher: bool
    """Whether more of the metric is better."""

    @property
    def best(self) -> dict[str, Outcome]:
        """The best of each optimizer, by name; of equals, the one whose key comes first. An optimizer may have none."""
        found: dict[str, Outcome] = {}
        for outcome in sorted(self.outcomes, key=self._rank):
            if outcome.value is not None:
                found.setdefault(contestant(outcome.recipe), outcome)
        return dict(sorted(found.items()))

    def _rank(self, outcome: Outcome) -> tuple[float, str]:
        value = outcome.value or 0.0
        return -value if self.higher else value, outcome.recipe.key


Stage: TypeAlias = Sequence[Recipe] | Callable[[Results], Sequence[Recipe]]
"""Recipes, or what makes them of the results of all stages before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """Stages of recipes, and the metric that was named before any of them ran."""

    stages: tuple[Stage, ...]
    metric: str
    """The entry of a run's result by which is chosen: of validation data."""
    higher: bool
    """Whether more of it is better."""
    seconds: float
    """A run takes about so long, on `hardware`."""
    hardware: str
    seeds: int = 3
    """With how many the chosen configurations are run in the end."""
    test_because: str = ""
    """Why it is chosen by test data, which is else refused."""
    run: str = "mvngrad_lab.sweep.training:run"
    """package.module:function that runs a recipe, as that one does."""

    def __post_init__(self) -> None:
        if self.metric.startswith("test") and not self.test_because:
            raise ValueError(
                f"metric={self.metric!r} is of test data, on which nothing may be chosen; name one of validation data, "
                "or say in test_because why not"
            )


def grid(recipe: R, **values: Iterable[Any]) -> list[R]:
    """A recipe with every combination of the values, the last field varying fastest.

    >>> [(r.lr, r.beta1) for r in grid(cifar100.paper("adam", 128), lr=(1e-3, 1e-2), beta1=(0.8, 0.9))]
    [(0.001, 0.8), (0.001, 0.9), (0.01, 0.8), (0.01, 0.9)]
    """
    return [
        dataclasses.replace(recipe, **dict(zip(values, combination, strict=True)))
        for combination in product(*values.values())
    ]


def has_floor(optimizer: str) -> bool:
    """Whether an optimizer normalizes by the variance, and so has an eps_s."""
    return CELLS[optimizer.removesuffix("w")].centered


def _floors(optimizer: str, values: Sequence[float]) -> Sequence[float | None]:
    return values if has_floor(optimizer) else (None,)


TESTED = "the paper has no validation images: what its figures call validation is what its text calls test accuracy"


def cifar100_bs1024() -> Sweep:
    """Both stages are given outright: 36 different configurations for each optimizer.

    The paper varies no eps_s here; it is 1e-8, as selected.
    """
    bases = [cifar100.paper(optimizer, 1024) for optimizer in COUPLED]
    coarse = [r for b in bases for r in grid(b, beta1=(0.9,), beta2=(0.99, 0.999), lr=(2e-3, 3e-3, 4e-3))]
    focused = [
        r for b in bases for r in grid(b, beta1=(0.7, 0.8, 0.9, 0.95), beta2=(0.99, 0.999), lr=(1e-4, 1e-3, 4e-3, 1e-2))
    ]
    return Sweep(
        stages=(coarse, focused),
        metric="test_accuracy",
        higher=True,
        seconds=111,
        hardware="an H200",
        test_because=TESTED,
    )


def cifar100_bs1024_scaled() -> Sweep:
    """Half of the paper's focused grid at 30 epochs for 200, with what it selected for each optimizer in it.

    All rates, all beta1 and both beta2 are in it, the betas tied to each other: with beta2 = 0.99 alone it would
    favour the variance cells, for which the paper selected that.
    """
    recipes = [
        r
        for optimizer in COUPLED
        for beta1, beta2 in ((0.7, 0.99), (0.8, 0.999), (0.9, 0.99), (0.95, 0.999))
        for r in grid(
            dataclasses.replace(cifar100.paper(optimizer, 1024), epochs=30, warmup_epochs=1),
            beta1=(beta1,),
            beta2=(beta2,),
            lr=(1e-4, 1e-3, 4e-3, 1e-2),
        )
    ]
    return Sweep(
        stages=(recipes,),
        metric="test_accuracy",
        higher=True,
        seconds=18,
        hardware="an H200",
        test_because=TESTED,
    )


def cifar100_bs128(floors: Sequence[float] = (1e-6, 1e-8)) -> Sweep:
    """The second stage varies lr and beta1; the paper does not say at which beta2 and eps_s: ours are the first's best.

    With the paper's two eps_s, the variance cells have twice the runs of the others in the first stage, although it
    speaks of the same budget for all.
    """
    coarse = [
        r
        for optimizer in COUPLED
        for r in grid(
            cifar100.paper(optimizer, 128),
            beta1=(0.9,),
            beta2=(0.99, 0.999),
            eps_s=_floors(optimizer, floors),
            lr=(1e-4, 5e-4, 1e-3),
        )
    ]

    def focused(results: Results) -> list[Any]:
        return [
            r
            for best in results.best.values()
            for r in grid(best.recipe, beta1=(0.7, 0.8, 0.9, 0.95), lr=(5e-4, 1e-3, 5e-3, 1e-2))
        ]

    return Sweep(
        stages=(coarse, focused),
        metric="test_accuracy",
        higher=True,
        seconds=196,
        hardware="an H200",
        test_because=TESTED,
    )


def wikitext103(floors: Sequence[float] = (0.0, 1e-8)) -> Sweep:
    """The paper's two grids. The coarse one is for learning rates: in it eps_s is 0, as selected in the end."""
    coarse, focused = [], []
    for optimizer in COUPLED:
        base = language.wikitext103(optimizer)
        coarse += grid(base, beta1=(0.9, 0.95), beta2=(0.99, 0.999), lr=(1e-4, 1e-3, 1e-2))
        focused += grid(
            base,
            beta1=(0.6, 0.7, 0.9, 0.95),
            beta2=(0.95, 0.99),
            eps_s=_floors(optimizer, floors),
            lr=(5e-4, 1e-3),
        )
    return Sweep(
        stages=(coarse, focused),
        metric="validation_loss",
        higher=False,
        seconds=100_000 * 0.0327,
        hardware="an H200",
        seeds=4,
    )


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
    return Sweep(stages=(recipes,), metric="validation_loss", higher=False, seconds=120_000 * 0.859, hardware="an H200")


def mnist(digits: Digits = "mnist") -> Sweep:
    """24 configurations for each cell, on a CPU; not of the paper, which tuned nothing on MNIST."""
    recipes = [
        r
        for optimizer in COUPLED
        for r in grid(
            Mnist(
                optimizer=optimizer,
                digits=digits,
                epochs=3 if digits == "mnist" else 10,
                eps_s=1e-16 if has_floor(optimizer) else None,
                lr=1e-3,
                beta1=0.9,
                beta2=0.999,
            ),
            beta1=(0.7, 0.9, 0.95),
            beta2=(0.99, 0.999),
            lr=(3e-4, 1e-3, 3e-3, 1e-2),
        )
    ]
    seconds = {"mnist": 5.0, "mnist-5k": 2.0}[digits]
    return Sweep(stages=(recipes,), metric="validation_loss", higher=False, seconds=seconds, hardware="a CPU core")


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


def named(name: str) -> Sweep:
    """The sweep of a name of `SWEEPS`, or of `package.module:function`."""
    if name in SWEEPS:
        return SWEEPS[name]()
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(
            f"there is no sweep {name!r}; choose of {', '.join(SWEEPS)}, or name a package.module:function"
        )
    try:
        made = getattr(import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the sweep {name!r} cannot be loaded: {error}") from error
    if not isinstance(made, Sweep):
        raise ValueError(f"{name!r} returned a {type(made).__name__}; it must return a Sweep")
    return made
