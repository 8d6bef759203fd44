"""Where results live: runs/<name>-<hash>/ with recipe.json, environment.json and, written last, result.json.

Standard library only, so that a report is drawn where no torch is. A folder without result.json is a run that did not
finish. Every file appears under its name whole or not at all.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from gzip import GzipFile
from pathlib import Path
from typing import IO, Any

from mvngrad_lab.recipe import Recipe

ROOT = Path("runs")
RESULTS = Path("results")
"""Where this repository keeps results that need more than a CPU, if it is here."""
BUNDLE = "runs.jsonl"
"""One finished run a line: how small results are kept in a repository."""
MONITOR = "monitor.jsonl"
"""In the folder of a run: what a Monitor recorded beside it."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says where nothing more can be written."""


def write_atomic(path: Path, text: str) -> None:
    """Put `text` at `path`, whole or not at all, also if the process dies or the disk is full."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _written(path, text)
    except OSError as error:  # of a file that nobody asked for
        raise OSError(error.errno, error.strerror, str(path)) from error


def _written(path: Path, text: str) -> None:
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(partial, 0o666 & ~umask)  # mkstemp's is for its owner alone
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def read_chunks(stream: IO[bytes] | GzipFile) -> Iterator[bytes]:
    """A stream that may be larger than memory, part after part."""
    while chunk := stream.read(1 << 20):
        yield chunk


def timestamp(timespec: str = "seconds") -> str:
    """The time, as results carry it."""
    return datetime.now(timezone.utc).isoformat(timespec=timespec)


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, as read from a store."""

    key: str
    name: str
    recipe: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]


class RunFolder:
    """The place of one recipe in a store, finished or not."""

    def __init__(self, recipe: Recipe, root: Path = ROOT) -> None:
        self.recipe, self.path = recipe, root / recipe.key

    @property
    def run(self) -> FinishedRun | None:
        """The finished run; None where there is none, or none that can be read."""
        return read_run(self.path)

    @property
    def interrupted(self) -> bool:
        """Whether a run began here and did not finish."""
        return self.path.is_dir() and self.run is None

    def start(self, environment: dict[str, Any], changes: str = "") -> None:
        """Note what is about to run, and on what: the `changes` to the commit too. A result of other code goes."""
        for old in ("result.json", "changes.diff"):
            (self.path / old).unlink(missing_ok=True)
        if changes:
            write_atomic(self.path / "changes.diff", changes)
        note = {"name": self.recipe.name, **self.recipe.settings}
        write_atomic(self.path / "recipe.json", json.dumps(note, indent=1) + "\n")
        write_atomic(self.path / "environment.json", json.dumps(environment, indent=1) + "\n")

    def finish(self, result: dict[str, Any]) -> None:
        write_atomic(self.path / "result.json", json.dumps(result, allow_nan=False) + "\n")


def read_run(folder: Path) -> FinishedRun | None:
    """The finished run in `folder`. A file that is missing, cut short or not JSON makes it unfinished."""
    try:
        recipe, environment, result = (
            json.loads((folder / f"{part}.json").read_text(encoding="utf-8"))
            for part in ("recipe", "environment", "result")
        )
        return FinishedRun(folder.name, recipe.pop("name"), recipe, environment, result)
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def load_runs(*roots: Path) -> list[FinishedRun]:
    """All finished runs under the roots, by key; of two with one key, that of the earlier root."""
    found: dict[str, FinishedRun] = {}
    for root in roots:
        for run in (*_folders(root), *_bundled(root / BUNDLE)):
            found.setdefault(run.key, run)
    return [found[key] for key in sorted(found)]


def _folders(root: Path) -> Iterator[FinishedRun]:
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if (run := read_run(folder)) is not None:
            yield run


def _bundled(path: Path) -> Iterator[FinishedRun]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        yield FinishedRun(**json.loads(line))


def write_bundle(path: Path, finished: list[FinishedRun]) -> None:
    """Write runs into one file, a line each, in the order of their keys; those already there stay."""
    kept = {run.key: run for run in _bundled(path)} | {run.key: run for run in finished}
    lines = [json.dumps(vars(kept[key]), allow_nan=False) for key in sorted(kept)]
    write_atomic(path, "\n".join(lines) + "\n")
