"""Workers as jobs of SLURM, through submitit: each is as on any other machine, in a process that the cluster starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from mvngrad_lab.sweep.address import VARIABLE, address
from mvngrad_lab.sweep.crew import crew


def submit(
    jobs: int, storage: str | None, name: str, *, options: Sequence[str] = (), cluster: str = "slurm", **given: Any
) -> list[Any]:
    """Hand `jobs` workers to a cluster; submitit's jobs. A worker that is preempted is one that died: its run is free.

    Args:
        jobs: how many.
        storage: as on the command line; None is that of MVNGRAD_STORAGE, which jobs inherit.
        name: of the sweep.
        options: KEY=VALUE for submitit: timeout_min=600, gpus_per_node=1, slurm_partition=gpu.
        cluster: "slurm", or "local" for processes of this machine.
        given: root, data, device and compile, as for `crew`; logs go to root/jobs.
    """
    try:
        import submitit
    except ModuleNotFoundError:
        raise ValueError("jobs of SLURM need submitit: pip install 'mvngrad-lab[slurm]'") from None
    if storage is not None and address(storage).secrets:
        raise ValueError(f"the storage's password would be in the files of a job; put it into PGPASSWORD or {VARIABLE}")
    wrong = [option for option in options if "=" not in option]
    if wrong:
        raise ValueError(f"slurm_options={wrong[0]!r} is not KEY=VALUE; name one as timeout_min=600")
    root = given["root"].resolve()
    executor = submitit.AutoExecutor(folder=root / "jobs", cluster=cluster)
    parameters = dict(option.split("=", 1) for option in options)
    executor.update_parameters(name=f"mvngrad-{name}", **{key: _number(value) for key, value in parameters.items()})
    here = os.getcwd()
    with executor.batch():
        return [executor.submit(job, here, storage, name, {**given, "root": root}) for _ in range(jobs)]


def job(folder: str, storage: str | None, name: str, given: dict[str, Any]) -> bool:
    """One worker; from the folder that the command was given in, so that files and sweeps are found where it says."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    return crew(1, address(storage), name, **given)


def _number(value: str) -> int | str:
    return int(value) if value.isdecimal() else value
