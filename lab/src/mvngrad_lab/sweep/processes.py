"""Which process a worker is, so that others of its machine see at once that it is over."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mvngrad_lab.store.lock import process_start


def process() -> dict[str, str]:
    """This process among all. Names of machines may repeat, and containers of one machine have numbers of their own."""
    return {"machine": _machine(), "pid": str(os.getpid()), "began": process_start(os.getpid()) or ""}


def over(worker: dict[str, str]) -> bool:
    """Whether a worker was a process of this machine and is one no longer; of all others it is not known."""
    here = _machine()
    if not here or worker.get("machine") != here:
        return False
    return (process_start(int(worker["pid"])) or "") != worker["began"]


def _machine() -> str:
    """Its kernel since it booted, and the numbers of processes this one sees; nothing where there is no /proc."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""
