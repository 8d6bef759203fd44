"""Data files of known content: find them in local folders, verify them, download them.

Downloads use requests. pooch, which is built on it, has no resuming, which an archive of 12.9 GB needs, and no mirrors,
and replaces a damaged file without a word.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from mvngrad_lab.errors import InvalidInput, MissingFile, NotPossible
from mvngrad_lab.store import DISK_FULL, read_chunks

FOLDER_VARIABLE = "MVNGRAD_DATA"
ATTEMPTS = 3
"""Attempts in a row without progress after which a mirror is given up."""
PAUSE = 1.0
"""Seconds before the second attempt; doubled before each further one."""
TIMEOUT = 30.0
"""Seconds without a byte after which a transfer has failed."""
CHUNK_BYTES = 1 << 16
"""Written at a time; a chunk that is interrupted is lost."""
OnProgress: TypeAlias = Callable[[int, "int | None"], Any]
"""Called with the bytes done so far and the total, None if unknown."""


@dataclass(frozen=True)
class KnownFile:
    """A file identified by its unpacked content, so that raw and gzipped copies count as the same file.

    If its name ends in .gz, size and sha256 are those of the packed file, because only these are published.
    """

    name: str
    size: int
    sha256: str


class DamagedFile(InvalidInput):
    """A file does not have the expected content."""


class DownloadError(NotPossible):
    """No mirror delivered a file."""


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in read_chunks(file):
            digest.update(chunk)
    return digest.hexdigest()


def verify(path: Path, known: KnownFile, take: Callable[[bytes], Any] = lambda chunk: None) -> None:
    """Raise DamagedFile unless `path`, raw or gzipped, is the `known` file. `take` receives the content in chunks."""
    with path.open("rb") as file:
        gzipped = not known.name.endswith(".gz") and file.read(2) == b"\x1f\x8b"
    size, digest, reason = 0, hashlib.sha256(), ""
    with gzip.open(path, "rb") if gzipped else path.open("rb") as stream:
        try:
            for chunk in read_chunks(stream):
                take(chunk)
                digest.update(chunk)
                size += len(chunk)
                if size > known.size:
                    break
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            reason = f" ({error})"
    if digest.hexdigest() != known.sha256:
        raise DamagedFile(
            f"{path} is not {known.name} as published: expected {known.size} bytes with sha256 {known.sha256}, "
            f"got {size} bytes with sha256 {digest.hexdigest()}{reason}. Delete it and download it again"
        )


def read_verified(path: Path, known: KnownFile) -> bytearray:
    """The content of `path`, unpacked; raises DamagedFile unless it is the `known` file."""
    content = bytearray()
    verify(path, known, content.extend)
    return content


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mvngrad"


def data_folder(folder: Path | None = None) -> Path:
    """Where downloads and tokens are written: `folder`, else that of MVNGRAD_DATA, else the cache."""
    path = Path(folder or os.environ.get(FOLDER_VARIABLE) or cache_folder())
    if path.exists() and not path.is_dir():
        raise InvalidInput(f"{_origin(folder)} is not a folder; name one, which is created if it does not exist")
    return path


def search_folders(dataset: str, folder: Path | None = None) -> list[Path]:
    """Where the files of a data set are looked for: in `folder`, else in that of MVNGRAD_DATA and then in the cache; in
    each, first in the subfolder named after the data set. Raises MissingFile if a named folder does not exist,
    because the cache may hold other data than was asked for.
    """
    named = folder if folder is not None else os.environ.get(FOLDER_VARIABLE)
    if named and not Path(named).is_dir():
        raise MissingFile(f"{_origin(folder)} is not a folder; name one that holds {dataset}/ or its files")
    folders = ([Path(named)] if named else []) + ([cache_folder()] if folder is None else [])
    return [place for parent in folders for place in (parent / dataset, parent)]


def _origin(folder: Path | None) -> str:
    """Names a folder in an error message, and where the name came from."""
    if folder is not None:
        return f"{str(folder)!r}, given as --data or folder,"
    named = os.environ.get(FOLDER_VARIABLE)
    return f"{FOLDER_VARIABLE}={named}" if named else str(cache_folder())


def find_in_folder(dataset: str, files: Sequence[KnownFile], folder: Path) -> list[Path] | None:
    """Paths of `files`, raw or .gz, in one folder; None if it has none, MissingFile if it has only some."""
    candidates = [(folder / file.name, folder / f"{file.name}.gz") for file in files]
    paths = [next((path for path in pair if path.is_file()), None) for pair in candidates]
    missing = [file.name for file, path in zip(files, paths, strict=True) if path is None]
    if missing and len(missing) < len(files):
        raise MissingFile(f"{folder} has some files of {dataset} but not {', '.join(missing)}; add them")
    return None if missing else [path for path in paths if path is not None]


def find_files(dataset: str, files: Sequence[KnownFile], folder: Path | None = None) -> list[Path] | None:
    """Paths of the `files` of a data set; None if they are nowhere, MissingFile if they are not in `folder`."""
    for place in search_folders(dataset, folder):
        if (paths := find_in_folder(dataset, files, place)) is not None:
            return paths
    if folder is not None:
        names = ", ".join(file.name for file in files)
        raise MissingFile(f"{folder} has no files of {dataset}; put these there, raw or .gz: {names}")
    return None


def download_folder(dataset: str, names: Sequence[str], folder: Path | None = None) -> Path:
    """Where to download a data set: the folder that has one of its files already, else a subfolder of its name."""
    parent = data_folder(folder)
    own = parent / dataset
    return next((place for place in (own, parent) if any((place / name).exists() for name in names)), own)


def download(urls: Sequence[str], target: Path, known: KnownFile, on_progress: OnProgress | None = None) -> None:
    """Download `target` from the first of `urls` that delivers the `known` file; an existing copy is verified and kept.

    The content goes to `target`.part, where a later attempt or process resumes, and is renamed once it is verified.
    """
    import requests  # here, because training needs torch alone

    for path in (target.with_name(known.name), target):
        if path.exists():
            return verify(path, known)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    failures: dict[str, None] = {}  # an ordered set
    largest = _size(part)
    for url in urls:
        attempts = 0
        while attempts < ATTEMPTS:
            if attempts:
                time.sleep(PAUSE * 2 ** (attempts - 1))
            resumed = part.exists()
            try:
                _transfer(url, part, on_progress)
                verify(part, known)
                part.replace(target)
                return None
            except (DamagedFile, requests.RequestException) as error:
                failures[f"{url}: {error}"] = None
                response = getattr(error, "response", None)
                if isinstance(error, DamagedFile) or (response is not None and response.status_code == 416):
                    part.unlink(missing_ok=True)
                    if not resumed:  # otherwise the bytes of an earlier attempt may be wrong: start over
                        break
                elif response is not None:
                    break
            attempts = 0 if _size(part) > largest else attempts + 1
            largest = max(largest, _size(part))
    remedy = f"Try again, or put {target.name} into {target.parent}"
    raise DownloadError("\n".join([f"{target.name} could not be downloaded.", *failures, remedy]))


def _transfer(url: str, part: Path, on_progress: OnProgress | None) -> None:
    """Append to `part` the bytes of `url` that it lacks; all of them if the server ignores the requested range."""
    import requests

    start = _size(part)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response, name_full_disk(part):
        response.raise_for_status()
        length = response.headers.get("Content-Length")
        with part.open("ab" if response.status_code == 206 else "wb") as file:
            total = None if length is None else file.tell() + int(length)
            for chunk in response.iter_content(CHUNK_BYTES):
                file.write(chunk)
                if on_progress is not None:
                    on_progress(file.tell(), total)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def name_full_disk(path: Path) -> Iterator[None]:
    """Add `path` to an error about a full disk, which lacks it."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
