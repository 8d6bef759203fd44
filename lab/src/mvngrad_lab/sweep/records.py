"""What a store keeps of a run, and the words for its status: for engine, exports and report. No torch, no optuna."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mvngrad_lab.errors import InvalidInput, NotPossible
from mvngrad_lab.recipe import Recipe

Status = Literal["waiting", "running", "finished", "diverged", "raised", "lost", "duplicate"]
"""lost: its worker died, and it is to be queued again. duplicate: queued twice, never run."""
FAILED: tuple[Status, ...] = ("diverged", "raised")
DONE: tuple[Status, ...] = ("finished", *FAILED)
OPEN: tuple[Status, ...] = ("waiting", "running", "lost")
LIVE: tuple[Status, ...] = ("waiting", "running", "finished", "diverged")
"""A configuration with such a trial needs no other. One that raised is queued again only on request."""
SEEDS = "seeds"
"""The stage of runs that only repeat a selected configuration."""
CODE = ("commit", "mvngrad", "torch", "python", "function")
"""What results that are compared should have in common; `function` is a sweep's own, with a hash of its code."""


class VersionMismatch(NotPossible):
    """This version of the code cannot make a recipe of the store."""


@dataclass(frozen=True)
class Record:
    """One trial. A configuration has several if a worker died: then all but the last are lost."""

    number: int
    key: str
    stage: str
    maker: str
    """package.module:class of the recipe."""
    settings: dict[str, Any]
    status: Status
    value: float | None
    """The sweep's metric; None unless finished."""
    outcome: dict[str, Any]
    """Metrics of a finished run; the reason, if it diverged or raised."""
    worker: dict[str, str]

    @property
    def recipe(self) -> Recipe:
        """The recipe, made from its settings. Raises VersionMismatch if this code makes none, or one of another key."""
        try:
            recipe = _make_recipe(self.maker, self.settings)
        except (LookupError, TypeError, ValueError) as error:
            raise VersionMismatch(f"this code cannot make the recipe of {self.key}: {error}") from error
        if recipe.key != self.key:
            raise VersionMismatch(
                f"this code makes {recipe.key} from the recipe of {self.key}: they are of different versions; use the "
                "version that made the sweep, or another storage"
            )
        return recipe

    @property
    def entry(self) -> dict[str, Any]:
        """What to queue to run this configuration again."""
        return {"key": self.key, "stage": self.stage, "maker": self.maker, "settings": self.settings}

    @property
    def optimizer(self) -> str:
        """As `optimizer_name`, also for a recipe that this code cannot make."""
        return str(self.settings.get("optimizer", self.key.rpartition("-")[0]))

    @property
    def code(self) -> dict[str, str]:
        """Commit and versions: those of the worker, or of the earlier process that had finished the run already."""
        code: dict[str, str] = {**self.worker, **self.outcome.get("code", {})}
        return {name: strip_build(value) if name == "torch" else value for name, value in code.items()}


def strip_build(version: str) -> str:
    """2.11.0 of 2.11.0+cu130: pip and torch itself may name different builds of one version."""
    return version.partition("+")[0]


def make_entry(recipe: Recipe, stage: str) -> dict[str, Any]:
    """What a store keeps of a recipe. Raises InvalidInput if the recipe cannot be made from that again."""
    maker = f"{type(recipe).__module__}:{type(recipe).__qualname__}"
    try:
        same = _make_recipe(maker, recipe.settings) == recipe
    except (LookupError, TypeError, ValueError):
        same = False
    if not same:
        raise InvalidInput(
            f"{recipe!r} cannot be made again from its settings; a sweep's recipes have plain values, and their "
            "classes are at the top level of a module"
        )
    return {"key": recipe.key, "stage": stage, "maker": maker, "settings": recipe.settings}


def _make_recipe(maker: str, settings: dict[str, Any]) -> Recipe:
    """Make a recipe of a class that this process has imported already.

    `maker` comes from a store. It imports nothing and is called only if it is a Recipe, so a store cannot name code to
    run: a worker imports its own sweep's module, and that one the classes of the sweep's recipes.
    """
    for each in _subclasses(Recipe):
        if f"{each.__module__}:{each.__qualname__}" == maker and "<locals>" not in maker:
            return each(**_to_tuples(settings))
    raise LookupError(f"{maker!r} is not a recipe class of the sweep's module, or of a module that it imports")


def _subclasses(parent: type[Recipe]) -> Iterator[type[Recipe]]:
    for child in reversed(parent.__subclasses__()):  # the newest first, should a module be loaded twice
        yield child
        yield from _subclasses(child)


def _to_tuples(value: Any) -> Any:
    """JSON has no tuples: its lists were tuples."""
    if isinstance(value, dict):
        return {name: _to_tuples(part) for name, part in value.items()}
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def latest_by_key(records: Iterable[Record]) -> dict[str, Record]:
    """The record that counts for each key: a finished one, else the last that is not lost, else a lost one."""
    weights = {"finished": 2, "lost": 0}
    latest: dict[str, Record] = {}
    for record in records:
        before = latest.get(record.key)
        if record.status != "duplicate" and (
            before is None or weights.get(record.status, 1) >= weights.get(before.status, 1)
        ):
            latest[record.key] = record
    return latest
