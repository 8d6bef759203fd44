"""A worker: takes runs of a sweep one after another until all are done. Start as many as there are devices."""

from __future__ import annotations

import json
import math
import os
import platform
import time
import traceback
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mvngrad import __version__
from mvngrad_lab.experiments.sweeps.plans import named
from mvngrad_lab.store import ROOT, FinishedRun, read_run, timestamp
from mvngrad_lab.store.environment import commit
from mvngrad_lab.store.lock import NAME, Locked, remove
from mvngrad_lab.sweep.address import Address
from mvngrad_lab.sweep.budget import written
from mvngrad_lab.sweep.patience import GaveUp, patiently
from mvngrad_lab.sweep.plan import fill
from mvngrad_lab.sweep.processes import process
from mvngrad_lab.sweep.queue import PATIENCE, Claim, Queue, Tell
from mvngrad_lab.sweep.records import OtherCode, Record, release
from mvngrad_lab.sweep.signals import undisturbed

LOOK = 5.0
"""Seconds at most from one look for something to do to the next."""
IN_A_ROW = 3
"""So many runs that raise one after another are the worker's fault and not theirs: it stops. They are of different
optimizers as far as there are such runs, so that one that cannot run does not stop the others.
"""
CODE = ("commit", "mvngrad", "torch", "python")
"""What results that are compared should have in common."""


def identity() -> dict[str, str]:
    """Who a worker is, and of which code."""
    torch, python = release(version("torch")), platform.python_version()
    code = {"commit": commit(), "mvngrad": __version__, "torch": torch, "python": python}
    return {"worker": f"{platform.node()}-{os.getpid()}", **process(), **code}


def strangers(queue: Queue, me: dict[str, str]) -> list[str]:
    """How this worker's code differs from that of the runs in the store and of who made the sweep."""
    notes = queue.notes
    others = [record.code for record in queue.records() if record.worker]
    lines = [
        f"the sweep was made with {field} {notes[field]}, this worker has {me[field]}"
        for field in ("commit", "mvngrad")
        if notes.get(field, me[field]) != me[field]
    ]
    for field in CODE:
        counts = Counter(other[field] for other in others if other[field] != me[field])
        lines += [
            f"{count} runs are of {field} {value}, this worker has {me[field]}" for value, count in counts.items()
        ]
    return lines


def work(
    address: Address,
    name: str,
    *,
    root: Path = ROOT,
    data: Path | None = None,
    device: str = "cpu",
    compile: bool = False,
    patience: float = PATIENCE,
    tell: Tell = print,
) -> Counter[str]:
    """Run what a sweep lacks until nothing is left, others' dead runs and later stages included; what was done.

    A run that diverges or raises is recorded, with its reason, and the worker goes on. While the disk is full or the
    store does not answer, also when it starts, it waits, `patience` seconds at most.

    Raises:
        GaveUp: it did not pass.
        OtherCode: the store's recipes are not of this version.
        KeyboardInterrupt: asked to stop; the run at hand has a checkpoint and is free for others.
    """
    sweep, me, done = named(name), identity(), Counter[str]()
    raised: list[str] = []  # the optimizers of the last runs, as far as these raised
    queue = patiently(lambda: Queue(address, name, tell, patience), lambda text: tell(address.scrubbed(text)), patience)
    claim: Claim | None = None
    told = ""
    try:
        grid = queue.grid
        if any(grid.get(stage) != keys for stage, keys in written(sweep).items()):
            queue.tell(
                f"warning: this code has another grid than the store; `mvngrad sweep init {name}` would change it"
            )
        runner = _runner(queue.notes["run"])
        for line in strangers(queue, me):
            queue.tell(f"warning: {line}; results of different code are not comparable")
        while True:
            queue.reclaim()
            with undisturbed():
                claim = queue.claim(me, last=raised)
            if claim is None:
                if queue.inherit():
                    continue
                left = [record for record in queue.records() if record.status in ("waiting", "running")]
                if left:
                    told = _waits(queue, left, told)
                    time.sleep(min(LOOK, queue.heartbeat))
                elif not fill(queue, sweep):
                    return done
                continue
            attempt = Attempt(queue, claim, {"root": root, "data": data, "device": device, "compile": compile})
            status, claim = attempt.made(runner), None
            done[status] += 1
            raised = [*raised, attempt.record.contestant] if status == "raised" else []
            if len(raised) == IN_A_ROW:
                raise RuntimeError(
                    f"{IN_A_ROW} runs in a row raised an error, the last one {attempt.reason}; this worker stops. "
                    f"Mend it, put them back with `mvngrad sweep retry {name}`, and start it again"
                )
    except KeyboardInterrupt:
        if claim is not None:
            queue.put_back(claim)
        raise
    finally:
        queue.close()


def _runner(path: str) -> Callable[..., FinishedRun]:
    module, _, function = path.partition(":")
    found: Callable[..., FinishedRun] = getattr(import_module(module), function)
    return found


def _waits(queue: Queue, left: list[Record], told: str) -> str:
    """Say for whom a worker without work waits, each time that it is for others; what was said."""
    running = [f"{r.key} ({r.worker.get('worker', '?')})" for r in left if r.status == "running"]
    text = f"waits for {', '.join(running)}; a run is taken over after {queue.grace} s without a sign of life"
    if running and text != told:
        queue.tell(text)
    return text


class Attempt:
    """One run by one worker."""

    def __init__(self, queue: Queue, claim: Claim, given: dict[str, Any]) -> None:
        self.queue, self.claim, self.record, self.given = queue, claim, claim.record, given
        self.reason = ""
        """Why it did not finish."""

    def made(self, runner: Callable[..., FinishedRun]) -> str:
        """Run it and record what came of it: finished, diverged, raised, busy or another's."""
        started, began = time.perf_counter(), timestamp("milliseconds")
        before = read_run(self.given["root"] / self.record.key)
        try:
            recipe = self.record.recipe
            with self.queue.beating(self.claim):
                run = patiently(lambda: runner(recipe, **self.given), self.queue.tell, self.queue.patience)
            outcome, value = self._found(run)
            if before is not None:
                outcome["code"] = {name: before.environment[name] for name in CODE if name in before.environment}
        except Locked as busy:
            if self._freed():
                return self.made(runner)
            if not self.queue.put_back(self.claim, pause=self.queue.heartbeat):
                return self._another()
            # Perhaps by a worker that was thought dead and is not: it may still finish.
            self.queue.tell(f"{self.record.key} is left for later: {busy}")
            return "busy"
        except (GaveUp, OtherCode):
            self.queue.put_back(self.claim)
            raise
        except Exception as error:
            outcome, value = _raised(error), None
        seconds = time.perf_counter() - started
        outcome = {**outcome, "began": began, "worker_seconds": seconds}
        with undisturbed():
            recorded = self.queue.finish(self.claim, outcome, value)
        if not recorded:
            return self._another()
        status, self.reason = str(outcome["status"]), str(outcome.get("reason", ""))
        self.queue.tell(f"{self.record.key}: {status}" + (f" ({self.reason})" if self.reason else ""))
        return status

    def _another(self) -> str:
        self.queue.tell(f"{self.record.key}: this worker was thought dead, and the run is queued again")
        return "another's"

    def _freed(self) -> bool:
        """Whether the lock is of a worker on another machine that the store says is dead; then it is removed.

        `lock.held` knows the processes of its own machine alone. The store knows who was silent for longer than the
        grace. Should that one wake, it finds its lock gone before it writes anything.
        """
        lock = self.given["root"] / self.record.key / NAME
        try:
            text = lock.read_text(encoding="utf-8")
            found = json.loads(text)
        except (OSError, ValueError):
            return False
        dead = {r.worker.get("worker") for r in self.queue.records() if (r.key, r.status) == (self.record.key, "lost")}
        if found["host"] == platform.node() or f"{found['host']}-{found['pid']}" not in dead:
            return False
        return remove(lock, text)

    def _found(self, run: FinishedRun) -> tuple[dict[str, Any], float | None]:
        metric = self.queue.notes["metric"]
        plain = {name: value for name, value in run.result.items() if isinstance(value, int | float | str)}
        if run.result.get("status", "finished") == "diverged":
            return {**plain, "status": "diverged", "reason": f"diverged at step {run.result.get('step')}"}, None
        if metric not in run.result:
            raise KeyError(f"the run has no {metric!r}, by which the sweep chooses; it has {', '.join(run.result)}")
        value = run.result[metric]
        if value is None or not math.isfinite(value):
            return {**plain, "status": "diverged", "reason": f"{metric} is not finite"}, None
        return {**plain, "status": "finished"}, float(value)


def _raised(error: Exception) -> dict[str, Any]:
    reason = f"{type(error).__name__}: {error}"
    return {"status": "raised", "reason": reason, "trace": "".join(traceback.format_exception(error)[-4:])}
