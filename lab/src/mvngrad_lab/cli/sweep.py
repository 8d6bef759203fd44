"""The commands `mvngrad sweep ...`. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, arg

from mvngrad_lab import store
from mvngrad_lab.cli.options import Data, Runs, make_runs_folder
from mvngrad_lab.errors import InvalidInput, MissingFile, NotPossible, UserError
from mvngrad_lab.experiments.sweeps import find_sweep, find_sweeps
from mvngrad_lab.pool import count_cores

if TYPE_CHECKING:
    from mvngrad_lab.sweep.database import Address
    from mvngrad_lab.sweep.grids import Sweep
    from mvngrad_lab.sweep.queue import Queue

WORKERS_PER_CORE = 16
"""The largest number of workers for each core; each is a process that imports torch."""
URLS: dict[str, str] = {}
"""Storage URLs of this command as they are shown -> with their passwords."""


def hide_passwords(arguments: Sequence[str]) -> list[str]:
    """The arguments without passwords of URLs, so that no message can repeat them; `_open_address` knows the URLs.

    >>> hide_passwords(["sweep", "init", "postgresql://me:secret@host/runs?sslpassword=other"])
    ['sweep', 'init', 'postgresql://me:***@host/runs?sslpassword=***']
    """
    URLS.clear()
    shown = []
    for argument in arguments:
        text = re.sub(r"(://[^:/@]*:).*@", r"\1***@", argument)
        text = re.sub(r"(?i)(\b\w*password=)[^&]*", r"\1***", text) if "://" in text else text
        prefix = "--storage=" if text.startswith("--storage=") else ""
        URLS[text.removeprefix(prefix)] = argument.removeprefix(prefix)
        shown.append(text)
    return shown


Name = Annotated[
    Positional[str], arg(metavar="NAME", help=f"{', '.join(find_sweeps())}, or package.module:function of your own")
]
Storage = Annotated[
    str | None,
    arg(
        metavar="URL",
        help="sqlite:///FILE, or postgresql://USER@HOST/DATABASE",
        help_behavior_hint="(default: that of MVNGRAD_STORAGE, else sqlite:///sweeps.db)",
    ),
]


def _seconds(help: str, default: int) -> Any:
    return arg(metavar="SECONDS", help=help, help_behavior_hint=f"(default: as the store has it, else {default})")


@dataclass
class Init:
    """Write a sweep's configurations to a store, and say what they will take. What is there already stays."""

    examples: ClassVar[tuple[str, ...]] = ("mvngrad sweep init mnist-5k", "mvngrad sweep init package.module:function")

    name: Name
    storage: Storage = None
    unequal: Annotated[bool, arg(help="optimizers may have different budgets", help_behavior_hint="")] = False
    heartbeat: Annotated[int | None, _seconds("between two heartbeats of a worker", 60)] = None
    grace: Annotated[int | None, _seconds("without a heartbeat until another worker takes the run", 600)] = None

    def __call__(self) -> int:
        with _open_address(self.storage) as address:
            from mvngrad_lab.sweep.stages import init_sweep

            sweep, pace = find_sweep(self.name), {"heartbeat": self.heartbeat, "grace": self.grace}
            init_sweep(address, self.name, sweep, unequal=self.unequal, say=print, **pace)
        return 0


@dataclass
class Work:
    """Run what is left of a sweep; start it on as many devices and machines as you like, again after any stop."""

    examples: ClassVar[tuple[str, ...]] = ("mvngrad sweep work mnist-5k --workers 2",)

    name: Name
    storage: Storage = None
    workers: Annotated[int, arg(help="processes on this machine, distributed over its GPUs")] = 1
    data: Data = None
    runs: Runs = store.ROOT
    device: Annotated[Literal["auto", "cpu", "cuda"], arg(help="where to train")] = "auto"
    compile: Annotated[bool, arg(help="compile models first: a minute that long runs earn back")] = False
    slurm: Annotated[
        int, arg(metavar="JOBS", help="submit so many workers to SLURM instead, and return", help_behavior_hint="")
    ] = 0
    slurm_options: Annotated[
        tuple[str, ...],
        arg(metavar="KEY=VALUE", help="of submitit, as timeout_min=600 gpus_per_node=1", help_behavior_hint=""),
    ] = ()

    def __call__(self) -> int:
        most = WORKERS_PER_CORE * count_cores()
        if not 1 <= self.workers <= most:
            raise InvalidInput(
                f"workers={self.workers} is invalid; it must be at least 1, and at most {most} on this machine, "
                f"{WORKERS_PER_CORE} for each core"
            )
        if self.slurm < 0:
            raise InvalidInput(f"slurm={self.slurm} is invalid; it is a number of jobs")
        if self.slurm and self.workers > 1:
            raise InvalidInput("--workers is for one machine; of jobs of SLURM, --slurm says how many")
        if self.slurm_options and not self.slurm:
            raise InvalidInput("--slurm-options is for --slurm JOBS, which is missing")
        if self.data is not None and not self.data.is_dir():
            raise MissingFile(f"--data {self.data} is not a folder; name one that holds the data sets")
        make_runs_folder(self.runs)
        with _open_address(self.storage) as address:
            from mvngrad_lab.sweep.local_workers import WorkerOptions, run_local_workers, submit_jobs

            options = WorkerOptions(self.name, find_sweep, self.runs, self.data, self.device, self.compile)
            if self.slurm:
                jobs = submit_jobs(self.slurm, _get_url(self.storage), options, self.slurm_options)
                print(f"jobs {', '.join(job.job_id for job in jobs)}; their logs are in {self.runs / 'jobs'}")
                return 0
            try:
                return 0 if run_local_workers(self.workers, address, options) else 1
            except KeyboardInterrupt:
                print("Interrupted. What is done is kept; run the same command to continue.")
                return 130


@dataclass
class Status:
    """Say how far a sweep is, what failed and why, and whether all runs are of one commit."""

    examples: ClassVar[tuple[str, ...]] = ("mvngrad sweep status", "mvngrad sweep status mnist-5k")

    name: Annotated[Positional[str | None], arg(metavar="[NAME]", help="a sweep", help_behavior_hint="")] = None
    storage: Storage = None

    def __call__(self) -> int:
        with _open_address(self.storage) as address:
            from mvngrad_lab.sweep.queue import get_sweep_names
            from mvngrad_lab.sweep.summary import describe_status

            for name in get_sweep_names(address) if self.name is None else [self.name]:
                with _open_queue(address, name) as queue:
                    print("\n".join(describe_status(queue)))
        return 0


@dataclass
class QueueCommand:
    """Do something with a sweep that `init` wrote, and say what."""

    examples: ClassVar[tuple[str, ...]] = ()

    name: Name
    storage: Storage = None

    def __call__(self) -> int:
        with _open_address(self.storage) as address, _open_queue(address, self.name) as queue:
            print(self.act(queue, find_sweep(self.name)))
        return 0

    def act(self, queue: Queue, sweep: Sweep) -> str:
        raise NotImplementedError


@dataclass
class Select(QueueCommand):
    """Say which configuration of each optimizer is best, by the metric that was named before."""

    examples: ClassVar[tuple[str, ...]] = ("mvngrad sweep select mnist-5k",)

    def act(self, queue: Queue, sweep: Sweep) -> str:
        from mvngrad_lab.sweep.summary import describe_selection

        return "\n".join(describe_selection(queue))


@dataclass
class Rerun(QueueCommand):
    """Queue the selected configuration of each optimizer with more seeds. Then start workers."""

    examples: ClassVar[tuple[str, ...]] = ("mvngrad sweep rerun mnist-5k --seeds 5",)

    seeds: Annotated[
        int | None, arg(help="of each, in all", help_behavior_hint="(default: as many as the sweep names, mostly 3)")
    ] = None

    def act(self, queue: Queue, sweep: Sweep) -> str:
        from mvngrad_lab.sweep.stages import add_seeds

        new = add_seeds(queue, sweep, queue.notes["seeds"] if self.seeds is None else self.seeds)
        return f"{len(new)} runs are new; start `mvngrad sweep work {self.name}`"


@dataclass
class Retry(QueueCommand):
    """Queue again the runs that raised an error, after its cause is fixed."""

    examples: ClassVar[tuple[str, ...]] = ("mvngrad sweep retry mnist-5k",)

    def act(self, queue: Queue, sweep: Sweep) -> str:
        from mvngrad_lab.sweep.stages import requeue_errors

        return f"{len(requeue_errors(queue))} runs are queued again"


@dataclass
class Export(QueueCommand):
    """Write every run of a sweep to a file: configuration, status, metrics, seconds, worker, commit."""

    examples: ClassVar[tuple[str, ...]] = ("mvngrad sweep export mnist-5k runs/sweep-mnist-5k.json",)

    out: Annotated[Positional[Path], arg(metavar="FILE", help="a .json or .csv file")] = field(kw_only=True)

    def act(self, queue: Queue, sweep: Sweep) -> str:
        from mvngrad_lab.sweep.summary import export

        return f"{export(queue, self.out)} runs are in {self.out}"


@dataclass
class Sweeps:
    """Try many configurations on many processes, and choose by a metric that was named before."""

    examples: ClassVar[tuple[str, ...]] = (
        "mvngrad sweep init mnist-5k",
        "mvngrad sweep work mnist-5k --workers 2",
        "mvngrad sweep select mnist-5k",
    )
    commands: ClassVar[dict[str, Any]] = {
        "init": Init,
        "work": Work,
        "status": Status,
        "select": Select,
        "rerun": Rerun,
        "retry": Retry,
        "export": Export,
    }


def _get_url(storage: str | None) -> str | None:
    """The URL with its password, as it was given on the command line."""
    return None if storage is None else URLS.get(storage, storage)


@contextmanager
def _open_address(storage: str | None) -> Iterator[Address]:
    """The store's address; errors inside do not name its password. Sweeps in the current folder are importable."""
    try:
        from mvngrad_lab.sweep.database import parse_address
    except ModuleNotFoundError as error:
        raise NotPossible(f"sweeps need {error.name}: pip install mvngrad-lab") from None
    sys.path.insert(0, "")
    address = parse_address(_get_url(storage))
    try:
        yield address
    except BrokenPipeError:
        raise
    except Exception as error:
        text = address.hide_passwords(str(error))
        if isinstance(error, UserError | OSError) or text != str(error):
            raise NotPossible(text) from None
        raise


@contextmanager
def _open_queue(address: Address, name: str) -> Iterator[Queue]:
    from mvngrad_lab.sweep.queue import Queue

    try:
        queue = Queue(address, name)
    except MissingFile as error:
        raise MissingFile(f"no sweep {name!r}: {error}") from None
    try:
        yield queue
    finally:
        queue.close()
