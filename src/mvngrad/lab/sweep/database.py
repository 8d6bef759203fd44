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
from sqlalchemy.exc import DBAPIError

from mvngrad.lab.sweep.address import Address
from mvngrad.lab.sweep.patience import passing

TRIES = 3
BUSY = 60.0
"""Seconds to wait for another process's transaction."""
CONNECT = 10
"""Seconds to wait for a server to answer."""


def opened(address: Address, create: bool = False) -> RDBStorage:
    """The storage at an address; only `create` makes tables, because processes that do so at once fail.

    SQLite reads, and only then asks to write, so that two processes can both read that a run is free. Here every
    transaction asks to write at its beginning (with the driver's own transactions switched off), and readers of the
    write-ahead log wait for nobody.

    Raises:
        FileNotFoundError: there is no sweep.
        ConnectionError: the server does not answer.
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
        raise RuntimeError(f"{address} needs a driver: pip install 'psycopg[binary]'") from None
    except (StorageInternalError, DBAPIError) as error:
        if (reason := passing(error)) is not None:
            raise ConnectionError(address.scrubbed(f"{address}: {reason}")) from None
        said = " ".join(str(getattr(error.__cause__, "orig", error)).split())
        raise FileNotFoundError(address.scrubbed(f"{missing} ({said})")) from None
    if address.embedded:
        event.listen(storage.engine, "begin", _begin_to_write)
        if create:
            with storage.engine.connect() as connection:
                connection.connection.cursor().execute("PRAGMA journal_mode=WAL")
    return storage


def _made(url: str, options: dict[str, Any], create: bool) -> RDBStorage:
    """The tables may be made by another process at this moment: then one of both fails, and finds them soon after."""
    for _ in range(TRIES if create else 0):
        with suppress(StorageInternalError, DBAPIError):
            return RDBStorage(url, options)
        time.sleep(random.random())
    return RDBStorage(url, options, skip_table_creation=True)


def _begin_to_write(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
