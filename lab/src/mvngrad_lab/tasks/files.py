"""Files of known content: looked for, verified, downloaded. What every data set needs and none should write again."""

from __future__ import annotations

import gzip
import hashlib
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from mvngrad_lab.store import FULL, chunks

FOLDER_VARIABLE = "MVNGRAD_DATA"
ATTEMPTS = 3
"""How often in a row a mirror is asked in vain; each attempt goes on where the one before broke off."""
PAUSE = 1.0
"""Seconds after the first attempt in vain, twice as many after the next."""
TIMEOUT = 30.0
"""Seconds without a byte until a transfer counts as broken off."""
Arrival = Callable[[int, "int | None"], Any]


@dataclass(frozen=True)
class KnownFile:
    """A file by what it holds once unpacked, so that it is the same file raw, gzipped, or gzipped again elsewhere."""

    name: str
    size: int
    sha256: str
    packed: bool = False
    """Whether size and checksum are those of the gzipped file itself, for an archive of which no others are known."""


class DamagedFile(ValueError):
    """A file does not hold what it should."""


class DownloadError(RuntimeError):
    """No mirror yielded a file."""


def sha256(path: Path) -> str:
    """Of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in chunks(file):
            found.update(chunk)
    return found.hexdigest()


def read(path: Path, known: KnownFile) -> bytearray:
    """What `path` holds, unpacked if it is gzipped; a DamagedFile error unless it is exactly the `known` file."""
    content = bytearray()
    verify(path, known, content.extend)
    return content


def verify(path: Path, known: KnownFile, take: Callable[[bytes], Any] = lambda chunk: None) -> None:
    """As `read`, but `take` is given the content as it comes: for a file that may be larger than memory."""
    with path.open("rb") as file:
        gzipped = not known.packed and file.read(2) == b"\x1f\x8b"
    size, digest, broken = 0, hashlib.sha256(), ""
    with gzip.open(path, "rb") if gzipped else path.open("rb") as stream:
        try:
            for chunk in chunks(stream):
                take(chunk)
                digest.update(chunk)
                size += len(chunk)
                if size > known.size:
                    break
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            broken = f" ({error})"
    if digest.hexdigest() != known.sha256:
        raise DamagedFile(
            f"{path} is not {known.name} as it was published: expected {known.size} bytes with sha256 {known.sha256}, "
            f"found {size} bytes with sha256 {digest.hexdigest()}{broken}. Delete it and download it again"
        )


def cache() -> Path:
    """Where data is if nobody names another folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mvngrad"


def home(folder: Path | None = None) -> Path:
    """Where downloads and tokens go: to `folder` or, if none is given, to that of MVNGRAD_DATA, or the cache."""
    path = Path(folder or os.environ.get(FOLDER_VARIABLE) or cache())
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{_asked(folder)} is not a folder; name one, which need not be there yet")
    return path


def target_folder(dataset: str, names: Sequence[str], folder: Path | None = None) -> Path:
    """Where a download goes: into a folder named after the data set or, if one of its files is there, beside it."""
    beside = home(folder)
    own = beside / dataset
    return next((place for place in (own, beside) if any((place / name).exists() for name in names)), own)


def places(dataset: str, folder: Path | None = None) -> list[Path]:
    """Where the files of a data set are looked for: in `folder` or, if none is given, in that of MVNGRAD_DATA and in
    the cache; in each, in a folder named after the data set and beside it. A named folder that does not exist is an
    error: falling back in silence would train on other data than was asked for.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    given = folder if folder is not None else named
    if given and not Path(given).is_dir():
        raise FileNotFoundError(f"{_asked(folder)} is not a folder; name one that holds {dataset}/ or its files")
    folders = [Path(given)] if given else []
    if folder is None:
        folders.append(cache())
    return [place for home in folders for place in (home / dataset, home)]


def _asked(folder: Path | None) -> str:
    if folder is not None:
        return f"{str(folder)!r}, given as --data or folder,"
    named = os.environ.get(FOLDER_VARIABLE)
    return f"{FOLDER_VARIABLE}={named}" if named else str(cache())


def find(dataset: str, files: Sequence[KnownFile], place: Path) -> list[Path] | None:
    """The paths of `files`, raw or with .gz, in one place; None if it has none, an error if it has only some."""
    choices = [[place / file.name, place / f"{file.name}.gz"] for file in files]
    found = [next((path for path in pair if path.is_file()), None) for pair in choices]
    missing = [file.name for file, path in zip(files, found, strict=True) if path is None]
    if missing and len(missing) < len(files):
        raise FileNotFoundError(f"{place} has some files of {dataset} but not {', '.join(missing)}")
    return None if missing else [path for path in found if path is not None]


def locate(dataset: str, files: Sequence[KnownFile], folder: Path | None = None) -> list[Path] | None:
    """Where the `files` of a data set lie; None if they are nowhere, but an error if `folder` was to have them."""
    for place in places(dataset, folder):
        if (found := find(dataset, files, place)) is not None:
            return found
    if folder is not None:
        raise FileNotFoundError(f"{folder} has no files of {dataset}: {', '.join(file.name for file in files)}")
    return None


def fetch(urls: Sequence[str], target: Path, known: KnownFile) -> None:
    """Download `target` from the first of `urls` that yields the `known` file; one that is there, also if unpacked, is
    verified and kept.

    Nothing stands under the name `target` before it is verified. What has arrived is kept beside it as .part, so that
    a transfer that broke off, also one of an earlier process, goes on where it stopped.
    """
    for path in (target.with_name(known.name), target):
        if path.exists():
            verify(path, known)
            return
    part = target.with_name(f"{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    failures: dict[str, None] = {}  # each is said once
    most = _size(part)
    for url in urls:
        in_vain = 0
        while in_vain < ATTEMPTS:
            if in_vain:
                time.sleep(PAUSE * 2 ** (in_vain - 1))
            resumed = part.exists()
            try:
                _transfer(url, part)
                verify(part, known)
            except DamagedFile as error:
                failures[f"{url}: {error}"] = None
                part.unlink()
                if not resumed:  # else what was kept may be at fault: once more, from the start
                    break
            except HTTPError as error:
                failures[f"{url}: {error}"] = None
                error.close()
                if error.code != 416:
                    break
                part.unlink(missing_ok=True)  # more was kept than the file has
            except (OSError, HTTPException) as error:
                if isinstance(error, OSError) and error.filename is not None:  # of the disk, not of the network
                    raise
                failures[f"{url}: {error}"] = None
            else:
                part.replace(target)
                return
            in_vain = 0 if _size(part) > most else in_vain + 1
            most = max(most, _size(part))
    remedy = f"Try again, or put {target.name} into {target.parent}"
    raise DownloadError("\n".join([f"{target.name} could not be downloaded.", *failures, remedy]))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have the error of a disk that is full name the file that was written: by itself it does not."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


_listeners: list[Arrival] = []


@contextmanager
def heard(listen: Arrival) -> Iterator[None]:
    """Have `listen` told of what arrives meanwhile, whoever downloads it: bytes so far, and of how many, if known."""
    _listeners.append(listen)
    try:
        yield
    finally:
        _listeners.remove(listen)


def _transfer(url: str, part: Path) -> None:
    """Append to `part` what it lacks of `url`, or write it anew where the server cannot start in the middle."""
    kept = _size(part)
    request = Request(url, headers={"Range": f"bytes={kept}-"} if kept else {})
    with urlopen(request, timeout=TIMEOUT) as response:
        if response.status != 206:
            kept = 0
        announced = response.headers.get("Content-Length")
        with naming(part), part.open("ab" if kept else "wb") as out:
            for piece in chunks(response):
                out.write(piece)
                for listen in _listeners:
                    listen(out.tell(), None if announced is None else kept + int(announced))
            arrived = out.tell() - kept
        if announced is not None and arrived < int(announced):  # urllib takes a closed connection for the end
            raise ConnectionError(f"the connection closed after {arrived} of {announced} bytes")
