"""What a sweep still has to run: its stages, the configurations it selects, and their seeds."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, islice
from typing import Any

from mvngrad import __version__
from mvngrad_lab.errors import InvalidInput, NotPossible
from mvngrad_lab.recipe import Recipe, TrainingRecipe
from mvngrad_lab.store.environment import get_commit
from mvngrad_lab.sweep import grids
from mvngrad_lab.sweep.database import Address
from mvngrad_lab.sweep.grids import Outcome, Results, Sweep, check_equal_budgets, optimizers_by_key
from mvngrad_lab.sweep.queue import GRACE, HEARTBEAT, Queue, Say, create_study
from mvngrad_lab.sweep.records import DONE, SEEDS, Record, latest_by_key, make_entry

MOST_SEEDS = 1000
"""The largest number of seeds of a configuration; a larger one is probably a typing error."""


def init_sweep(
    address: Address,
    name: str,
    sweep: Sweep,
    *,
    unequal: bool = False,
    heartbeat: int | None = None,
    grace: int | None = None,
    say: Say = print,
) -> list[str]:
    """Write a sweep's configurations to a store, except those that it has already. Returns the keys of the new ones.

    `heartbeat` and `grace` are seconds: between two heartbeats, and without one until a worker counts as dead; None is
    the store's. Raises InvalidInput if budgets differ without `unequal`, an optimizer is unknown, or the metric differs
    from the store's.
    """
    stages = sweep.expand_stages()
    for line in grids.describe_budget(sweep, stages):
        say(line)
    check_equal_budgets({str(n): optimizers_by_key(stage) for n, stage in enumerate(stages, start=1)}, unequal)
    _check_third_party_optimizers(stages)
    entries: dict[str, dict[str, Any]] = {}
    for number, stage in sweep.fixed_stages.items():
        for recipe in stage:
            entries.setdefault(recipe.key, make_entry(recipe, number))
    create_study(address, name, sweep.higher)
    queue = Queue(address, name, say)
    try:
        notes, metric = queue.notes, {"metric": sweep.metric, "higher": sweep.higher}
        _check_metric(queue, metric)
        pace = choose_pace(notes, heartbeat, grace, say)
        latest = latest_by_key(queue.records())
        tried = {n: stored_runs(latest, n) | optimizers_by_key(stage) for n, stage in sweep.fixed_stages.items()}
        check_equal_budgets(tried, unequal, "the store")
        if "metric" not in notes:
            queue.write_notes(**metric, commit=get_commit(), mvngrad=__version__, test_because=sweep.test_because)
        queue.write_notes(seeds=sweep.seeds, unequal=unequal, **pace)
        new = [entry for key, entry in entries.items() if key not in latest]
        queue.add(new)
        if notes.get("grid") != sweep.fixed_keys:
            queue.write_notes(followed={})  # they followed from results of another grid
            queue.write_notes(grid=sweep.fixed_keys)
        keys = {key for stage_keys in queue.grid.values() for key in stage_keys}
    finally:
        queue.close()
    say(f"{address}: {len(new)} configurations are new, {len(entries) - len(new)} were there")
    if outside := sum(key not in keys and record.stage != SEEDS for key, record in latest.items()):
        say(f"{outside} that are there are not in the grid any more; they stay, and nothing is chosen among them")
    return [entry["key"] for entry in new]


def _check_third_party_optimizers(stages: Iterable[Sequence[Recipe]]) -> None:
    """Raise InvalidInput for an option that an optimizer does not take: now, and not in every run."""
    for recipe in (recipe for stage in stages for recipe in stage):
        if isinstance(recipe, TrainingRecipe) and recipe.is_third_party:
            from mvngrad_lab.training import optimizers  # imports torch

            optimizers.resolve_options(recipe.optimizer, **optimizers.third_party_options(recipe))


def _check_metric(queue: Queue, metric: Mapping[str, Any]) -> None:
    """Raise InvalidInput if the store's runs were chosen by another metric, or in the other direction."""
    notes = queue.notes
    if any(notes.get(field, value) != value for field, value in metric.items()):
        raise InvalidInput(
            f"the sweep {queue.name!r} of {queue.address} chooses by {notes['metric']}, which was named before its "
            f"runs; choosing by {metric['metric']} is another sweep: use another storage"
        )


def choose_pace(notes: Mapping[str, Any], heartbeat: int | None, grace: int | None, say: Say) -> dict[str, int]:
    """Heartbeat and grace: those of the arguments, else the store's, else the defaults."""
    asked = {"heartbeat": (heartbeat, HEARTBEAT), "grace": (grace, GRACE)}
    pace = {name: notes.get(name, default) if value is None else value for name, (value, default) in asked.items()}
    if not 1 <= pace["heartbeat"] < pace["grace"]:
        raise InvalidInput(f"grace={pace['grace']} must exceed heartbeat={pace['heartbeat']}, and that be at least 1")
    for name, value in pace.items():
        if notes.get(name, value) != value:
            say(f"{name} was {notes[name]} s and is {value} s, for workers that start from now on")
    return pace


def stored_runs(latest: Mapping[str, Record], stage: str) -> dict[str, str]:
    """Key -> optimizer of all runs that a store has of a stage, including those of earlier grids."""
    return {key: record.optimizer for key, record in latest.items() if record.stage == stage}


def check_errors_retried(records: Sequence[Record], keys: Iterable[str], name: str) -> None:
    """Raise NotPossible if a run raised an error and was not tried again: bad luck must not decide a selection."""
    latest, errors = latest_by_key(records), Counter(record.key for record in records if record.status == "raised")
    if once := [key for key in keys if latest[key].status == "raised" and errors[key] == 1]:
        raise NotPossible(
            f"{len(once)} runs of {name} raised an error, and nothing is chosen without them; fix its cause, then "
            f"`mvngrad sweep retry {name}` and `mvngrad sweep work {name}`. What raises again counts as done"
        )


def add_missing(queue: Queue, sweep: Sweep) -> list[str]:
    """Queue what a sweep lacks: lost runs, and the next stage if all before are done. Returns the keys of the new ones.

    Stages that `init` wrote are not changed, because a worker's code may have another grid. A stage that is queued
    already is not changed either, even if a later result would lead to another one: an optimizer would get two.
    """
    records = queue.records()
    latest, grid = latest_by_key(records), queue.grid
    lost = [record for record in latest.values() if record.status == "lost"]
    queue.add([record.entry for record in lost])
    queued, earlier = [record.key for record in lost], set[str]()
    for index, stage in enumerate(sweep.stages, start=1):
        number = str(index)
        if number not in grid:
            if not callable(stage) or any(key not in latest or latest[key].status not in DONE for key in earlier):
                break
            check_errors_retried(records, earlier, queue.name)
            outcomes = [Outcome(latest[key].recipe, latest[key].value) for key in sorted(earlier)]
            notes = queue.notes
            recipes = stage(Results(outcomes, notes["higher"]))
            everyone = [grids.optimizer_name(outcome.recipe) for outcome in outcomes]
            tried = stored_runs(latest, number) | optimizers_by_key(recipes)
            check_equal_budgets({number: tried}, notes["unequal"], "the store", everyone)
            new = {recipe.key: make_entry(recipe, number) for recipe in recipes if recipe.key not in latest}
            queue.add(list(new.values()))
            grid[number] = sorted(optimizers_by_key(recipes))
            # Written last: if this process dies before, the next one queues the same stage.
            queue.write_notes(followed={**notes["followed"], number: grid[number]})
            queued += new
        earlier.update(grid[number])
    return queued


def get_runs(queue: Queue) -> tuple[list[Record], list[Record], list[Record]]:
    """A record of each configuration: of the current grid; of seeds of those selected; of earlier grids."""
    latest = latest_by_key(queue.records()).values()
    grid = {key for keys in queue.grid.values() for key in keys}
    rest = [record for record in latest if record.key not in grid]
    seeds, others = ([r for r in rest if (r.stage == SEEDS) == repeats] for repeats in (True, False))
    return [record for record in latest if record.key in grid], seeds, others


def select_best(queue: Queue) -> dict[str, Record]:
    """The best finished configuration of each optimizer, by the sweep's metric."""
    records = {record.key: record for record in get_runs(queue)[0]}
    outcomes = [Outcome(record.recipe, record.value) for record in records.values()]
    best = Results(outcomes, queue.notes["higher"]).best
    return {optimizer: records[outcome.recipe.key] for optimizer, outcome in best.items()}


def add_seeds(queue: Queue, sweep: Sweep, seeds: int) -> list[str]:
    """Queue the selected configurations with more seeds, `seeds` of each in all. Returns the keys of the new ones.

    Raises NotPossible if runs are left: a selection among some would favour those that ran first, or without an error.
    """
    if not 1 <= seeds <= MOST_SEEDS:
        raise InvalidInput(f"seeds={seeds} is invalid; it must be at least 1 and at most {MOST_SEEDS:,}")
    add_missing(queue, sweep)
    swept, records = get_runs(queue)[0], queue.records()
    if left := sum(record.status not in DONE for record in swept):
        raise NotPossible(f"{left} runs of {queue.name} are not done; run `mvngrad sweep work {queue.name}` first")
    check_errors_retried(records, [record.key for record in swept], queue.name)
    keys, entries = {record.key for record in records}, {}
    seeds_of_all = {record.settings["seed"] for record in records if "seed" in record.settings}
    for record in select_best(queue).values():
        selected: Any = record.recipe
        if not hasattr(selected, "seed"):
            raise InvalidInput(f"{record.maker} has no field seed, so it cannot be run with more of them")
        used = {seed for seed in seeds_of_all if dataclasses.replace(selected, seed=seed).key in keys}
        new = (seed for seed in count(selected.seed) if seed not in used)
        for seed in islice(new, max(0, seeds - len(used))):
            recipe = dataclasses.replace(selected, seed=seed)
            entries[recipe.key] = make_entry(recipe, SEEDS)
    queue.add(list(entries.values()))
    return list(entries)


def requeue_errors(queue: Queue) -> list[str]:
    """Queue again what raised an error, after its cause is fixed. Returns the keys of the new ones."""
    raised = [record for record in latest_by_key(queue.records()).values() if record.status == "raised"]
    queue.add([record.entry for record in raised])
    return [record.key for record in raised]
