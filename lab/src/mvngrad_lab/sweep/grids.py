"""Which recipes a sweep tries, in which stages, and how many runs each optimizer gets. No torch, no optuna.

A sweep of your own is a function without arguments that returns a `Sweep`; any field of any recipe may vary. The
command line takes it as `package.module:function`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import product
from statistics import fmean
from typing import Any, TypeAlias, TypeVar

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.recipe import Recipe
from mvngrad_lab.store import FinishedRun

R = TypeVar("R", bound=Recipe)


def optimizer_name(recipe: Recipe) -> str:
    """The optimizer of a recipe, or the recipe's name if it has none: what a sweep compares."""
    return str(getattr(recipe, "optimizer", recipe.name))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A recipe and the value of the sweep's metric; None if the run diverged or raised, or is to come."""

    recipe: Any
    value: float | None


@dataclasses.dataclass(frozen=True)
class Results:
    """The outcomes of all earlier stages, for a stage that depends on them."""

    outcomes: Sequence[Outcome]
    higher: bool
    """True if a higher metric is better."""

    @property
    def best(self) -> dict[str, Outcome]:
        """The best configuration of each optimizer that has one, by its mean over seeds; ties go to the first key.

        Configurations are left out if a seed has no value. Each is returned as the outcome of its first seed.
        """
        sign, by_seed = -1 if self.higher else 1, dict[str, list[Outcome]]()
        for outcome in self.outcomes:
            recipe = outcome.recipe
            by_seed.setdefault(repr((recipe.name, get_settings_without_seed(recipe.settings))), []).append(outcome)
        ranked, best = list[tuple[float, str, Outcome]](), dict[str, Outcome]()
        for outcomes in by_seed.values():
            values = [outcome.value for outcome in outcomes if outcome.value is not None]
            if len(values) == len(outcomes):
                first = min(outcomes, key=lambda outcome: getattr(outcome.recipe, "seed", 0))
                ranked.append((sign * fmean(values), first.recipe.key, first))
        for _, _, outcome in sorted(ranked, key=lambda each: each[:2]):
            best.setdefault(optimizer_name(outcome.recipe), outcome)
        return dict(sorted(best.items()))


def get_settings_without_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the runs of one configuration share."""
    return {name: value for name, value in settings.items() if name != "seed"}


Stage: TypeAlias = Sequence[Recipe] | Callable[[Results], Sequence[Recipe]]
"""Recipes, or a function that makes them from the results of all earlier stages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """Stages of recipes, and the metric that selects among them, fixed before the first run."""

    stages: tuple[Stage, ...]
    metric: str
    """The entry of a run's result that selects, measured on validation data."""
    higher: bool
    """True if a higher metric is better."""
    seconds: float | None = None
    """Rough duration of one run, from which `init` estimates that of the sweep; None for no estimate."""
    hardware: str | None = None
    """What `seconds` was measured on, such as "an H200"."""
    seeds: int = 3
    """How many seeds the selected configurations get in the end."""
    test_because: str = ""
    """Why the metric is of test data, which is refused without a reason."""
    run: Callable[..., Mapping[str, Any] | FinishedRun] | None = None
    """Runs one recipe and returns its result with the metric: `def run(recipe) -> dict`. The default trains it.

    It is also given those of `data`, `device` and `compile` that it has parameters for, as on the command line of a
    worker, and `folder`, the run's own folder, where it may keep checkpoints: a run whose worker died starts again. A
    function with a parameter `root`, the folder of all runs, locks its folder and stores its result itself, and returns
    a `FinishedRun`.
    """

    def __post_init__(self) -> None:
        if self.metric.startswith("test") and not self.test_because:
            raise InvalidInput(
                f"metric={self.metric!r} is of test data, which must not select anything; name one of validation data, "
                "or name the reason in test_because"
            )

    @property
    def fixed_stages(self) -> dict[str, Sequence[Recipe]]:
        """The stages that depend on no results, by number."""
        return {str(number): stage for number, stage in enumerate(self.stages, start=1) if not callable(stage)}

    @property
    def fixed_keys(self) -> dict[str, list[str]]:
        """The keys of the fixed stages, as a store keeps them."""
        return {number: sorted({recipe.key for recipe in stage}) for number, stage in self.fixed_stages.items()}

    def expand_stages(self) -> list[Sequence[Recipe]]:
        """All stages; those that depend on results as they would be if all configurations were equally good."""
        stages: list[Sequence[Recipe]] = []
        for stage in self.stages:
            if callable(stage):
                earlier = {recipe.key: Outcome(recipe, 0.0) for recipes in stages for recipe in recipes}
                stage = stage(Results(list(earlier.values()), self.higher))
            stages.append(stage)
        return stages


def grid(recipe: R, **values: Iterable[Any]) -> list[R]:
    """The recipe with every combination of the values; the last field varies fastest.

    >>> from mvngrad_lab.tasks.cifar100.recipe import paper
    >>> [(r.lr, r.beta1) for r in grid(paper("adam", 128), lr=(1e-3, 1e-2), beta1=(0.8, 0.9))]
    [(0.001, 0.8), (0.001, 0.9), (0.01, 0.8), (0.01, 0.9)]
    """
    return [
        dataclasses.replace(recipe, **dict(zip(values, combination, strict=True)))
        for combination in product(*values.values())
    ]


def load_sweep(path: str) -> Sweep:
    """Call `package.module:function`; raises InvalidInput unless it exists and returns a Sweep."""
    module, _, function = path.partition(":")
    try:
        sweep = getattr(import_module(module), function)()
        stages = sweep.expand_stages() if isinstance(sweep, Sweep) else []
    except (Exception, SystemExit) as error:  # the user's code: anything
        raise InvalidInput(f"the sweep {path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(sweep, Sweep):
        raise InvalidInput(f"{path!r} returned a {type(sweep).__name__}; it must return a Sweep")
    for stage in stages:
        if not (isinstance(stage, Sequence) and all(isinstance(recipe, Recipe) for recipe in stage)):
            raise InvalidInput(f"a stage of {path!r} is {stage!r:.60}; it must be a list of recipes")
    return sweep


def optimizers_by_key(recipes: Iterable[Recipe]) -> dict[str, str]:
    """Key -> optimizer, of each different run."""
    return {recipe.key: optimizer_name(recipe) for recipe in recipes}


def check_equal_budgets(
    stages: Mapping[str, Mapping[str, str]], unequal: bool, where: str = "the grid", optimizers: Iterable[str] = ()
) -> None:
    """Raise InvalidInput unless all optimizers have the same number of runs in every stage, or `unequal` is True.

    `stages` are number -> key -> optimizer; `optimizers` must be in each stage too.
    """
    names = {optimizer for stage in stages.values() for optimizer in stage.values()}.union(optimizers)
    for number, stage in stages.items():
        counts = Counter(dict.fromkeys(sorted(names), 0))
        counts.update(stage.values())
        if not unequal and len(set(counts.values())) > 1:
            least, most = counts.most_common()[-1], counts.most_common()[0]
            raise InvalidInput(
                f"stage {number} of {where} has {most[1]} runs of {most[0]} and {least[1]} of {least[0]}: tuning "
                "budgets must be equal; make them equal, use another storage for another grid, or pass --unequal to "
                "`init`"
            )


def describe_budget(sweep: Sweep, stages: Sequence[Sequence[Recipe]]) -> list[str]:
    """Runs of each optimizer, and the time of all if that of one is known, as lines of text."""
    lines = []
    for number, stage in enumerate(stages, start=1):
        counts = Counter(optimizers_by_key(stage).values())
        note = " (if all before are equally good)" if callable(sweep.stages[number - 1]) else ""
        lines.append(f"stage {number}: {', '.join(f'{name} {count}' for name, count in counts.items())}{note}")
    everything = optimizers_by_key(recipe for stage in stages for recipe in stage)
    seeds = (sweep.seeds - 1) * len(set(everything.values()))
    line = f"{len(everything)} different runs, then {seeds} more seeds of those selected by {sweep.metric}"
    if sweep.seconds is not None:
        line += f": about {format_duration((len(everything) + seeds) * sweep.seconds)}"
        line += f" of {sweep.hardware}" if sweep.hardware else ""
    lines.append(line)
    return lines + ([f"selected by test data, because {sweep.test_because}"] if sweep.test_because else [])


def format_duration(seconds: float) -> str:
    """
    >>> format_duration(7), format_duration(90), format_duration(9000)
    ('7 s', '1.5 minutes', '2.5 hours')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 3600 else f"{seconds / 3600:.1f} hours"
