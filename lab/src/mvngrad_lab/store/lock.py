"""One process at a time in a run's folder: a lock file names it, and is replaced if that process has died.

The lock is a file and not a lock of the operating system, because those are lost or ignored on the network disks that
runs are often stored on. A suspended process that lost its lock notices by re-reading the file.
"""

from __future__ import annotations

import errno
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

LOCK_FILE = "lock"
"""In the folder: names the process that holds it."""
NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What file systems without hard links answer."""
TAKEOVER = "lock.taking"
"""Held for a moment by the process that replaces the lock of a dead one, so that only one does."""
Check: TypeAlias = Callable[[], None]
"""Raises `Locked` if the folder belongs to another process by now; called before each write to the folder."""


class Locked(NotPossible):
    """Another process works in the folder."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[Check]:
    """Be the only process in `folder`, which is created if it is missing and removed if it is empty at the end.

    The lock of a process of this machine that has ended is taken over. A suspended process cannot know that it lost
    its lock: it must call what this yields before it writes. Raises Locked, which names the other process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock, pid = folder / LOCK_FILE, os.getpid()
    owner = {"pid": pid, "host": platform.node(), "began": process_start(pid), "at": time.time()}
    mine = json.dumps({**owner, "token": uuid.uuid4().hex})
    if not _create(lock, mine):
        _take_over(folder, mine)

    def check_lock() -> None:
        if _read(lock) != mine:
            raise Locked(f"{folder} was taken by another process, because this one seemed dead")

    try:
        yield check_lock
    finally:
        if remove_lock(lock, mine):
            with suppress(OSError):
                folder.rmdir()


def remove_lock(lock: Path, text: str) -> bool:
    """Delete a lock file if it still contains `text`; returns whether it did."""
    if _read(lock) != text:
        return False
    lock.unlink(missing_ok=True)
    return True


def process_start(pid: int) -> str | None:
    """When a process of this machine started, "" if the system does not say; None if it has ended.

    Process ids are reused: a lock whose process started at another time is not that process's.
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
        pass  # another user's
    return ""


def _read(lock: Path) -> str | None:
    try:
        return lock.read_text(encoding="utf-8", errors="replace")  # the file may be of another program
    except FileNotFoundError:
        return None


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Give errors of the system the name of a file: those of a full disk have none, others that of a temporary file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not of the system
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _create(path: Path, text: str) -> bool:
    """Create a file with its content in one step; returns False if it exists. A full disk leaves no empty file."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with name_in_errors(path):
            draft.write_text(text, encoding="utf-8")
        try:
            os.link(draft, path)
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):
            draft.unlink()
    return True


def _take_over(folder: Path, mine: str) -> None:
    """Replace the lock of a process that has ended. Only the process that holds TAKEOVER may."""
    lock, takeover = folder / LOCK_FILE, folder / TAKEOVER
    if _read(takeover) == "":  # a full disk, on a file system without hard links
        takeover.unlink(missing_ok=True)
    if not _create(takeover, mine):
        raise Locked(f"{folder} is being taken over by another process; if there is none, delete {takeover}")
    try:
        _remove_dead(lock)
        if not _create(lock, mine):
            raise Locked(f"{folder} was taken by another process just now; wait for it")
    finally:
        takeover.unlink(missing_ok=True)


def _remove_dead(lock: Path) -> None:
    """Delete the lock of a process that has ended; raises Locked if it may still run. An empty lock has no owner."""
    text = _read(lock)
    if text:
        try:
            owner = json.loads(text)
            pid, host, started = owner["pid"], owner["host"], owner["began"]
        except (ValueError, KeyError, TypeError):
            raise Locked(f"{lock} is not a lock file of this program; if no process uses it, delete it") from None
        if host != platform.node():
            raise Locked(
                f"{lock.parent} is in use by process {pid} on {host}; wait for it, or delete {lock} if it has ended"
            )
        if process_start(pid) == started:
            raise Locked(f"{lock.parent} is in use by process {pid} on this machine; wait for it or stop it")
    if text is not None:
        remove_lock(lock, text)  # unless it is another process's by now
