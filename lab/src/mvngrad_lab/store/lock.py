"""One process at a time in a run's folder: a file that says which, and that outlives no process of this machine.

A file made with O_EXCL and not a lock of the system, because those are lost or ignored on the network disks that runs
are often kept on. Who is thought dead and is not, and whose lock another process took, finds out by reading it.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from mvngrad_lab.errors import NotPossible

NAME = "lock"
TAKING = "lock.taking"
"""Held for an instant by who takes over the lock of a dead process, so that two cannot."""
Check: TypeAlias = Callable[[], None]
"""Raises `Locked` where the folder has become another process's; asked before each thing that is written there."""


class Locked(NotPossible):
    """Another process is at work in the folder."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[Check]:
    """Be the only process in `folder`, which is made where it is missing and removed again where it stays empty.

    The lock of a process that is no longer there is taken over; of processes on other machines that is not known. A
    process that was frozen cannot know that it was: what this yields is to be asked before it writes.

    Raises:
        Locked: by whom, and which file to delete if that is wrong.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock, pid = folder / NAME, os.getpid()
    owner = {
        "pid": pid,
        "host": platform.node(),
        "began": process_start(pid),
        "at": time.time(),
        "token": uuid.uuid4().hex,
    }
    mine = json.dumps(owner)
    if not _made(lock, mine):
        _take_over(folder, mine)

    def check() -> None:
        if _text(lock) != mine:
            raise Locked(f"{folder} was taken from this process, which was thought dead")

    try:
        yield check
    finally:
        if remove(lock, mine):
            with suppress(OSError):
                folder.rmdir()


def remove(lock: Path, text: str) -> bool:
    """Delete a lock if it still says `text`; whether it did. What says something else is of another process."""
    if _text(lock) != text:
        return False
    lock.unlink(missing_ok=True)
    return True


def _text(lock: Path) -> str | None:
    try:
        return lock.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def process_start(pid: int) -> str | None:
    """When a process of this machine began, "" where the system does not say; None where it is over.

    Numbers of processes are given again: a lock whose process began at another time is another's.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in ("Z", "X") else rest[18]
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # it is another user's
    return ""


def _made(path: Path, content: str) -> bool:
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(content)
    return True


def _take_over(folder: Path, mine: str) -> None:
    """Replace a lock whose process is over; only who holds `TAKING` may."""
    lock, taking = folder / NAME, folder / TAKING
    if not _made(taking, mine):
        raise Locked(f"{folder} is being taken over by another process; if none is there, delete {taking}")
    try:
        _remove_of_the_dead(lock)
        if not _made(lock, mine):
            raise Locked(f"{folder} was taken by another process just now; wait for it")
    finally:
        taking.unlink(missing_ok=True)


def _remove_of_the_dead(lock: Path) -> None:
    if (text := _text(lock)) is None:
        return
    try:
        found = json.loads(text)
        pid, host, since = found["pid"], found["host"], found["began"]
    except (ValueError, KeyError, TypeError):
        raise Locked(f"{lock} cannot be read: another process writes it, or died so; if none runs, delete it") from None
    if host != platform.node():
        raise Locked(f"{lock.parent} is in use by process {pid} on {host}; wait for it, or delete {lock} if it is gone")
    if process_start(pid) == since:
        raise Locked(f"{lock.parent} is in use by process {pid} on this machine; wait for it or stop it")
    # A process may have let go and ended since its lock was read; what stands here now is then of a living one.
    remove(lock, text)
