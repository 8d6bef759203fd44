"""Several workers at once: processes of this machine, on its GPUs or sharing its cores, or jobs of SLURM."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from mvngrad_lab.errors import InvalidInput, NotPossible, UserError
from mvngrad_lab.pool import call_after_parent, count_cores
from mvngrad_lab.sweep.database import VARIABLE, Address, parse_address
from mvngrad_lab.sweep.grids import Sweep
from mvngrad_lab.sweep.worker import check_taken, run_worker


class WorkerOptions(NamedTuple):
    """What all workers of a command have in common, as sent to their processes."""

    name: str
    """Of the sweep."""
    find_sweep: Callable[[str], Sweep]
    """Finds the sweep by its name: sweeps themselves may not be picklable."""
    root: Path
    data: Path | None
    device: str
    compile: bool


def run_local_workers(workers: int, address: Address, options: WorkerOptions) -> bool:
    """Run workers to their end; True if all ended well, and none of their runs raised an error.

    SIGTERM and Ctrl-C let them write checkpoints first. The address is sent through a pipe, so no list of processes
    shows its password.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    if workers == 1:
        return _run_one(0, 1, address, options)
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_run_process, args=(i, workers, address, options)) for i in range(workers)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join()
    except KeyboardInterrupt:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        raise
    for number, process in enumerate(processes, start=1):
        if (text := describe_killed(number, process.exitcode or 0)) is not None:
            print(text)
    return all(process.exitcode == 0 for process in processes)


def describe_killed(number: int, exit_code: int) -> str | None:
    """The message for a worker that was killed; None for one that ended by itself, and said why.

    >>> describe_killed(2, -9)
    'worker 2 was killed by SIGKILL; its run was left to the others'
    """
    if exit_code >= 0:
        return None
    return f"worker {number} was killed by {signal.Signals(-exit_code).name}; its run was left to the others"


def _run_one(index: int, workers: int, address: Address, options: WorkerOptions) -> bool:
    """Run one worker in this process; True if none of its runs raised an error."""
    if workers > 1:  # before torch is imported, which reads it once
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // workers)))
    sweep = options.find_sweep(options.name)
    asked = None if options.device == "auto" else options.device
    check_taken(sweep.run, data=options.data, device=asked, compile=options.compile)
    counts = run_worker(
        address,
        options.name,
        sweep,
        root=options.root,
        data=options.data,
        device=choose_device(options.device, index),
        compile=options.compile,
        say=lambda text: print(text, flush=True),
    )
    print("done, " + (", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing was left"))
    return not counts["raised"]


def _run_process(index: int, workers: int, address: Address, options: WorkerOptions) -> None:
    """Run one worker in a process of its own, and exit: with 0 if all went well, 130 after a signal, else 1."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    call_after_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))  # writes a checkpoint, and frees the run
    try:
        with PrefixedStream(sys.stdout, f"worker {index + 1}: ") as lines, redirect_stdout(lines):
            succeeded = _run_one(index, workers, address, options)
        sys.exit(0 if succeeded else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        is_bug = not isinstance(error, UserError | OSError)
        text = "".join(traceback.format_exception(error)) if is_bug else str(error)
        print(address.hide_passwords(f"worker {index + 1}: {text}"), file=sys.stderr)
        sys.exit(1)


class PrefixedStream(io.TextIOBase):
    """Writes whole lines with a prefix, also those of a training, which knows nothing of workers."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self.stream, self.prefix, self.started = stream, prefix, ""

    def write(self, text: str) -> int:
        *lines, self.started = (self.started + text).split("\n")
        self.stream.write("".join(f"{self.prefix}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def close(self) -> None:
        if self.started:  # a last line without an end
            self.write("\n")
        super().close()


def choose_device(device: str, index: int) -> str:
    """The device of worker `index`: one GPU after another, else the CPU."""
    if device == "cpu" or ":" in device:
        return device
    import torch

    count = torch.cuda.device_count()
    if count == 0 and device == "auto":
        return "cpu"
    if count == 0:
        raise InvalidInput("--device cuda: this torch sees no GPU; use --device cpu")
    return f"cuda:{index % count}"


def submit_jobs(
    jobs: int, storage: str | None, options: WorkerOptions, submitit_options: Sequence[str] = (), cluster: str = "slurm"
) -> list[Any]:
    """Submit `jobs` workers to a cluster, through submitit. A worker that is preempted has died: its run is free.

    `storage` is as on the command line; None is that of MVNGRAD_STORAGE, which jobs inherit. `cluster="local"` starts
    processes of this machine. Logs go to the folder jobs in `options.root`.
    """
    try:
        import submitit
    except ModuleNotFoundError:
        raise InvalidInput("jobs of SLURM need submitit: pip install 'mvngrad-lab[slurm]'") from None
    if storage is not None and parse_address(storage).passwords:
        raise InvalidInput(f"the storage's password would be in a job's files; put it into PGPASSWORD or {VARIABLE}")
    if wrong := [option for option in submitit_options if "=" not in option]:
        raise InvalidInput(f"slurm_options={wrong[0]!r} is not KEY=VALUE; name one as timeout_min=600")
    parameters = dict(option.split("=", 1) for option in submitit_options)
    options = options._replace(root=options.root.resolve())
    try:
        executor = submitit.AutoExecutor(folder=options.root / "jobs", cluster=cluster)
    except RuntimeError as error:  # there is no srun
        raise NotPossible(f"jobs of SLURM cannot be submitted here: {error}") from None
    executor.update_parameters(
        name=f"mvngrad-{options.name}",
        **{key: int(value) if value.isdecimal() else value for key, value in parameters.items()},
    )
    with executor.batch():
        return [executor.submit(_run_job, os.getcwd(), storage, options) for _ in range(jobs)]


def _run_job(folder: str, storage: str | None, options: WorkerOptions) -> bool:
    """Run one worker in the folder of the command, so that files and sweeps are found there."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    return run_local_workers(1, parse_address(storage), options)
