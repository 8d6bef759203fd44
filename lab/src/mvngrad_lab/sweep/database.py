"""The database of a sweep: its address without a password in sight, opening it for many processes, and retries."""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy import event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError, PendingRollbackError

from mvngrad_lab.errors import InvalidInput, MissingFile, NotPossible
from mvngrad_lab.store import DISK_FULL

T = TypeVar("T")
VARIABLE = "MVNGRAD_STORAGE"
DEFAULT = "sqlite:///sweeps.db"
FILE_SUFFIXES = (".db", ".sqlite", ".sqlite3")
REMEDY = "use sqlite:///FILE, or postgresql://USER@HOST/DATABASE with the password in PGPASSWORD or ~/.pgpass"

BUSY_SECONDS, CONNECT_SECONDS = 60.0, 10
"""How long to wait for another process's transaction, and for a server to answer."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds between two tries."""

NO_SPACE = ("disk is full", "No space left on device")
"""What SQLite and PostgreSQL say of a full disk."""
READ_ONLY = "readonly database"
"""What SQLite says if it may not write the file."""
NOT_WRITABLE = "{} cannot be written ({}); copy the file to a folder where you may write"
REFUSALS = ("no such table", "authentication failed", "does not exist", READ_ONLY)
"""What a store says if it answers, and would say again."""
DAMAGE = ("malformed", "not a database")
"""What SQLite says of a damaged file."""


class RetriesExhausted(NotPossible):
    """A transient error did not pass in the time that was given."""


class StoreUnavailable(ConnectionError):
    """A store could not be opened, because it does not answer or its disk is full."""


class DamagedStore(NotPossible):
    """The file of a store is no SQLite database, or a broken one."""


# Address


@dataclass(frozen=True, repr=False)
class Address:
    """The URL of a database. Its text has no password; only `url.render_as_string(hide_password=False)` has."""

    url: URL

    @property
    def is_sqlite(self) -> bool:
        return self.url.get_backend_name() == "sqlite"

    @property
    def file(self) -> Path:
        """The file of an SQLite database."""
        return Path(self.url.database or "")

    def __str__(self) -> str:
        return self.url.set(query={}).render_as_string(hide_password=True)

    __repr__ = __str__

    @property
    def passwords(self) -> list[str]:
        """All passwords in the URL, the server's and that of its key; the longest first."""
        query = self.url.normalized_query.items()
        given = [self.url.password, *(v for name, values in query if "password" in name.lower() for v in values)]
        return sorted((str(password) for password in given if password), key=len, reverse=True)

    def hide_passwords(self, text: str) -> str:
        """`text` without passwords, however they are quoted: drivers and servers repeat in errors what they were given.

        >>> parse_address("postgresql://me:s3cr%2ft!@host/a").hide_passwords("no s3cr/t!, no s3cr%2Ft!, no s3cr%2ft%21")
        'no ***, no ***, no ***'
        """
        for password in self.passwords:
            text = re.sub("".join(map(_spellings, password)), "***", text)
        return text


def _spellings(character: str) -> str:
    """A pattern of all ways to write a character in a URL: quoted or not, in either case."""
    quoted = "".join(f"%{byte:02x}" for byte in character.encode())
    return f"(?:{re.escape(character)}|(?i:{quoted}){'|[+]' if character == ' ' else ''})"


def parse_address(text: str | None = None) -> Address:
    """The address that a URL names; by default that of MVNGRAD_STORAGE, else a file in this folder.

    Raises InvalidInput, without repeating a URL that may have a password.

    >>> parse_address("postgresql://me:secret@host/runs")
    postgresql+psycopg://me:***@host/runs
    """
    text = text or os.environ.get(VARIABLE) or DEFAULT
    try:
        url = make_url(text)
        backend = url.get_backend_name()
    except (ArgumentError, ValueError):
        is_file = Path(text).suffix in FILE_SUFFIXES and not re.search("[:@]", text)  # so it has no password
        remedy = f"for the file {text} use sqlite:///{text}" if is_file else REMEDY
        raise InvalidInput(f"the storage is not a URL; {remedy}") from None
    if backend in ("postgres", "postgresql"):
        return Address(url.set(drivername="postgresql+psycopg"))
    if backend != "sqlite":
        raise InvalidInput(f"storage of {backend} is not supported; {REMEDY}")
    if url.database in (None, "", ":memory:"):
        raise InvalidInput(f"storage={text!r} is in memory, where other processes cannot reach it; use sqlite:///FILE")
    return Address(url)


# Opening


def open_database(address: Address, create: bool = False) -> RDBStorage:
    """Open the storage at an address; only `create` makes tables, because processes that do so at once fail.

    SQLite transactions start as writers (BEGIN IMMEDIATE, with the driver's own transactions off): with deferred ones,
    two processes could both read that a run is free. Transactions take milliseconds, so that all wait for their turn.
    The write-ahead log lets a dashboard or a copy read without waiting.

    PostgreSQL stores times in the session's zone, without naming it. Sessions are set to UTC, so that workers in
    different zones agree on how long another was silent.

    Raises MissingFile, IsADirectoryError, PermissionError, DamagedStore, StoreUnavailable if the server does not answer
    or the disk is full, or ConnectionError if the server refuses.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if address.is_sqlite:
        _check_file(address, create)
        options: dict[str, Any] = {"connect_args": {"isolation_level": None, "timeout": BUSY_SECONDS}}
    else:
        options = {"pool_pre_ping": True, "connect_args": {"connect_timeout": CONNECT_SECONDS}}
    url = address.url.render_as_string(hide_password=False)
    try:
        with translate_errors(address):
            storage = _make_storage(url.replace("{", "{{").replace("}", "}}"), options, create)  # optuna formats it
    except ImportError:
        raise NotPossible(f"{address} needs a driver: pip install 'mvngrad-lab[postgres]'") from None
    except (StorageInternalError, DBAPIError) as error:
        message = address.hide_passwords(f"{address}: {_database_message(error)}")
        if not address.is_sqlite and isinstance(error.__cause__, OperationalError):
            raise ConnectionError(message) from None
        raise MissingFile(f"there is no sweep in {message}; make one with `mvngrad sweep init`") from None
    if address.is_sqlite:
        event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        if create:
            with storage.engine.connect() as connection:
                connection.connection.cursor().execute("PRAGMA journal_mode=WAL")
    else:
        event.listen(storage.engine, "connect", _set_utc)
        storage.engine.dispose()  # of connections from before
    return storage


def _check_file(address: Address, create: bool) -> None:
    """Raise unless there is a file that may be read, or one is to be made; SQLite's own messages are unclear."""
    path = address.file
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file: sqlite:///{path}/sweeps.db")
    if path.exists():
        path.open("rb").close()
        if not all(os.access(each, os.W_OK) for each in (path, path.parent)):  # where SQLite makes files to read, too
            raise PermissionError(NOT_WRITABLE.format(address, "it or its folder is read-only"))
    elif not create:
        raise MissingFile(f"there is no sweep in {address}; make one with `mvngrad sweep init`")


@contextmanager
def translate_errors(address: Address) -> Iterator[None]:
    """Raise DamagedStore, PermissionError or StoreUnavailable for errors of the database that mean that."""
    try:
        yield
    except (StorageInternalError, DBAPIError) as error:
        message = _database_message(error)
        if address.is_sqlite and any(text in message for text in DAMAGE):
            raise DamagedStore(
                f"{address} is damaged, or not a store: {message}; restore a copy of the file, or use another storage"
            ) from None
        if address.is_sqlite and READ_ONLY in message:
            raise PermissionError(NOT_WRITABLE.format(address, message)) from None
        if (reason := describe_transient(error)) is not None:
            raise StoreUnavailable(address.hide_passwords(f"{address}: {reason}")) from None
        raise


def _database_message(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    return " ".join(str(getattr(cause, "orig", error)).split())


def _make_storage(url: str, options: dict[str, Any], create: bool) -> RDBStorage:
    """Another process may create the tables at this moment: then one of both fails, and finds them on its next try."""
    for _ in range(3 if create else 0):
        with suppress(StorageInternalError, DBAPIError):
            return RDBStorage(url, options)
        time.sleep(random.random())
    return RDBStorage(url, options, skip_table_creation=not create)


def _set_utc(connection: Any, record: Any) -> None:
    """By a statement and not by an option of the driver, which the variable PGTZ would override."""
    connection.execute("SET TIME ZONE 'UTC'")
    connection.commit()


# Retries


def describe_transient(error: BaseException) -> str | None:
    """The message for an error that may pass: a server that restarts, a disk that is full. None for all others."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return f"no space is left on the disk ({error})"
    if isinstance(error, StoreUnavailable):
        return str(error)
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    if isinstance(cause, PendingRollbackError):  # a second statement in a transaction whose connection broke
        return "the store went away"
    if not isinstance(cause, DBAPIError):
        return None
    message = _database_message(cause)
    if any(text in message for text in NO_SPACE):
        return f"no space is left on the disk of the store ({message})"
    if isinstance(cause, OperationalError | InterfaceError) and not any(text in message for text in REFUSALS):
        return f"the store does not answer ({message})"
    return f"the store went away ({message})" if cause.connection_invalidated else None


def call_with_retries(call: Callable[[], T], say: Callable[[str], object], patience: float) -> T:
    """Call until no transient error is raised, with growing waits, for `patience` seconds from the first one.

    A call that takes longer than `patience`, as a training may, starts the count again. What is called must be safe to
    call twice, because it may have had its effect before it failed. Raises RetriesExhausted if the error did not pass.
    """
    wait, deadline = FIRST_WAIT, math.inf
    while True:
        started = time.monotonic()
        try:
            return call()
        except Exception as error:
            reason, now = describe_transient(error), time.monotonic()
            if reason is None:
                raise
            if deadline == math.inf or now - started > patience:
                wait, deadline = FIRST_WAIT, now + patience
            if now + wait > deadline:
                raise RetriesExhausted(f"{reason}; gave up after {patience:g} s, and nothing is half-written") from None
            say(f"{reason}; trying again in {wait:g} s")
        time.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT)
