"""Where a sweep is kept, as a URL, and how to speak of it without its password."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

VARIABLE = "MVNGRAD_STORAGE"
DEFAULT = "sqlite:///sweeps.db"
REMEDY = "use sqlite:///FILE, or postgresql://USER@HOST/DATABASE with the password in PGPASSWORD or ~/.pgpass"


@dataclass(frozen=True, repr=False)
class Address:
    """A database. As text it has no password; only `url.render_as_string(hide_password=False)` has."""

    url: URL

    @property
    def embedded(self) -> bool:
        return self.url.get_backend_name() == "sqlite"

    @property
    def file(self) -> Path:
        """Of an embedded one."""
        return Path(self.url.database or "")

    def __str__(self) -> str:
        return self.url.set(query={}).render_as_string(hide_password=True)

    __repr__ = __str__

    @property
    def secrets(self) -> list[str]:
        """All passwords that the URL has, the server's and that of a key to it; the longest first."""
        asked = self.url.normalized_query.items()
        given = [
            self.url.password,
            *(value for name, values in asked if "password" in name.lower() for value in values),
        ]
        return sorted((str(secret) for secret in given if secret), key=len, reverse=True)

    def scrubbed(self, text: str) -> str:
        """`text` without passwords, in whatever way they are quoted: drivers and servers put what they got into errors.

        >>> address("postgresql://me:s3cr%2ft!@host/runs").scrubbed("no s3cr/t!, no s3cr%2Ft!, no s3cr%2ft%21")
        'no ***, no ***, no ***'
        """
        for secret in self.secrets:
            text = re.sub("".join(map(_written, secret)), "***", text)
        return text


def _written(character: str) -> str:
    """A pattern of all ways to write a character in a URL: each may be quoted or not, with letters of either case."""
    quoted = "".join(f"%{byte:02x}" for byte in character.encode())
    return f"(?:{re.escape(character)}|(?i:{quoted}){'|[+]' if character == ' ' else ''})"


def address(given: str | None = None) -> Address:
    """Of a URL; None is what MVNGRAD_STORAGE says, else a file in this folder.

    >>> address("postgresql://me:secret@host/runs")
    postgresql+psycopg://me:***@host/runs
    """
    text = given or os.environ.get(VARIABLE) or DEFAULT
    try:
        url = make_url(text)
        backend = url.get_backend_name()
    except (ArgumentError, ValueError):
        raise ValueError(f"the storage is not a URL; {REMEDY}") from None  # it may have a password: it is not repeated
    if backend in ("postgres", "postgresql"):
        return Address(url.set(drivername="postgresql+psycopg"))
    if backend != "sqlite":
        raise ValueError(f"storage of {backend} is not supported; {REMEDY}")
    if url.database in (None, "", ":memory:"):
        raise ValueError(f"storage={text!r} is in memory, where no other process finds it; use sqlite:///FILE")
    return Address(url)
