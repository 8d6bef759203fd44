"""The commands `mvngrad sweep ...`. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg, subcommand

from mvngrad_lab import store
from mvngrad_lab.cli.options import Data, Runs
from mvngrad_lab.experiments.sweeps.plans import SWEEPS

if TYPE_CHECKING:
    from mvngrad_lab.sweep.address import Address
    from mvngrad_lab.sweep.queue import Queue

Name = Annotated[
    Positional[str], arg(metavar="NAME", help=f"{', '.join(SWEEPS)}, or package.module:function of your own")
]
Storage = Annotated[
    str | None,
    arg(
        metavar="URL",
        help="sqlite:///FILE, or postgresql://USER@HOST/DATABASE",
        help_behavior_hint="(default: that of MVNGRAD_STORAGE, else sqlite:///sweeps.db)",
    ),
]


@dataclass
class Init:
    """Write a sweep's configurations to a store, and say what they will take. What is there already stays."""

    name: Name
    storage: Storage = None
    unequal: Annotated[bool, arg(help="optimizers may have different budgets", help_behavior_hint="")] = False
    heartbeat: Annotated[
        int | None,
        arg(
            metavar="SECONDS",
            help="between two signs of life of a worker",
            help_behavior_hint="(default: as the store has it, else 60)",
        ),
    ] = None
    grace: Annotated[
        int | None,
        arg(
            metavar="SECONDS",
            help="of silence, after which its run is another's",
            help_behavior_hint="(default: as the store has it, else 600)",
        ),
    ] = None

    def __call__(self) -> int:
        with _address(self.storage) as address:
            from mvngrad_lab.sweep.plan import init

            init(address, self.name, unequal=self.unequal, heartbeat=self.heartbeat, grace=self.grace)
        return 0


@dataclass
class Work:
    """Run what is left of a sweep; start it on as many devices and machines as you like, again after any stop."""

    name: Name
    storage: Storage = None
    workers: Annotated[int, arg(help="processes on this machine, dealt over its GPUs")] = 1
    data: Data = None
    runs: Runs = store.ROOT
    device: Annotated[Literal["auto", "cpu", "cuda"], arg(help="where to train")] = "auto"
    compile: Annotated[bool, arg(help="compile models first: a minute that long runs earn back")] = False
    slurm: Annotated[
        int, arg(metavar="JOBS", help="hand so many workers to SLURM instead, and return", help_behavior_hint="")
    ] = 0
    slurm_options: Annotated[
        tuple[str, ...],
        arg(metavar="KEY=VALUE", help="of submitit, as timeout_min=600 gpus_per_node=1", help_behavior_hint=""),
    ] = ()

    def __call__(self) -> int:
        if self.workers < 1:
            raise ValueError(f"workers={self.workers} is invalid; it must be at least 1")
        if self.slurm < 0:
            raise ValueError(f"slurm={self.slurm} is invalid; it is a number of jobs")
        if self.slurm and self.workers > 1:
            raise ValueError("--workers is for one machine; of jobs of SLURM, --slurm says how many")
        if self.slurm_options and not self.slurm:
            raise ValueError("--slurm-options is for --slurm JOBS, which is not given")
        if self.data is not None and not self.data.is_dir():
            raise FileNotFoundError(f"--data {self.data} is not a folder; name one that holds the data sets")
        given: dict[str, Any] = {"root": self.runs, "data": self.data, "device": self.device, "compile": self.compile}
        with _address(self.storage) as address:
            if self.slurm:
                from mvngrad_lab.sweep.cluster import submit

                jobs = submit(self.slurm, self.storage, self.name, options=self.slurm_options, **given)
                print(f"jobs {', '.join(job.job_id for job in jobs)}; their logs are in {self.runs / 'jobs'}")
                return 0
            from mvngrad_lab.sweep.crew import crew

            try:
                well = crew(self.workers, address, self.name, **given)
            except KeyboardInterrupt:
                print("Interrupted. What is done is kept; run the same command to go on.")
                return 130
        return 0 if well else 1


@dataclass
class Status:
    """Say how far a sweep is, what failed and why, and whether all runs are of one commit."""

    name: Annotated[Positional[str | None], arg(metavar="[NAME]", help="a sweep", help_behavior_hint="")] = None
    storage: Storage = None

    def __call__(self) -> int:
        with _address(self.storage) as address:
            from mvngrad_lab.sweep import export, queue

            for name in queue.names(address) if self.name is None else [self.name]:
                with _queue(address, name) as found:
                    print("\n".join(export.status(found)))
        return 0


@dataclass
class Select:
    """Say which configuration of each optimizer is best, by the metric that was named before."""

    name: Name
    storage: Storage = None

    def __call__(self) -> int:
        with _address(self.storage) as address, _queue(address, self.name) as queue:
            from mvngrad_lab.sweep.export import selection

            print("\n".join(selection(queue)))
        return 0


@dataclass
class Rerun:
    """Queue the selected configuration of each optimizer with more seeds. Then start workers."""

    name: Name
    storage: Storage = None
    seeds: Annotated[
        int | None, arg(help="of each, in all", help_behavior_hint="(default: as many as the paper has)")
    ] = None

    def __call__(self) -> int:
        with _address(self.storage) as address, _queue(address, self.name) as queue:
            from mvngrad_lab.sweep.plan import rerun

            seeds = queue.notes["seeds"] if self.seeds is None else self.seeds
            print(f"{len(rerun(queue, seeds))} runs are new; start `mvngrad sweep work {self.name}`")
        return 0


@dataclass
class Retry:
    """Queue again the runs that raised an error, after its cause is mended."""

    name: Name
    storage: Storage = None

    def __call__(self) -> int:
        with _address(self.storage) as address, _queue(address, self.name) as queue:
            from mvngrad_lab.sweep.plan import retry

            print(f"{len(retry(queue))} runs are queued again")
        return 0


@dataclass
class Export:
    """Write every run of a sweep to a file: configuration, status, metrics, seconds, worker, commit."""

    name: Name
    out: Annotated[Positional[Path], arg(metavar="FILE", help="a .json or .csv file")]
    storage: Storage = None

    def __call__(self) -> int:
        with _address(self.storage) as address, _queue(address, self.name) as queue:
            from mvngrad_lab.sweep.export import export

            print(f"{export(queue, self.out)} runs are in {self.out}")
        return 0


@dataclass
class SweepCommand:
    """Try many configurations on many processes, and choose by a metric that was named before."""

    command: (
        Annotated[Init, subcommand("init")]
        | Annotated[Work, subcommand("work")]
        | Annotated[Status, subcommand("status")]
        | Annotated[Select, subcommand("select")]
        | Annotated[Rerun, subcommand("rerun")]
        | Annotated[Retry, subcommand("retry")]
        | Annotated[Export, subcommand("export")]
    )

    def __call__(self) -> int:
        return self.command()


@contextmanager
def _address(storage: str | None) -> Iterator[Address]:
    """The store; errors from within do not name its password. Sweeps of the folder one stands in are found."""
    try:
        from mvngrad_lab.sweep.address import address
    except ModuleNotFoundError as error:
        raise RuntimeError(f"sweeps need {error.name}: pip install mvngrad-lab") from None
    sys.path.insert(0, "")
    found = address(storage)
    try:
        yield found
    except (ValueError, LookupError, OSError, RuntimeError) as error:
        raise RuntimeError(found.scrubbed(str(error))) from None


@contextmanager
def _queue(address: Address, name: str) -> Iterator[Queue]:
    from mvngrad_lab.sweep.queue import Queue

    queue = Queue(address, name)
    try:
        yield queue
    finally:
        queue.close()
