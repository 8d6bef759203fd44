"""What a sweep will take, and whether all optimizers have as much of it. Nothing here looks into a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mvngrad_lab.experiments.sweeps.plans import Outcome, Results, Sweep, contestant
from mvngrad_lab.recipe import Recipe, TrainingRecipe


def planned(sweep: Sweep) -> list[Sequence[Recipe]]:
    """All stages; those that depend on results as they would be if all configurations were equally good."""
    found: list[Sequence[Recipe]] = []
    for stage in sweep.stages:
        if callable(stage):
            earlier = {recipe.key: Outcome(recipe, 0.0) for recipes in found for recipe in recipes}
            stage = stage(Results(list(earlier.values()), sweep.higher))
        found.append(stage)
    return found


def fixed(sweep: Sweep) -> dict[str, Sequence[Recipe]]:
    """The stages that depend on no results, by number."""
    return {str(number): stage for number, stage in enumerate(sweep.stages, start=1) if not callable(stage)}


def written(sweep: Sweep) -> dict[str, list[str]]:
    """The keys of these, as a store notes them."""
    return {number: sorted(tried(stage)) for number, stage in fixed(sweep).items()}


def budget(sweep: Sweep, stages: Sequence[Sequence[Recipe]]) -> list[str]:
    """Runs of each optimizer and the time of all, as text."""
    lines = []
    for number, stage in enumerate(stages, start=1):
        counts = ", ".join(f"{who} {count}" for who, count in Counter(tried(stage).values()).items())
        follows = " (if all before are equally good)" if callable(sweep.stages[number - 1]) else ""
        lines.append(f"stage {number}: {counts}{follows}")
    runs = len({recipe.key for stage in stages for recipe in stage})
    seeds = (sweep.seeds - 1) * len({contestant(recipe) for stage in stages for recipe in stage})
    lines.append(
        f"{runs} different runs, then {seeds} more seeds of those selected by {sweep.metric}: about "
        f"{duration((runs + seeds) * sweep.seconds)} of {sweep.hardware}"
    )
    return lines + ([f"selected by test data, because {sweep.test_because}"] if sweep.test_because else [])


def duration(seconds: float) -> str:
    """
    >>> duration(90), duration(9000)
    ('1.5 minutes', '2.5 hours')
    """
    return f"{seconds / 60:.1f} minutes" if seconds < 3600 else f"{seconds / 3600:.1f} hours"


def tried(recipes: Iterable[Recipe]) -> dict[str, str]:
    """Whose each different run is."""
    return {recipe.key: contestant(recipe) for recipe in recipes}


def refuse_unequal(
    stages: Mapping[str, Mapping[str, str]], unequal: bool, where: str = "the grid", among: Iterable[str] = ()
) -> None:
    """Whether all optimizers, and those `among` whom it must be, have as many runs in each stage; none is fewer too."""
    everyone = {who for stage in stages.values() for who in stage.values()}.union(among)
    for number, stage in stages.items():
        counts = Counter(dict.fromkeys(sorted(everyone), 0))
        counts.update(stage.values())
        if not unequal and len(set(counts.values())) > 1:
            least, most = counts.most_common()[-1], counts.most_common()[0]
            raise ValueError(
                f"stage {number} of {where} has {most[1]} runs of {most[0]} and {least[1]} of {least[0]}: who tries "
                "more finds more; make them equal, use another storage for another grid, or say --unequal to `init`"
            )


def refuse_unknown(recipes: Iterable[Recipe]) -> None:
    """Whether other people's optimizers are there and take what they are given: better now than in every run."""
    for recipe in recipes:
        if isinstance(recipe, TrainingRecipe) and recipe.is_third_party:
            from mvngrad_lab.training import optimizers  # and with it torch

            optimizers.check_options(recipe.optimizer, **optimizers.third_party_options(recipe))
