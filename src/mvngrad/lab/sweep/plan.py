"""What a sweep still has to run: its stages, its budget, the configurations it selects, and their seeds."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mvngrad import __version__
from mvngrad.lab.environment import commit
from mvngrad.lab.recipe import Recipe
from mvngrad.lab.recipes.sweeps import Outcome, Results, Sweep, contestant, named
from mvngrad.lab.sweep.address import Address
from mvngrad.lab.sweep.queue import GRACE, HEARTBEAT, Queue, Tell, create
from mvngrad.lab.sweep.records import SETTLED, Record, by_key, kept

SEEDS = "seeds"
"""The stage of runs that only repeat a selected configuration."""


@dataclasses.dataclass(frozen=True)
class Filled:
    """What was added to a store, and what was there."""

    new: tuple[str, ...]
    lost: tuple[str, ...]
    """Queued again: they were claimed by a worker that is dead, and another died queueing them again."""
    known: int
    foreign: tuple[str, ...]
    """In the store, and not in the grid as it is now."""


def init(
    address: Address,
    name: str,
    *,
    unequal: bool = False,
    heartbeat: int = HEARTBEAT,
    grace: int = GRACE,
    tell: Tell = print,
) -> Filled:
    """Write a sweep's configurations to a store; what is there already is left as it is.

    Raises:
        ValueError: optimizers have different budgets, or the metric is not the one that was named before.
    """
    if not 1 <= heartbeat < grace:
        raise ValueError(f"grace={grace} must be more than heartbeat={heartbeat}, and that at least 1")
    sweep = named(name)
    stages = planned(sweep)
    for text in budget(sweep, stages):
        tell(text)
    refuse_unequal(stages, unequal)
    create(address, name, sweep.higher)
    queue = Queue(address, name, tell)
    try:
        before, chosen = queue.notes, {"metric": sweep.metric, "higher": sweep.higher}
        if any(before.get(field, value) != value for field, value in chosen.items()):
            raise ValueError(
                f"the sweep {name!r} of {address} chooses by {before['metric']}, which was named before its runs; "
                f"choosing by {sweep.metric} is another sweep: use another storage"
            )
        if "metric" not in before:
            queue.note(**chosen, commit=commit(), mvngrad=__version__, test_because=sweep.test_because)
        queue.note(run=sweep.run, seeds=sweep.seeds, unequal=unequal, heartbeat=heartbeat, grace=grace)
        filled = fill(queue, sweep)
    finally:
        queue.close()
    tell(f"{address}: {len(filled.new)} configurations are new, {filled.known} were there")
    if filled.foreign:
        tell(f"{len(filled.foreign)} that are there are not in the grid any more; they stay")
    return filled


def planned(sweep: Sweep) -> list[Sequence[Recipe]]:
    """All stages; those that depend on results as they would be if all configurations were equally good."""
    found: list[Sequence[Recipe]] = []
    for stage in sweep.stages:
        if callable(stage):
            earlier = {recipe.key: Outcome(recipe, 0.0) for recipes in found for recipe in recipes}
            stage = stage(Results(list(earlier.values()), sweep.higher))
        found.append(stage)
    return found


def budget(sweep: Sweep, stages: Sequence[Sequence[Recipe]]) -> list[str]:
    """Runs of each optimizer and the time of all, as text."""
    lines = []
    for number, stage in enumerate(stages, start=1):
        counts = ", ".join(f"{who} {count}" for who, count in shares(stage).items())
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


def shares(recipes: Sequence[Recipe]) -> Counter[str]:
    """How many different runs each optimizer has."""
    return Counter(contestant(recipe) for recipe in {recipe.key: recipe for recipe in recipes}.values())


def refuse_unequal(stages: Sequence[Sequence[Recipe]], unequal: bool) -> None:
    for number, stage in enumerate(stages, start=1):
        if not unequal and len(set((counts := shares(stage)).values())) > 1:
            least, most = counts.most_common()[-1], counts.most_common()[0]
            raise ValueError(
                f"stage {number} has {most[1]} runs of {most[0]} and {least[1]} of {least[0]}: who tries more finds "
                "more; make them equal, or say --unequal"
            )


def fill(queue: Queue, sweep: Sweep) -> Filled:
    """Add what the sweep lacks: a stage whose predecessors are done, and configurations that were lost."""
    there = by_key(queue.records())
    entries: dict[str, dict[str, Any]] = {}
    known: set[str] = set()
    for number, stage in enumerate(sweep.stages, start=1):
        if callable(stage):
            if any(key not in there or there[key].status not in SETTLED for key in known | entries.keys()):
                break
            stage = stage(Results([there[key].as_outcome for key in sorted(known)], sweep.higher))
            refuse_unequal([stage], queue.notes["unequal"])
        for recipe in stage:
            if recipe.key in there:
                known.add(recipe.key)
            else:
                entries.setdefault(recipe.key, kept(recipe, str(number)))
    lost = [record for record in there.values() if record.status == "lost"]
    queue.add([*entries.values(), *(again(record) for record in lost)])
    foreign = tuple(key for key, record in there.items() if key not in known and record.stage != SEEDS)
    return Filled(tuple(entries), tuple(record.key for record in lost), len(known), foreign)


def again(record: Record) -> dict[str, Any]:
    return {"key": record.key, "stage": record.stage, "maker": record.maker, "settings": record.settings}


def results(queue: Queue) -> tuple[list[Record], list[Record]]:
    """The configurations of the sweep proper and the runs that repeat some with other seeds."""
    found = list(by_key(queue.records()).values())
    return [r for r in found if r.stage != SEEDS], [r for r in found if r.stage == SEEDS]


def select(queue: Queue) -> dict[str, Record]:
    """The best configuration of each optimizer, of those that are done, by the metric that was named before."""
    swept, _ = results(queue)
    records = {record.key: record for record in swept}
    best = Results([record.as_outcome for record in swept if record.value is not None], queue.notes["higher"]).best
    return {who: records[outcome.recipe.key] for who, outcome in best.items()}


def rerun(queue: Queue, seeds: int) -> list[str]:
    """Queue the selected configurations with more seeds, `seeds` of each in all; the keys of those that are new.

    Raises:
        RuntimeError: the sweep is not done. A selection among some would favour what happened to run first.
    """
    fill(queue, named(queue.name))
    there = by_key(queue.records())
    if left := [record for record in there.values() if record.status not in SETTLED and record.stage != SEEDS]:
        raise RuntimeError(
            f"{len(left)} runs of {queue.name} are not done; run `mvngrad sweep work {queue.name}` first"
        )
    entries = {}
    for record in select(queue).values():
        chosen: Any = record.recipe
        if not hasattr(chosen, "seed"):
            raise ValueError(f"{record.maker} has no field seed, so that it cannot be run with more of them")
        for seed in range(chosen.seed, chosen.seed + seeds):
            recipe = dataclasses.replace(chosen, seed=seed)
            if recipe.key not in there:
                entries[recipe.key] = kept(recipe, SEEDS)
    queue.add(list(entries.values()))
    return list(entries)


def retry(queue: Queue) -> list[str]:
    """Queue again what raised an error, after its cause is mended."""
    raised = [record for record in by_key(queue.records()).values() if record.status == "raised"]
    queue.add([again(record) for record in raised])
    return [record.key for record in raised]
