"""What a sweep still has to run: its stages, the configurations it selects, and their seeds."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mvngrad import __version__
from mvngrad_lab.experiments.sweeps.plans import Results, Sweep, contestant, named
from mvngrad_lab.store.environment import commit
from mvngrad_lab.sweep.address import Address
from mvngrad_lab.sweep.budget import budget, fixed, planned, refuse_unequal, refuse_unknown, tried, written
from mvngrad_lab.sweep.queue import GRACE, HEARTBEAT, Queue, Tell, create
from mvngrad_lab.sweep.records import SETTLED, Record, by_key, kept

SEEDS = "seeds"
"""The stage of runs that only repeat a selected configuration."""


def init(
    address: Address,
    name: str,
    *,
    unequal: bool = False,
    heartbeat: int | None = None,
    grace: int | None = None,
    tell: Tell = print,
) -> list[str]:
    """Write a sweep's configurations to a store; what is there already is left as it is. The keys of the new ones.

    Args:
        address: of the store.
        name: of the sweep.
        unequal: optimizers may have different budgets.
        heartbeat: seconds from one sign of life to the next; None is what the store has, else 60.
        grace: seconds of silence after which a worker is dead; None is what the store has, else 600.
        tell: is told what the sweep takes, and what changes.

    Raises:
        ValueError: optimizers have different budgets, one is unknown, or the metric is not the one that was named
            before.
    """
    sweep = named(name)
    stages = planned(sweep)
    for text in budget(sweep, stages):
        tell(text)
    refuse_unequal({str(number): tried(stage) for number, stage in enumerate(stages, start=1)}, unequal)
    refuse_unknown(recipe for stage in stages for recipe in stage)
    entries: dict[str, dict[str, Any]] = {}
    for number, stage in fixed(sweep).items():
        for recipe in stage:
            entries.setdefault(recipe.key, kept(recipe, number))
    create(address, name, sweep.higher)
    queue = Queue(address, name, tell)
    try:
        before, chosen = queue.notes, {"metric": sweep.metric, "higher": sweep.higher}
        if any(before.get(field, value) != value for field, value in chosen.items()):
            raise ValueError(
                f"the sweep {name!r} of {address} chooses by {before['metric']}, which was named before its runs; "
                f"choosing by {sweep.metric} is another sweep: use another storage"
            )
        pace = paced(before, heartbeat, grace, tell)
        there = by_key(queue.records())
        refuse_unequal({n: stored(there, n) | tried(stage) for n, stage in fixed(sweep).items()}, unequal, "the store")
        if "metric" not in before:
            queue.note(**chosen, commit=commit(), mvngrad=__version__, test_because=sweep.test_because)
        queue.note(run=sweep.run, seeds=sweep.seeds, unequal=unequal, **pace)
        new = [entry for key, entry in entries.items() if key not in there]
        queue.add(new)
        if before.get("grid") != written(sweep):
            queue.note(followed={})  # from results of another grid
            queue.note(grid=written(sweep))
        ours = {key for keys in queue.grid.values() for key in keys}
    finally:
        queue.close()
    foreign = sum(key not in ours and record.stage != SEEDS for key, record in there.items())
    tell(f"{address}: {len(new)} configurations are new, {len(entries) - len(new)} were there")
    if foreign:
        tell(f"{foreign} that are there are not in the grid any more; they stay, and nothing is chosen among them")
    return [entry["key"] for entry in new]


def paced(before: Mapping[str, Any], heartbeat: int | None, grace: int | None, tell: Tell) -> dict[str, int]:
    """Heartbeat and grace: as given, else as the store has them."""
    given = {"heartbeat": (heartbeat, HEARTBEAT), "grace": (grace, GRACE)}
    found = {name: before.get(name, usual) if value is None else value for name, (value, usual) in given.items()}
    if not 1 <= found["heartbeat"] < found["grace"]:
        raise ValueError(
            f"grace={found['grace']} must be more than heartbeat={found['heartbeat']}, and that at least 1"
        )
    for name, value in found.items():
        if before.get(name, value) != value:
            tell(f"{name} was {before[name]} s and is {value} s, for workers that start from now on")
    return found


def stored(there: Mapping[str, Record], stage: str) -> dict[str, str]:
    """Whose each run is that a store has of a stage, of earlier grids too."""
    return {key: record.contestant for key, record in there.items() if record.stage == stage}


def refuse_untried(records: Sequence[Record], keys: Iterable[str], name: str) -> None:
    """Whether all that raised an error was tried again: else who was unlucky is not among those that are chosen."""
    there, times = by_key(records), Counter(record.key for record in records if record.status == "raised")
    if untried := [key for key in keys if there[key].status == "raised" and times[key] == 1]:
        raise RuntimeError(
            f"{len(untried)} runs of {name} raised an error, and nothing is chosen without them; mend its cause, then "
            f"`mvngrad sweep retry {name}` and `mvngrad sweep work {name}`. What raises again counts as done"
        )


def fill(queue: Queue, sweep: Sweep) -> list[str]:
    """Queue what a sweep lacks: what was lost, and the next stage where those before are done; the keys.

    What `init` wrote is left to it, because a worker's code may have another grid. So is a stage that is queued, even
    if a later result would make another one of it: there would be two for one optimizer.
    """
    records = queue.records()
    there, grid = by_key(records), queue.grid
    lost = [record for record in there.values() if record.status == "lost"]
    queue.add([again(record) for record in lost])
    queued, earlier = [record.key for record in lost], set[str]()
    for index, stage in enumerate(sweep.stages, start=1):
        number = str(index)
        if number not in grid:
            if not callable(stage) or any(key not in there or there[key].status not in SETTLED for key in earlier):
                break
            refuse_untried(records, earlier, queue.name)
            before = [there[key].as_outcome for key in sorted(earlier)]
            recipes, notes = stage(Results(before, sweep.higher)), queue.notes
            everyone = [contestant(outcome.recipe) for outcome in before]
            refuse_unequal({number: stored(there, number) | tried(recipes)}, notes["unequal"], "the store", everyone)
            new = {recipe.key: kept(recipe, number) for recipe in recipes if recipe.key not in there}
            queue.add(list(new.values()))
            grid[number] = sorted(tried(recipes))
            # Noted last: who dies before that leaves the same stage to the next one.
            queue.note(followed={**notes["followed"], number: grid[number]})
            queued += new
        earlier.update(grid[number])
    return queued


def again(record: Record) -> dict[str, Any]:
    return {"key": record.key, "stage": record.stage, "maker": record.maker, "settings": record.settings}


class Found(NamedTuple):
    """What a store has, each configuration once."""

    swept: list[Record]
    """Those of the grid as it is now."""
    seeds: list[Record]
    """Runs that repeat some with other seeds."""
    others: list[Record]
    """Those of earlier grids."""


def results(queue: Queue) -> Found:
    """The configurations of the sweep proper, which all optimizers have as many of, and what else was run."""
    found, ours = by_key(queue.records()).values(), {key for keys in queue.grid.values() for key in keys}
    rest = [record for record in found if record.key not in ours]
    return Found(
        [record for record in found if record.key in ours],
        [record for record in rest if record.stage == SEEDS],
        [record for record in rest if record.stage != SEEDS],
    )


def select(queue: Queue) -> dict[str, Record]:
    """The best configuration of each optimizer, of those that are done, by the metric that was named before."""
    records = {record.key: record for record in results(queue).swept}
    done = [record.as_outcome for record in records.values() if record.value is not None]
    best = Results(done, queue.notes["higher"]).best
    return {who: records[outcome.recipe.key] for who, outcome in best.items()}


def rerun(queue: Queue, seeds: int) -> list[str]:
    """Queue the selected configurations with more seeds, `seeds` of each in all; the keys of those that are new.

    Raises:
        RuntimeError: the sweep is not done. A selection among some would favour what happened to run first, or to run
            without an error.
        ValueError: `seeds` is less than 1.
    """
    if seeds < 1:
        raise ValueError(f"seeds={seeds} is invalid; it must be at least 1")
    fill(queue, named(queue.name))
    swept, there = results(queue).swept, by_key(queue.records())
    if left := sum(record.status not in SETTLED for record in swept):
        raise RuntimeError(f"{left} runs of {queue.name} are not done; run `mvngrad sweep work {queue.name}` first")
    refuse_untried(queue.records(), [record.key for record in swept], queue.name)
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
