"""Several workers on one machine: a process each, dealt over its GPUs or sharing its cores."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TextIO

from mvngrad_lab.pool import count_cores
from mvngrad_lab.sweep.address import Address
from mvngrad_lab.sweep.signals import interrupt
from mvngrad_lab.sweep.worker import work


def crew(
    workers: int, address: Address, name: str, *, root: Path, data: Path | None, device: str, compile: bool
) -> bool:
    """Run `workers` workers to their end; whether all ended well, and none of their runs raised an error.

    Asked to stop, they write checkpoints first.

    The address goes to them through a pipe, so that no list of processes shows it.
    """
    signal.signal(signal.SIGTERM, interrupt)
    given = (address, name, root, data, device, compile)
    if workers == 1:
        return member(0, 1, *given)
    spawn = multiprocessing.get_context("spawn")
    members = [spawn.Process(target=_entry, args=(index, workers, *given)) for index in range(workers)]
    for each in members:
        each.start()
    try:
        for each in members:
            each.join()
    except KeyboardInterrupt:
        for each in members:
            each.terminate()
        for each in members:
            each.join()
        raise
    return all(each.exitcode == 0 for each in members)


def member(
    index: int, workers: int, address: Address, name: str, root: Path, data: Path | None, device: str, compile: bool
) -> bool:
    """Be worker `index` of so many; whether none of its runs raised an error."""
    if workers > 1:  # before torch is imported, which reads it once
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // workers)))
    done = work(
        address,
        name,
        root=root,
        data=data,
        device=_device(device, index),
        compile=compile,
        tell=lambda text: print(text, flush=True),
    )
    print("done, " + (", ".join(f"{count} {status}" for status, count in done.items()) or "nothing was left"))
    return not done["raised"]


class Prefixed(io.TextIOBase):
    """Lines that say who wrote them, also those of a training, which knows nothing of workers; each in one piece."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self.stream, self.prefix, self.begun = stream, prefix, ""

    def write(self, text: str) -> int:
        *lines, self.begun = (self.begun + text).split("\n")
        self.stream.write("".join(f"{self.prefix}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        self.stream.flush()


def _entry(index: int, workers: int, address: Address, *given: object) -> None:
    signal.signal(signal.SIGTERM, interrupt)
    try:
        with redirect_stdout(Prefixed(sys.stdout, f"worker {index + 1}: ")):
            well = member(index, workers, address, *given)  # type: ignore[arg-type]
        sys.exit(0 if well else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        print(address.scrubbed(f"worker {index + 1}: {error}"), file=sys.stderr)
        sys.exit(1)


def _device(device: str, index: int) -> str:
    if device == "cpu" or ":" in device:
        return device
    import torch

    count = torch.cuda.device_count()
    if count == 0 and device == "auto":
        return "cpu"
    if count == 0:
        raise ValueError("--device cuda: this torch sees no GPU; use --device cpu")
    return f"cuda:{index % count}"
