"""What passes if one waits: a server that restarts, a disk that is full."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, PendingRollbackError

from mvngrad_lab.store import DISK_FULL

T = TypeVar("T")
FIRST, LONGEST = 0.5, 30.0
"""Seconds of the first wait and of the longest."""


NO_SPACE = ("disk is full", "No space left on device")
"""What SQLite and a server of PostgreSQL say of a full disk."""
REFUSED = ("no such table", "authentication failed", "does not exist")
"""What a store says that answers, and would say again."""


class GaveUp(RuntimeError):
    """It did not pass in the time that was given."""


class Away(ConnectionError):
    """A store could not be opened, because it does not answer or its disk is full."""


def passing(error: BaseException) -> str | None:
    """What to say of an error that may pass; None of all others."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return f"no space is left on the disk ({error})"
    if isinstance(error, Away):
        return str(error)
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    if isinstance(cause, PendingRollbackError):  # a second question in a transaction whose connection broke
        return "the store went away"
    if not isinstance(cause, DBAPIError):
        return None
    said = " ".join(str(cause.orig).split())
    if any(text in said for text in NO_SPACE):
        return f"no space is left on the disk of the store ({said})"
    if isinstance(cause, OperationalError | InterfaceError) and not any(text in said for text in REFUSED):
        return f"the store does not answer ({said})"
    return f"the store went away ({said})" if cause.connection_invalidated else None


def patiently(call: Callable[[], T], tell: Callable[[str], None], patience: float) -> T:
    """Call until nothing that passes is in the way, with longer and longer waits, for `patience` seconds from the
    first time that something was; a call that lasted longer than that, as a training may, is such a first time too.

    What is called must be safe to call again where it is not known whether it was done.
    """
    wait, until = FIRST, math.inf
    while True:
        began = time.monotonic()
        try:
            return call()
        except Exception as error:
            reason, now = passing(error), time.monotonic()
            if reason is None:
                raise
            if until == math.inf or now - began > patience:
                wait, until = FIRST, now + patience
            if now + wait > until:
                raise GaveUp(f"{reason}; gave up after {patience:g} s, and nothing is half-written") from None
            tell(f"{reason}; trying again in {wait:g} s")
        time.sleep(wait)
        wait = min(2 * wait, LONGEST)
