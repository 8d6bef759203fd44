"""The runs of a sweep in a database: added once, claimed by one worker at a time, finished once.

A configuration is one Optuna trial. States only move forward, except when a worker releases its own trial, and each
change is one transaction, so a process may die between any two lines:

- A trial is claimed after its first heartbeat is written. Optuna finds a dead worker by its last heartbeat and never
  looks at a trial without one.
- A trial whose worker is dead is failed, and another one is added for its configuration. A process that dies between
  the two leaves a configuration without a live trial: it is *lost*, and `stages.add_missing` adds it again.
- The keys of the grid are written after all its trials. Only `init` writes a grid.
- Concurrent adds can create duplicates. Trial numbers are sequential, so a worker that claims a trial sees all earlier
  ones: only the lowest-numbered live trial of a configuration runs.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from mvngrad_lab.errors import NotFound
from mvngrad_lab.store.lock import process_start
from mvngrad_lab.sweep.database import Address, call_with_retries, describe_transient, open_database, translate_errors
from mvngrad_lab.sweep.records import FAILED, LIVE, Record, Status

T = TypeVar("T")
Say = Callable[[str], None]
HEARTBEAT, GRACE = 60, 600
"""Seconds between two heartbeats of a worker, and without one until its run is given to another."""
PATIENCE = 600.0
"""Seconds to wait for a store that does not answer, or for space on a full disk."""
ATTRIBUTES = ("double", "outcome", "worker")
"""Attributes of a trial that the engine writes later. A text setting with such a name is not written as one."""
LOGARITHMIC = ("lr",)
"""Settings that a dashboard draws on a logarithmic axis; Optuna wants it the same for all runs."""
STATES: dict[TrialState, Status] = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "finished",
}


@dataclass(frozen=True)
class ClaimedTrial:
    """A run that this worker has taken."""

    trial: int
    """Optuna's own number, in the whole database."""
    record: Record


def create_study(address: Address, name: str, higher: bool) -> None:
    """Create the tables and the study, unless they exist."""
    direction: Literal["maximize", "minimize"] = "maximize" if higher else "minimize"
    with _open_storage(address, create=True) as storage, suppress(DuplicatedStudyError):
        # Despite load_if_exists it raises if another process creates the study at this moment.
        optuna.create_study(study_name=name, storage=storage, direction=direction, load_if_exists=True)


def get_sweep_names(address: Address) -> list[str]:
    """All sweeps in a store."""
    with _open_storage(address) as storage:
        return sorted(optuna.get_all_study_names(storage))


@contextmanager
def _open_storage(address: Address, create: bool = False) -> Iterator[RDBStorage]:
    """The storage at an address, closed at the end; its errors are translated, see `translate_errors`."""
    storage = open_database(address, create)
    try:
        with translate_errors(address):
            yield storage
    finally:
        storage.engine.dispose()


class Queue:
    """One sweep in a store."""

    def __init__(self, address: Address, name: str, say: Say = print, patience: float = PATIENCE) -> None:
        self.address, self.name, self.patience = address, name, patience
        self.say: Say = lambda text: say(address.hide_passwords(text))
        self.storage = open_database(address)
        try:
            with translate_errors(address):
                sampler = optuna.samplers.RandomSampler()
                self.study = optuna.load_study(study_name=name, storage=self.storage, sampler=sampler)
                notes = self.study.user_attrs
        except BaseException as error:
            self.close()
            if not isinstance(error, KeyError):
                raise
            others = ", ".join(get_sweep_names(address)) or "none"
            raise NotFound(
                f"{address} has no sweep {name!r} (it has: {others}); make it with `mvngrad sweep init {name}`"
            ) from None
        self.heartbeat, self.grace = notes.get("heartbeat", HEARTBEAT), notes.get("grace", GRACE)
        # Set here and not by the constructor: all workers must agree, so the store has the values.
        self.storage.heartbeat_interval, self.storage.grace_period = self.heartbeat, self.grace
        self.storage.heartbeat_stale_trial_callback = self._requeue
        self._postpone_requeue()
        self.not_before: dict[str, float] = {}
        """Configurations that another process holds, and when to try them again."""

    def close(self) -> None:
        self.storage.remove_session()
        self.storage.engine.dispose()

    @property
    def notes(self) -> dict[str, Any]:
        """Of the sweep as a whole: metric, direction, heartbeat, grace, grid, and the code that made it."""
        return self._call(lambda: self.study.user_attrs)

    @property
    def grid(self) -> dict[str, list[str]]:
        """The keys of each stage: those that `init` wrote, and those that followed from results.

        Raises NotFound if `init` died before its end.
        """
        notes = self.notes
        if "grid" not in notes:
            raise NotFound(
                f"the sweep {self.name!r} of {self.address} is not whole; run `mvngrad sweep init {self.name}` again"
            )
        return {**notes["grid"], **notes["followed"]}

    def write_notes(self, **notes: Any) -> None:
        for name, value in notes.items():
            self._call(lambda name=name, value=value: self.study.set_user_attr(name, value))  # type: ignore[misc]

    def records(self) -> list[Record]:
        """All trials, oldest first; those that others made, for example with a dashboard, are left out."""
        return [make_record(trial) for trial in self._trials()]

    def add(self, entries: Sequence[dict[str, Any]]) -> None:
        """Queue configurations, each as `records.make_entry` makes it."""
        ranges = _find_ranges(entries)
        for entry in entries:
            trial = _make_trial(entry, ranges)
            self._call(lambda trial=trial: self.study.add_trial(trial))  # type: ignore[misc]

    def requeue_silent(self) -> None:
        """Queue again the runs of workers that have been silent for longer than the grace."""
        if time.monotonic() < self.requeue_from:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            self._call(lambda: optuna.storages.fail_stale_trials(self.study))

    def requeue_ended(self) -> bool:
        """Queue again the runs of workers of this machine that have ended; True if there were any.

        It reads the whole sweep, so a worker calls it only if it has nothing else to do.
        """
        dead = [
            trial
            for trial in self._trials()
            if trial.state == TrialState.RUNNING
            and has_ended(trial.user_attrs.get("worker", {}))
            and self._set_state(trial._trial_id, TrialState.FAIL)
        ]
        for trial in dead:
            self._requeue(self.study, trial)
        return bool(dead)

    def claim(self, worker: dict[str, str], last: Sequence[str] = ()) -> ClaimedTrial | None:
        """Take the first free run for this worker alone, or another one if somebody else was faster.

        Runs of optimizers in `last` are taken if there are no others.
        """
        free = sorted(self._free_trials(), key=lambda trial: make_record(trial).optimizer in last)
        while free:
            trial = free.pop(0)
            claim = ClaimedTrial(trial._trial_id, make_record(trial))
            self._call(lambda claim=claim: self.storage.record_heartbeat(claim.trial))  # type: ignore[misc]
            if self._set_state(claim.trial, TrialState.RUNNING):
                self._set_attribute(claim.trial, "worker", worker)
                return claim
            random.shuffle(free)  # the faster worker tries the next one too
        return None

    def _free_trials(self) -> list[FrozenTrial]:
        """Trials that wait, one for each configuration; duplicates are failed and never run."""
        first: dict[str, int] = {}
        free = []
        for trial in self._trials():
            record = make_record(trial)
            if record.status in LIVE:
                first.setdefault(record.key, trial.number)
            if record.status != "waiting":
                continue
            if first[record.key] != trial.number:
                self._set_attribute(trial._trial_id, "double", True)
                self._set_state(trial._trial_id, TrialState.FAIL)
            elif self.not_before.get(record.key, 0.0) <= time.monotonic():
                free.append(trial)
        return free

    def finish(self, claim: ClaimedTrial, outcome: dict[str, Any], value: float | None) -> bool:
        """Record how a run ended; False if it was queued again, because the worker sent no heartbeat.

        The outcome is written before the trial's end, so that no trial ends without one.
        """
        self._set_attribute(claim.trial, "outcome", outcome)
        if value is None or not math.isfinite(value):
            return self._set_state(claim.trial, TrialState.FAIL)
        if self._set_state(claim.trial, TrialState.COMPLETE, [value]):
            return True
        trial = self._call(lambda: self.storage.get_trial(claim.trial))
        return trial.state == TrialState.COMPLETE  # by this very call, whose answer got lost

    def release(self, claim: ClaimedTrial, pause: float = 0.0) -> bool:
        """Leave a run to others, and to this worker after `pause` seconds; False if another worker has it already."""
        self.not_before[claim.record.key] = time.monotonic() + pause
        return self._set_state(claim.trial, TrialState.WAITING)

    @contextmanager
    def send_heartbeats(self, claim: ClaimedTrial) -> Iterator[None]:
        """Send heartbeats for a run from a thread, also after the store did not answer for a while."""
        ended = threading.Event()

        def send() -> None:
            while not ended.wait(self.heartbeat):
                try:
                    self.storage.record_heartbeat(claim.trial)
                except Exception as error:  # noqa: PERF203
                    self._postpone_requeue()
                    self.say(f"no heartbeat for {claim.record.key}: {describe_transient(error) or error}")
            self.storage.remove_session()

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _postpone_requeue(self) -> None:
        """Wait for two heartbeats of other workers before calling them silent: the store may have been away."""
        self.requeue_from = time.monotonic() + 2 * self.heartbeat

    def _call(self, call: Callable[[], T]) -> T:
        """Call the store, again after transient errors; raises RetriesExhausted if they do not pass."""

        def say(text: str) -> None:
            self._postpone_requeue()
            self.say(text)

        with translate_errors(self.address):
            return call_with_retries(call, say, self.patience)

    def _trials(self) -> list[FrozenTrial]:
        trials = self._call(lambda: self.study.get_trials(deepcopy=False))
        return sorted((trial for trial in trials if "key" in trial.user_attrs), key=lambda trial: trial.number)

    def _set_attribute(self, trial: int, name: str, value: Any) -> None:
        with suppress(UpdateFinishedTrialError):
            self._call(lambda: self.storage.set_trial_user_attr(trial, name, value))

    def _set_state(self, trial: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """False if the trial has ended: by another process, or by this same call, whose answer got lost."""
        try:
            return self._call(lambda: self.storage.set_trial_state_values(trial, state, values))
        except UpdateFinishedTrialError:
            return False

    def _requeue(self, study: optuna.Study, trial: FrozenTrial) -> None:
        record = make_record(trial)
        self.say(f"{record.key}: its worker {'has ended' if has_ended(record.worker) else 'is silent'}; queued again")
        self._call(lambda: study.add_trial(_make_trial(record.entry, trial.distributions)))


def make_record(trial: FrozenTrial) -> Record:
    """The record of a trial that `Queue.add` made."""
    attributes, status = trial.user_attrs, _get_status(trial)
    return Record(
        number=trial.number,
        **{name: attributes[name] for name in ("key", "stage", "maker", "settings")},
        status=status,
        value=trial.value if status == "finished" else None,
        outcome=attributes.get("outcome", {}),
        worker=attributes.get("worker", {}),
    )


def _get_status(trial: FrozenTrial) -> Status:
    if trial.state in STATES:
        return STATES[trial.state]
    if "double" in trial.user_attrs:
        return "duplicate"
    # A worker that dies after it wrote a finished outcome and before the trial's end leaves a trial to be run again.
    status: Status = trial.user_attrs.get("outcome", {}).get("status", "lost")
    return status if status in FAILED else "lost"


def _make_trial(entry: dict[str, Any], ranges: dict[str, BaseDistribution]) -> FrozenTrial:
    settings = entry["settings"]
    numbers = {name: float(settings[name]) for name in ranges if settings.get(name) is not None}
    texts = {name: value for name, value in settings.items() if isinstance(value, str)}
    return optuna.create_trial(
        state=TrialState.WAITING,
        params=numbers,
        distributions={name: ranges[name] for name in numbers},
        user_attrs={**{name: text for name, text in texts.items() if name not in ATTRIBUTES}, **entry},
    )


def _find_ranges(entries: Sequence[dict[str, Any]]) -> dict[str, BaseDistribution]:
    """The ranges of numbers that vary, for Optuna's dashboard: nothing is drawn from them.

    Optuna's categories may not grow, and a grid may; so settings that are no numbers become attributes of a trial.
    """
    ranges: dict[str, BaseDistribution] = {}
    for name in dict.fromkeys(name for entry in entries for name in entry["settings"]):
        values = [value for entry in entries if (value := entry["settings"].get(name)) is not None]
        numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        if numeric and len(set(values)) > 1 and (min(values) > 0 or name not in LOGARITHMIC):
            ranges[name] = FloatDistribution(min(values), max(values), log=name in LOGARITHMIC)
    return ranges


# Which process a worker is


def describe_process() -> dict[str, str]:
    """This process among all: machines may share names, and containers of one machine have their own process ids."""
    return {"machine": _get_machine(), "pid": str(os.getpid()), "began": process_start(os.getpid()) or ""}


def has_ended(worker: dict[str, str]) -> bool:
    """Whether a worker was a process of this machine and has ended; False for workers of other machines."""
    here = _get_machine()
    return bool(here) and worker.get("machine") == here and (process_start(int(worker["pid"])) or "") != worker["began"]


def _get_machine() -> str:
    """The kernel's boot and this process's pid namespace; "" without /proc."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""
