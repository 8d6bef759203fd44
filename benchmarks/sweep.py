"""What the sweep engine adds to a run: workers share a database and take runs that train nothing.

    python -m benchmarks.sweep [--runs N] [--workers 1 4 8] [--out results]

On an SQLite file and, if PostgreSQL is installed, on a temporary server. Writes results/engine.json and .md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.report import RESULTS, get_environment, markdown_table, write
from mvngrad_lab.pool import count_cores
from mvngrad_lab.recipe import Recipe
from mvngrad_lab.store import FinishedRun
from mvngrad_lab.sweep import Sweep
from mvngrad_lab.sweep.database import parse_address
from mvngrad_lab.sweep.grids import load_sweep
from mvngrad_lab.sweep.queue import Queue
from mvngrad_lab.sweep.stages import init_sweep
from mvngrad_lab.sweep.worker import run_worker

NAME = "benchmarks.sweep:null"
COUNT = "MVNGRAD_NULL_RUNS"
"""The environment variable with the number of configurations of `null`, which all processes read."""
TROUBLE = re.compile("does not answer|went away|no heartbeat|silent|later|seemed dead|warning", re.IGNORECASE)
INTRODUCTION = """\
Measured by `python -m benchmarks.sweep`. A run returns at once, so the time in a worker from the end of one run to the
start of the next is that of the engine: recording the result, looking for the next run, claiming it. *Of a run* is that
time, its median and quartiles; *95%* of all are below the next figure. *Runs a second* are of all workers together,
with nothing to train. *Errors* are messages of a worker about trouble, runs that raised an error, and runs that did not
finish exactly once."""


@dataclass(frozen=True)
class Null(Recipe):
    """A run that does nothing."""

    name: ClassVar[str] = "null"
    optimizer: str
    lr: float


def null() -> Sweep:
    """The same number of runs for each of two optimizers."""
    recipes = [Null(optimizer, float(at + 1)) for at in range(int(os.environ[COUNT]) // 2) for optimizer in "ab"]
    chosen = {"metric": "loss", "higher": False, "seconds": 0.0, "hardware": "nothing"}
    return Sweep(stages=(recipes,), run=run, **chosen)


MARKS: list[float] = []
"""The start times of the runs in this process; a run itself takes no time."""


def run(recipe: Null, **options: Any) -> FinishedRun:
    MARKS.append(time.perf_counter())
    return FinishedRun(recipe.key, recipe.name, recipe.settings, {}, {"loss": recipe.lr})


def _worker(url: str, root: Path, barrier: Any, messages: Any) -> None:
    """A worker process, which waits until all have started."""
    lines: list[str] = []
    barrier.wait()
    done = run_worker(parse_address(url), NAME, load_sweep(NAME), root=root, say=lines.append)
    trouble = sum(TROUBLE.search(line) is not None for line in lines) + done["raised"]
    marks = import_module("benchmarks.sweep").MARKS  # not of __main__, which a child process has under another name
    messages.put(([after - before for before, after in pairwise(marks)], trouble))


def measure(url: str, workers: int) -> dict[str, Any]:
    """Time all runs of a new sweep with this many workers."""
    spawn = multiprocessing.get_context("spawn")
    barrier, messages = spawn.Barrier(workers), spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        init_sweep(parse_address(url), NAME, load_sweep(NAME), heartbeat=1, say=lambda text: None)
        processes = [spawn.Process(target=_worker, args=(url, Path(folder), barrier, messages)) for _ in range(workers)]
        for process in processes:
            process.start()
        answers = [messages.get(timeout=600) for _ in processes]
        for process in processes:
            process.join()
    queue = Queue(parse_address(url), NAME)
    times = Counter(record.key for record in queue.records() if record.status == "finished")
    queue.close()
    runs = int(os.environ[COUNT])
    gaps = sorted(gap for gaps_of_worker, _ in answers for gap in gaps_of_worker)
    low, middle, high = statistics.quantiles(gaps, n=4)
    return {
        "workers": workers,
        "runs": runs,
        "milliseconds": 1e3 * middle,
        "milliseconds_quartiles": [1e3 * low, 1e3 * high],
        "milliseconds_95": 1e3 * statistics.quantiles(gaps, n=20)[-1],
        "runs_per_second": workers / statistics.fmean(gaps),
        "errors": sum(trouble for _, trouble in answers) + runs - sum(count == 1 for count in times.values()),
    }


@contextmanager
def sqlite() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"sqlite:///{folder}/sweeps.db"


@contextmanager
def postgresql() -> Iterator[str]:
    """A temporary server as in the tests: on the local disk, without fsync."""
    server = import_module("postgres").Server(import_module("postgres").binaries())
    try:
        yield server.url
    finally:
        server.remove()


def get_databases() -> dict[str, Any]:
    """The databases that are installed here, by name."""
    sys.path.append(str(RESULTS.parent / "lab" / "tests"))
    installed = import_module("postgres").binaries() is not None
    return {"SQLite": sqlite} | ({"PostgreSQL": postgresql} if installed else {})


def markdown(result: dict[str, Any]) -> str:
    where = ", ".join(f"{key} {value}" for key, value in result["environment"].items())
    head = ["store", "workers", "runs", "of a run, ms", "95%, ms", "runs a second", "errors"]
    body = []
    for row in result["rows"]:
        low, high = row["milliseconds_quartiles"]
        body.append([row["store"], str(row["workers"]), str(row["runs"])])
        body[-1] += [f"{row['milliseconds']:.0f} ({low:.0f}-{high:.0f})", f"{row['milliseconds_95']:.0f}"]
        body[-1] += [f"{row['runs_per_second']:.0f}", str(row["errors"])]
    title = f"# What the sweep engine adds to a run, on {result['environment']['cores']} cores"
    return "\n\n".join([title, INTRODUCTION, where, markdown_table(head, body)]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=96, help="runs for each number of workers (default 96)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args(arguments)
    os.environ[COUNT] = str(args.runs)
    rows = []
    for name, store in get_databases().items():
        for workers in args.workers:
            with store() as url:
                rows.append({"store": name, **measure(url, workers)})
    measured_on = get_environment("cpu") | {"cores": count_cores(), "optuna": version("optuna")}
    result = {"environment": measured_on, "rows": rows}
    write(result, args.out / "engine", markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
