"""The runs of a sweep in a database: added once, claimed by one worker at a time, finished once.

A configuration is one Optuna trial. States only go forward, but for a trial that its own worker puts back, and each
change is one transaction; so a process may die between any two lines:

- A trial is claimed after its heartbeat is noted. Optuna knows a dead worker by its last heartbeat and would never
  look at a trial without one.
- A trial whose worker is dead is failed, and another one is added for its configuration. Who dies between these two
  leaves a configuration without a live trial: it is *lost*, and `plan.fill` adds it again.
- The keys of the grid are noted when all of it is there. Only `init` writes a grid.
- Two that add at the same time add a trial too many. Numbers are given one after another, so that who claims a trial
  sees all that came before it: of the live ones of a configuration only the first is run.
"""

from __future__ import annotations

import math
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.exceptions import (
    DuplicatedStudyError,
    ExperimentalWarning,
    StorageInternalError,
    UpdateFinishedTrialError,
)
from optuna.trial import FrozenTrial, TrialState

from mvngrad_lab.sweep.address import Address
from mvngrad_lab.sweep.database import opened
from mvngrad_lab.sweep.patience import Away, passing, patiently
from mvngrad_lab.sweep.processes import over
from mvngrad_lab.sweep.records import LIVE, Record

T = TypeVar("T")
Tell = Callable[[str], None]
HEARTBEAT, GRACE = 60, 600
"""Seconds from one sign of life of a worker to the next, and without one until its run is given to another."""
PATIENCE = 600.0
LOGARITHMIC = ("lr",)
"""Settings that a dashboard draws on a logarithmic axis; Optuna wants it the same for all runs."""


@dataclass(frozen=True)
class Claim:
    number: int
    trial: int
    """Optuna's own number, in the whole database."""
    record: Record


def create(address: Address, name: str, higher: bool) -> None:
    """Make the tables and the study; what is there stays."""
    storage = opened(address, create=True)
    try:
        optuna.create_study(
            study_name=name, storage=storage, direction="maximize" if higher else "minimize", load_if_exists=True
        )
    except DuplicatedStudyError:
        pass  # made by another process between Optuna's look and its leap
    except StorageInternalError as error:
        if (reason := passing(error)) is None:
            raise
        raise Away(f"{address}: {reason}") from None
    finally:
        storage.engine.dispose()


def names(address: Address) -> list[str]:
    """Of all sweeps in a store."""
    return sorted(optuna.get_all_study_names(opened(address)))


class Queue:
    """One sweep in a store."""

    def __init__(self, address: Address, name: str, tell: Tell = print, patience: float = PATIENCE) -> None:
        self.address, self.name, self.patience = address, name, patience
        self.tell: Tell = lambda text: tell(address.scrubbed(text))
        self.storage = opened(address)
        try:
            self.study = optuna.load_study(
                study_name=name, storage=self.storage, sampler=optuna.samplers.RandomSampler()
            )
            self.identity, notes = self.storage.get_study_id_from_name(name), self.study.user_attrs
        except BaseException as error:
            self.close()
            if not isinstance(error, KeyError):
                raise
            others = ", ".join(names(address)) or "none"
            raise LookupError(
                f"{address} has no sweep {name!r} (it has: {others}); make it with `mvngrad sweep init {name}`"
            ) from None
        self.heartbeat, self.grace = notes.get("heartbeat", HEARTBEAT), notes.get("grace", GRACE)
        # Given here and not to the constructor: all workers must agree, so the store says what they are.
        self.storage.heartbeat_interval, self.storage.grace_period = self.heartbeat, self.grace
        self.storage.heartbeat_stale_trial_callback = self._again
        self.judging = 0.0
        """From when on this process may say that others are silent."""
        self._away()
        self.later: dict[str, float] = {}
        """Configurations that another process holds, and when to try them again."""

    def close(self) -> None:
        self.storage.remove_session()
        self.storage.engine.dispose()

    @property
    def notes(self) -> dict[str, Any]:
        """Of the sweep as a whole: metric, direction, pace, and who made it."""
        return self._try(lambda: self.study.user_attrs)

    @property
    def grid(self) -> dict[str, list[str]]:
        """The keys of each stage: of those that `init` wrote, and of those that followed from results.

        Raises:
            LookupError: `init` died before its end.
        """
        notes = self.notes
        if "grid" not in notes:
            raise LookupError(
                f"the sweep {self.name!r} of {self.address} is not whole; run `mvngrad sweep init {self.name}` again"
            )
        return {**notes["grid"], **notes["followed"]}

    def note(self, **notes: Any) -> None:
        for name, value in notes.items():
            self._try(lambda name=name, value=value: self.study.set_user_attr(name, value))  # type: ignore[misc]

    def records(self) -> list[Record]:
        """All trials, oldest first; such as were not made here, with a dashboard say, are left out."""
        return [Record.of(trial) for trial in self._trials()]

    def add(self, entries: Sequence[dict[str, Any]]) -> None:
        """Queue configurations, each as `records.kept` makes it."""
        spaces = _spaces(entries)
        for entry in entries:
            trial = _trial(entry, spaces)
            self._try(lambda trial=trial: self.study.add_trial(trial))  # type: ignore[misc]

    def reclaim(self) -> None:
        """Queue again the runs of workers that are silent for longer than the grace."""
        if time.monotonic() < self.judging:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            self._try(lambda: optuna.storages.fail_stale_trials(self.study))

    def inherit(self) -> bool:
        """Queue again the runs of workers of this machine that are over; whether there were any.

        Asked by who finds nothing else to do: it reads the whole sweep.
        """
        dead = [
            trial
            for trial in self._trials()
            if trial.state == TrialState.RUNNING
            and over(trial.user_attrs.get("worker", {}))
            and self._set(self._identity_of(trial), TrialState.FAIL)
        ]
        for trial in dead:
            self._again(self.study, trial)
        return bool(dead)

    def claim(self, worker: dict[str, str], last: Sequence[str] = ()) -> Claim | None:
        """Take the first run that is free, for this worker alone; any other where another was faster.

        Those of optimizers in `last` are taken if there are no others.
        """
        free = sorted(self._free(), key=lambda trial: Record.of(trial).contestant in last)
        while free:
            trial = free.pop(0)
            claim = Claim(trial.number, self._identity_of(trial), Record.of(trial))
            if self._taken(claim):
                self._attribute(claim.trial, "worker", worker)
                return claim
            random.shuffle(free)  # the faster ones go for the next one too
        return None

    def _free(self) -> list[FrozenTrial]:
        """Those that wait, one of each configuration; what was added twice is not to be run at all."""
        first: dict[str, int] = {}
        free = []
        for trial in self._trials():
            record = Record.of(trial)
            if record.status in LIVE:
                first.setdefault(record.key, trial.number)
            if record.status != "waiting":
                continue
            if first[record.key] != trial.number:
                identity = self._identity_of(trial)
                self._attribute(identity, "double", True)
                self._set(identity, TrialState.FAIL)
            elif self.later.get(record.key, 0.0) <= time.monotonic():
                free.append(trial)
        return free

    def _taken(self, claim: Claim) -> bool:
        self._try(lambda: self.storage.record_heartbeat(claim.trial))
        return self._set(claim.trial, TrialState.RUNNING)

    def finish(self, claim: Claim, outcome: dict[str, Any], value: float | None) -> bool:
        """Record how a run ended; False where the worker was thought dead, and the run is another's now.

        The outcome is one entry and comes before the end of the trial, so that no trial ends without it.
        """
        self._attribute(claim.trial, "outcome", outcome)
        if value is None or not math.isfinite(value):
            return self._set(claim.trial, TrialState.FAIL)
        if self._set(claim.trial, TrialState.COMPLETE, [value]):
            return True
        return self._try(lambda: self.storage.get_trial(claim.trial)).state == TrialState.COMPLETE  # by this very call

    def put_back(self, claim: Claim, pause: float = 0.0) -> bool:
        """Leave a run to others, for this worker not before `pause` seconds; False where it is another's by now."""
        self.later[claim.record.key] = time.monotonic() + pause
        return self._set(claim.trial, TrialState.WAITING)

    @contextmanager
    def beating(self, claim: Claim) -> Iterator[None]:
        """Give signs of life for a run from a thread of its own. While the store does not answer, it goes on trying."""
        over = threading.Event()

        def beats() -> None:
            while not over.wait(self.heartbeat):
                self._beat(claim)
            self.storage.remove_session()

        thread = threading.Thread(target=beats, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _beat(self, claim: Claim) -> None:
        try:
            self.storage.record_heartbeat(claim.trial)
        except Exception as error:
            self._away()
            self.tell(f"no sign of life for {claim.record.key}: {passing(error) or error}")

    def _away(self) -> None:
        """The store was away, for this process at least: let all others give a sign of life first."""
        self.judging = time.monotonic() + 2 * self.heartbeat

    def _try(self, call: Callable[[], T]) -> T:
        def tell(text: str) -> None:
            self._away()
            self.tell(text)

        return patiently(call, tell, self.patience)

    def _trials(self) -> list[FrozenTrial]:
        found = self._try(lambda: self.study.get_trials(deepcopy=False))
        return sorted((trial for trial in found if "key" in trial.user_attrs), key=lambda trial: trial.number)

    def _identity_of(self, trial: FrozenTrial) -> int:
        return self._try(lambda: self.storage.get_trial_id_from_study_id_trial_number(self.identity, trial.number))

    def _attribute(self, trial: int, name: str, value: Any) -> None:
        self._unless_over(lambda: self.storage.set_trial_user_attr(trial, name, value))

    def _set(self, trial: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        return self._unless_over(lambda: self.storage.set_trial_state_values(trial, state, values)) is not False

    def _unless_over(self, call: Callable[[], Any]) -> Any:
        """False where the trial has ended: by another, or by this same call, whose answer got lost."""
        try:
            return self._try(call)
        except UpdateFinishedTrialError:
            return False

    def _again(self, study: optuna.Study, trial: FrozenTrial) -> None:
        why = "over" if over(trial.user_attrs.get("worker", {})) else "silent"
        self.tell(f"{trial.user_attrs['key']}: its worker is {why}; queued again")
        entry = {name: trial.user_attrs[name] for name in ("key", "stage", "maker", "settings")}
        self._try(lambda: study.add_trial(_trial(entry, trial.distributions)))


def _trial(entry: dict[str, Any], spaces: dict[str, BaseDistribution]) -> FrozenTrial:
    settings = entry["settings"]
    numbers = {name: float(settings[name]) for name in spaces if settings.get(name) is not None}
    named = {name: value for name, value in settings.items() if isinstance(value, str)}
    return optuna.create_trial(
        state=TrialState.WAITING,
        params=numbers,
        distributions={name: spaces[name] for name in numbers},
        user_attrs={**named, **entry},
    )


def _spaces(entries: Sequence[dict[str, Any]]) -> dict[str, BaseDistribution]:
    """Numbers that vary, from the least to the greatest: for Optuna's dashboard, nothing is drawn from them.

    Its categories may not grow, and a grid may; so what is not a number is an attribute of a trial and no parameter.
    """
    found: dict[str, BaseDistribution] = {}
    for name in dict.fromkeys(name for entry in entries for name in entry["settings"]):
        values = [value for entry in entries if (value := entry["settings"].get(name)) is not None]
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        if numbers and len(set(values)) > 1 and (min(values) > 0 or name not in LOGARITHMIC):
            found[name] = FloatDistribution(min(values), max(values), log=name in LOGARITHMIC)
    return found
