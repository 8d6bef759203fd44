"""A worker: takes runs of a sweep one after another until all are done. Start as many as there are devices."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from inspect import Parameter, signature
from numbers import Real
from pathlib import Path
from typing import Any

from mvngrad import __version__
from mvngrad_lab.arrays import to_json
from mvngrad_lab.errors import InvalidInput, NotPossible
from mvngrad_lab.pool import catch_signals, is_stdout_closed
from mvngrad_lab.recipe import Recipe
from mvngrad_lab.store import ROOT, FinishedRun, RunFolder, read_run, timestamp
from mvngrad_lab.store.environment import get_changes, get_commit, get_environment
from mvngrad_lab.store.lock import LOCK_FILE, Locked, lock_folder, remove_lock
from mvngrad_lab.sweep.database import Address, RetriesExhausted, call_with_retries
from mvngrad_lab.sweep.function_code import describe_function, forget_descriptions
from mvngrad_lab.sweep.grids import Sweep
from mvngrad_lab.sweep.queue import PATIENCE, ClaimedTrial, Queue, Say, describe_process
from mvngrad_lab.sweep.records import CODE, Record, VersionMismatch, strip_build
from mvngrad_lab.sweep.stages import add_missing
from mvngrad_lab.sweep.summary import describe_progress, describe_settings

LONGEST_PAUSE = 5.0
"""Seconds between two looks for something to do, at most."""
ERRORS_IN_A_ROW = 3
"""So many consecutive errors, of different optimizers if possible, are the worker's fault: it stops."""


def has_parameter(run: Callable[..., Any], option: str) -> bool:
    """Whether a sweep's function has a parameter for an option of `mvngrad sweep work`, or takes any."""
    parameters = signature(run).parameters.values()
    return any(parameter.name == option or parameter.kind == Parameter.VAR_KEYWORD for parameter in parameters)


def check_taken(run: Callable[..., Any] | None, **options: Any) -> None:
    """Raise InvalidInput if an option of the command line is set that a sweep's function does not take."""
    for name, value in options.items():
        if run is not None and value and not has_parameter(run, name):
            function = describe_function(run)["name"]
            raise InvalidInput(f"--{name} {value}: the sweep's function {function} has no parameter {name}")


RESERVED = ("began", "code", "double", "reason", "trace", "worker", "worker_seconds")
"""What a sweep's store keeps of a run next to its metrics."""


def call_run(run: Callable[..., Any], recipe: Recipe, root: Path, metric: str, **options: Any) -> FinishedRun:
    """Call a sweep's function and store what it returns, unless it takes `root` and does so itself.

    Raises Locked if another process is running this recipe, and InvalidInput if the result in the store is of another
    function, or of this one before it was edited.
    """
    taken = {name: value for name, value in options.items() if has_parameter(run, name)}
    if has_parameter(run, "root"):
        finished: FinishedRun = run(recipe, root=root, **taken)
        return finished
    folder = RunFolder(recipe, root)
    with lock_folder(folder.path) as check_lock:
        function = describe_function(run)
        if (stored := folder.run) is not None and "seconds" in stored.result:  # else the function wrote it
            if stored.environment.get("function", function) != function:
                other = stored.environment["function"]["name"]
                raise InvalidInput(
                    f"{folder.path} has the result of another function or another version of it, {other}; use another "
                    "--runs, or delete that folder"
                )
            return stored
        if has_parameter(run, "folder"):
            taken["folder"] = folder.path
        where = get_environment(str(options["device"]).partition(":")[0])
        folder.start({**where, "function": function}, get_changes())
        started = time.perf_counter()
        result = run(recipe, **taken)
        if not isinstance(result, Mapping):
            name = function["name"]
            raise TypeError(f"{name} returned a {type(result).__name__}; it must return a dict of its metrics")
        if folder.run is not None:
            raise ValueError(f"{function['name']} wrote result.json, which is the worker's; use another name")
        seconds, plain = time.perf_counter() - started, to_json(**result)
        check_result(plain, metric)
        check_lock()
        folder.finish({"seconds": seconds, **plain})
    assert folder.run is not None
    return folder.run


def check_result(result: Mapping[str, Any], metric: str) -> None:
    """Raise a TypeError, KeyError or ValueError for a result that a sweep cannot choose by, before it is stored."""
    if used := [name for name in RESERVED if name in result]:
        raise ValueError(f"the run returned {', '.join(used)}, which the store uses itself; use another name")
    if result.get("status") != "diverged" and metric not in result:
        raise KeyError(f"the run has no {metric!r}, by which the sweep chooses; it has {', '.join(result)}")
    for name in (metric, "seconds"):
        value = result.get(name)
        if not isinstance(value, Real | None):
            raise TypeError(f"the run returned {name}={value!r}; it must be a number")


def describe_worker(run: Callable[..., Any] | None = None) -> dict[str, str]:
    """The name, process and code of this worker, also of the sweep's function `run`."""
    torch, python = strip_build(version("torch")), platform.python_version()
    code = {"commit": get_commit(), "mvngrad": __version__, "torch": torch, "python": python}
    if run is not None:
        code["function"] = " ".join(describe_function(run).values())
    return {"worker": f"{platform.node()}-{os.getpid()}", **describe_process(), **code}


def describe_code_differences(queue: Queue, me: dict[str, str]) -> list[str]:
    """How this worker's code differs from that of the sweep and of the runs in the store."""
    notes = queue.notes
    lines = [
        f"the sweep was made with {field} {notes[field]}, this worker has {me[field]}"
        for field in ("commit", "mvngrad")
        if notes.get(field, me[field]) != me[field]
    ]
    codes = [record.code for record in queue.records() if record.worker]
    for field in CODE:
        counts = Counter(code[field] for code in codes if field in code and code[field] != me.get(field))
        lines += [f"{n} runs are of {field} {value}, this worker has {me.get(field)}" for value, n in counts.items()]
    return lines


def run_worker(
    address: Address,
    name: str,
    sweep: Sweep,
    *,
    root: Path = ROOT,
    data: Path | None = None,
    device: str = "cpu",
    compile: bool = False,
    patience: float = PATIENCE,
    say: Say = print,
) -> Counter[str]:
    """Run what a sweep lacks until nothing is left, including runs of dead workers and later stages.

    Returns how many runs ended in which way. A run that diverges or raises is recorded with its reason, and the worker
    continues. While the disk is full or the store does not answer, also at the start, it waits for `patience` seconds.

    Raises:
        RetriesExhausted: waiting did not help.
        VersionMismatch: the store's recipes are of another version.
        KeyboardInterrupt: asked to stop; the current run has a checkpoint and is free for others.
        BrokenPipeError: standard output was closed; the current run is free for others.
    """
    forget_descriptions()  # attributes of an object may have changed since another worker of this process
    me, counts = describe_worker(sweep.run), Counter[str]()
    raised: list[str] = []  # the optimizers of the last consecutive runs that raised
    queue = call_with_retries(
        lambda: Queue(address, name, say, patience), lambda text: say(address.hide_passwords(text)), patience
    )
    # Absolute: a run may change the working directory.
    options = {"root": root.resolve(), "data": data, "device": device, "compile": compile}
    run = _get_run(sweep)
    claim: ClaimedTrial | None = None
    waits_for = ""
    try:
        _warn_of_differences(queue, sweep, me)
        while True:
            queue.requeue_silent()
            with defer_signals():
                claim = queue.claim(me, last=raised)
            if claim is None:
                more, waits_for = _find_work(queue, sweep, waits_for)
                if not more:
                    return counts
                continue
            record = claim.record
            queue.say(f"{record.key}: {describe_settings(record, queue.records())}")
            outcome, claim = run_claim(queue, claim, run, options), None
            counts[outcome["status"]] += 1
            raised = [*raised, record.optimizer] if outcome["status"] == "raised" else []
            if len(raised) == ERRORS_IN_A_ROW:
                raise NotPossible(
                    f"{ERRORS_IN_A_ROW} runs in a row raised an error, the last one {outcome['reason']}; this worker "
                    f"stops. Fix it, queue them again with `mvngrad sweep retry {name}`, and start it again"
                )
    except (KeyboardInterrupt, BrokenPipeError):
        if claim is not None:
            queue.release(claim)
        raise
    finally:
        queue.close()


def _get_run(sweep: Sweep) -> Callable[..., Any]:
    """The sweep's function, by default the training."""
    if sweep.run is not None:
        return sweep.run
    from mvngrad_lab.training.train import train  # imports torch

    return train


def _warn_of_differences(queue: Queue, sweep: Sweep, me: dict[str, str]) -> None:
    """Say how the grid and the code of this worker differ from those of the store."""
    grid = queue.grid
    if any(grid.get(stage) != keys for stage, keys in sweep.fixed_keys.items()):
        command = f"`mvngrad sweep init {queue.name}`"
        queue.say(f"warning: this code has another grid than the store; {command} would change it")
    for line in describe_code_differences(queue, me):
        queue.say(f"warning: {line}; results of different code are not comparable")


def _find_work(queue: Queue, sweep: Sweep, waits_for: str) -> tuple[bool, str]:
    """Queue runs for a worker that has none, or else wait for other workers.

    Returns whether there is more to do, and what the worker waits for; `waits_for` is what it waited for before.
    """
    if queue.requeue_ended():
        return True, waits_for
    if left := [record for record in queue.records() if record.status in ("waiting", "running")]:
        waits_for = _say_waiting(queue, left, waits_for)
        time.sleep(min(LONGEST_PAUSE, queue.heartbeat))
        return True, waits_for
    return bool(add_missing(queue, sweep)), waits_for


def _say_waiting(queue: Queue, left: list[Record], before: str) -> str:
    """Say which workers an idle worker waits for, if it did not say so before; returns what it says."""
    running = [f"{r.key} ({r.worker.get('worker', '?')})" for r in left if r.status == "running"]
    text = f"waits for {', '.join(running)}; a run is taken over after {queue.grace} s without a heartbeat"
    if running and text != before:
        queue.say(text)
    return text


def run_claim(queue: Queue, claim: ClaimedTrial, run: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Run a claimed recipe and record its outcome, whose status is finished, diverged, raised, busy or taken over."""
    record, started, began = claim.record, time.perf_counter(), timestamp("milliseconds")
    try:
        outcome, value = _run_recipe(queue, claim, run, options)
    except Locked as error:
        if _remove_dead_lock(queue, record, options["root"]):
            return run_claim(queue, claim, run, options)
        if not queue.release(claim, pause=queue.heartbeat):
            return _say_taken_over(queue, record)
        # The holder may be a worker that sent no heartbeat for a while and still runs: it may finish.
        queue.say(f"{record.key} is left for later: {error}")
        return {"status": "busy"}
    except (RetriesExhausted, VersionMismatch):
        queue.release(claim)
        raise
    except (Exception, SystemExit) as error:  # a function may call sys.exit, as argparse does
        if isinstance(error, BrokenPipeError) and is_stdout_closed():
            raise  # as by `head`: not the run's fault
        trace = "".join(traceback.format_exception(error)[-4:])
        outcome, value = {"status": "raised", "reason": f"{type(error).__name__}: {error}", "trace": trace}, None
    outcome |= {"began": began, "worker_seconds": time.perf_counter() - started}
    with defer_signals():
        recorded = queue.finish(claim, outcome, value)
    if not recorded:
        return _say_taken_over(queue, record)
    what = f"{queue.notes['metric']} {value:.6g}" if value is not None else f"{outcome['status']} ({outcome['reason']})"
    what += f", as stored in {options['root']}" if "code" in outcome else ""
    records = queue.records()
    queue.say(f"{record.key}: {describe_settings(record, records)}: {what}; {describe_progress(records)}")
    return outcome


def _run_recipe(
    queue: Queue, claim: ClaimedTrial, run: Callable[..., Any], options: dict[str, Any]
) -> tuple[dict[str, Any], float | None]:
    """Run a claimed recipe while heartbeats are sent; returns its outcome, and the metric's value if it is finite."""
    recipe, before = claim.record.recipe, read_run(options["root"] / claim.record.key)
    with queue.send_heartbeats(claim):
        metric = queue.notes["metric"]
        finished = call_with_retries(lambda: call_run(run, recipe, metric=metric, **options), queue.say, queue.patience)
    outcome, value = _make_outcome(finished, metric)
    if before is not None:  # finished by an earlier process, perhaps of other code, but of the same function
        outcome["code"] = {
            name: value for name, value in before.environment.items() if name in CODE and name != "function"
        }
    return outcome, value


def _say_taken_over(queue: Queue, record: Record) -> dict[str, Any]:
    queue.say(f"{record.key}: this worker sent no heartbeat for {queue.grace} s, so the run was queued again")
    return {"status": "taken over"}


def _remove_dead_lock(queue: Queue, record: Record, root: Path) -> bool:
    """Remove the lock of a worker on another machine that the store calls dead; False if it is of another process.

    The lock itself can judge processes of this machine alone. The store knows which worker was silent for longer than
    the grace. If that one wakes up, it finds its lock gone before it writes anything.
    """
    lock = root / record.key / LOCK_FILE
    try:
        text = lock.read_text(encoding="utf-8")
        owner = json.loads(text)
        host, pid = owner["host"], owner["pid"]
    except (OSError, ValueError, KeyError, TypeError):  # gone by now, or of another program
        return False
    dead = {r.worker.get("worker") for r in queue.records() if (r.key, r.status) == (record.key, "lost")}
    return host != platform.node() and f"{host}-{pid}" in dead and remove_lock(lock, text)


def _make_outcome(run: FinishedRun, metric: str) -> tuple[dict[str, Any], float | None]:
    """The outcome to record, and the value of the sweep's metric if it is finite."""
    plain = {name: value for name, value in run.result.items() if isinstance(value, int | float | str)}
    if run.result.get("status") == "diverged":
        reason = f", {', '.join(names)} not finite" if (names := run.result.get("nonfinite_metrics")) else ""
        where = f" at step {run.result['step']}" if "step" in run.result else ""
        return {**plain, "reason": f"diverged{where}{reason}"}, None
    check_result(run.result, metric)
    value = run.result[metric]
    if value is None or not math.isfinite(value):
        return {**plain, "status": "diverged", "reason": f"{metric} is not finite"}, None
    return {**plain, "status": "finished"}, float(value)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Hold back SIGTERM and SIGINT until the end of a block; a second one of a kind is not held back."""
    with catch_signals() as received:
        yield
    for number in received:
        signal.raise_signal(number)
