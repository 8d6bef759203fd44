"""Optuna's storage, opened so that many processes can share it."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, OperationalError

from mvngrad_lab.sweep.address import Address
from mvngrad_lab.sweep.patience import Away, passing

TRIES = 3
BUSY = 60.0
"""Seconds to wait for another process's transaction."""
CONNECT = 10
"""Seconds to wait for a server to answer."""


def opened(address: Address, create: bool = False) -> RDBStorage:
    """The storage at an address; only `create` makes tables, because processes that do so at once fail.

    SQLite reads, and only then asks to write, so that two processes can both read that a run is free. Here every
    transaction asks to write at its beginning (with the driver's own transactions switched off), also one that will
    only read, for which Optuna has no other word: all wait for their turn, of milliseconds. The write-ahead log is for
    who looks on from outside, a dashboard or a copy, and waits for nobody.

    A server of PostgreSQL writes down the time of the session's zone, without the zone. Sessions here are in UTC, so
    that workers with different ones agree on who was silent for how long.

    Raises:
        FileNotFoundError: there is no sweep.
        Away: the server does not answer.
        ConnectionError: it does, and refuses.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    missing = FileNotFoundError(f"there is no sweep in {address}; make one with `mvngrad sweep init`")
    if address.embedded:
        if create:
            address.file.parent.mkdir(parents=True, exist_ok=True)
        elif not address.file.exists():
            raise missing
        options: dict[str, Any] = {"connect_args": {"isolation_level": None, "timeout": BUSY}}
    else:
        options = {"pool_pre_ping": True, "connect_args": {"connect_timeout": CONNECT}}
    url = address.url.render_as_string(hide_password=False)
    template = url.replace("{", "{{").replace("}", "}}")  # which optuna fills in
    try:
        storage = _made(template, options, create)
    except ImportError:
        raise RuntimeError(f"{address} needs a driver: pip install 'mvngrad-lab[postgres]'") from None
    except (StorageInternalError, DBAPIError) as error:
        if (reason := passing(error)) is not None:
            raise Away(address.scrubbed(f"{address}: {reason}")) from None
        said = " ".join(str(getattr(error.__cause__, "orig", error)).split())
        if not address.embedded and isinstance(error.__cause__, OperationalError):
            raise ConnectionError(address.scrubbed(f"{address}: {said}")) from None
        raise FileNotFoundError(address.scrubbed(f"{missing} ({said})")) from None
    if address.embedded:
        event.listen(storage.engine, "begin", _begin_to_write)
        if create:
            with storage.engine.connect() as connection:
                connection.connection.cursor().execute("PRAGMA journal_mode=WAL")
    else:
        event.listen(storage.engine, "connect", _in_utc)
        storage.engine.dispose()  # of connections from before
    return storage


def _made(url: str, options: dict[str, Any], create: bool) -> RDBStorage:
    """The tables may be made by another process at this moment: then one of both fails, and finds them soon after."""
    for _ in range(TRIES if create else 0):
        with suppress(StorageInternalError, DBAPIError):
            return RDBStorage(url, options)
        time.sleep(random.random())
    return RDBStorage(url, options, skip_table_creation=not create)


def _in_utc(connection: Any, record: Any) -> None:
    """Said to the server and not given to the driver, whose options would lose against the variable PGTZ."""
    connection.execute("SET TIME ZONE 'UTC'")
    connection.commit()


def _begin_to_write(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
