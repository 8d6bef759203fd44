"""What a store knows of a configuration, read from Optuna's trials."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from optuna.trial import FrozenTrial, TrialState

from mvngrad_lab.experiments.sweeps.plans import Outcome
from mvngrad_lab.recipe import Recipe

Status = Literal["waiting", "running", "finished", "diverged", "raised", "lost", "double"]
LIVE = ("waiting", "running", "finished", "diverged")
"""A configuration that has such a trial needs no other. One that raised has another if someone asked for it."""
SETTLED = ("finished", "diverged", "raised")


class OtherCode(RuntimeError):
    """The recipe of the store is not one of this version of the code."""


@dataclass(frozen=True)
class Record:
    """One trial. A configuration has several where a worker died: then all but the last are lost."""

    number: int
    key: str
    stage: str
    maker: str
    """package.module:class of the recipe."""
    settings: dict[str, Any]
    status: Status
    value: float | None
    outcome: dict[str, Any]
    """Metrics of a finished run; the reason, of one that diverged or raised."""
    worker: dict[str, str]

    @classmethod
    def of(cls, trial: FrozenTrial) -> Record:
        kept = trial.user_attrs
        status, outcome = _status(trial), kept.get("outcome", {})
        value = trial.value if status == "finished" else None
        worker = kept.get("worker", {})
        return cls(
            trial.number, kept["key"], kept["stage"], kept["maker"], kept["settings"], status, value, outcome, worker
        )

    @property
    def recipe(self) -> Recipe:
        """Made anew, and checked: a version of the code that has other fields makes another run of it."""
        try:
            made = _made(self.maker, self.settings)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise OtherCode(f"this code cannot make the recipe of {self.key}: {error}") from error
        if made.key != self.key:
            raise OtherCode(f"this code makes {made.key} of the recipe of {self.key}: they are of different versions")
        return made

    @property
    def contestant(self) -> str:
        """As `recipes.sweeps.contestant`, of a recipe that this code may not be able to make."""
        return str(self.settings.get("optimizer", self.key.rpartition("-")[0]))

    @property
    def code(self) -> dict[str, str]:
        """Commit and versions: the worker's, but for a run that it found finished, which has its own."""
        known: dict[str, str] = {**self.worker, **self.outcome.get("code", {})}
        return {name: release(value) if name == "torch" else value for name, value in known.items()}

    @property
    def as_outcome(self) -> Outcome:
        return Outcome(self.recipe, self.value)


def release(version: str) -> str:
    """A version without its build, in which what pip knows of torch and what torch calls itself may differ.

    >>> release("2.11.0+cu130")
    '2.11.0'
    """
    return version.partition("+")[0]


def _status(trial: FrozenTrial) -> Status:
    if trial.state == TrialState.WAITING:
        return "waiting"
    if trial.state == TrialState.RUNNING:
        return "running"
    if trial.state == TrialState.COMPLETE:
        return "finished"
    if "double" in trial.user_attrs:
        return "double"
    # A worker that dies after it noted a finished run and before it said so leaves a trial to be run again.
    told: Status = trial.user_attrs.get("outcome", {}).get("status", "lost")
    return told if told in ("diverged", "raised") else "lost"


def kept(recipe: Recipe, stage: str) -> dict[str, Any]:
    """What a trial keeps of a recipe, from which `Record.recipe` makes it again."""
    maker = f"{type(recipe).__module__}:{type(recipe).__qualname__}"
    try:
        same = _made(maker, recipe.settings) == recipe
    except (ImportError, AttributeError, TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(
            f"{recipe!r} cannot be made again from its settings; a sweep's recipes are of plain values, and their "
            "classes are found in their modules"
        )
    return {"key": recipe.key, "stage": stage, "maker": maker, "settings": recipe.settings}


def _made(maker: str, settings: dict[str, Any]) -> Recipe:
    module, _, name = maker.partition(":")
    made: Recipe = getattr(import_module(module), name)(**_frozen(settings))
    return made


def _frozen(value: Any) -> Any:
    """JSON has no tuples: its lists were some."""
    if isinstance(value, dict):
        return {name: _frozen(part) for name, part in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def by_key(records: Iterable[Record]) -> dict[str, Record]:
    """What holds of each configuration: a finished trial, else the last one that is not lost, else a lost one."""
    found: dict[str, Record] = {}
    for record in records:
        before = found.get(record.key)
        if record.status != "double" and (before is None or _weight(record) >= _weight(before)):
            found[record.key] = record
    return found


def _weight(record: Record) -> int:
    return {"finished": 2, "lost": 0}.get(record.status, 1)
