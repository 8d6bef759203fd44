"""Many small trainings on the cores of one machine: a process each, of one thread."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    work: Callable[[Job], Result], jobs: Iterable[Job], workers: int, start: Callable[..., None], *given: Any
) -> Iterator[tuple[Job, Result]]:
    """Each job with what `work` makes of it, as they finish. `start(*given)` is called first in every process.

    One worker is this process itself. An error in a job is raised here. After it, after Ctrl-C, or if this process
    dies, no worker goes on.
    """
    if workers < 2:
        start(*given)
        yield from ((job, work(job)) for job in jobs)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_begin, initargs=(start, given)) as pool:
        waiting = {pool.submit(work, job): job for job in jobs}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def count_cores() -> int:
    """How many may be used."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin(start: Callable[..., None], given: tuple[Any, ...]) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the first process decides
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_outlived, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    start(*given)


def _outlived(parent: Any) -> None:
    parent.join()
    os._exit(1)
