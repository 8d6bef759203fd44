"""Processes of this machine: many small jobs on its cores, one process for each, signals, and a closed output."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, TypeVar

STDOUT = 1
Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    work: Callable[[Job], Result], jobs: Iterable[Job], workers: int, start: Callable[..., Any], *arguments: Any
) -> Iterator[tuple[Job, Result]]:
    """Yield each job with the result of `work`, in the order of completion. Each process first calls
    `start(*arguments)`; with one worker this process does the work.

    An exception of a job is raised here. After it, after Ctrl-C, or if this process dies, all workers end.
    """
    if workers < 2:
        start(*arguments)
        yield from ((job, work(job)) for job in jobs)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_init_worker, initargs=(start, arguments)) as pool:
        futures = {pool.submit(work, job): job for job in jobs}
        try:
            for done in as_completed(futures):
                yield futures[done], done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def count_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _init_worker(start: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent handles it
    call_after_parent(lambda: os._exit(1))
    torch.set_num_threads(1)
    start(*arguments)


def call_after_parent(act: Callable[[], object]) -> None:
    """Call `act` in a thread of this child process when its parent has ended, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        act()

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT in a list. The second signal of a kind is handled as before."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread can handle signals
        return
    before: dict[int, Any] = {}

    def handle(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, before[number])

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, handle)
    try:
        yield received
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def is_stdout_closed() -> bool:
    """Whether standard output is a pipe whose reader has gone."""
    watch = select.poll()
    watch.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in watch.poll(0))
