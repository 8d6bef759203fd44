"""Where results are stored: runs/<name>-<hash>/ with recipe.json, environment.json and, written last, result.json.

Standard library only, so that a report can be drawn without torch. A folder without result.json is a run that did not
finish. Every file is written atomically.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from gzip import GzipFile
from itertools import product
from pathlib import Path
from typing import IO, Any

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.recipe import Recipe
from mvngrad_lab.store.lock import Check, name_in_errors

ROOT = Path("runs")
RESULTS = Path("results")
"""The repository's folder of results that need more than a CPU."""
BUNDLE = "runs.jsonl"
"""One finished run per line: the form of small results in a repository."""
MONITOR = "monitor.jsonl"
"""In the folder of a run: the records of its Monitor."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk."""


def write_atomic(path: Path, text: str) -> None:
    """Write a file completely or not at all, also if the process dies or the disk is full."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with name_in_errors(path), partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def read_chunks(stream: IO[bytes] | GzipFile) -> Iterator[bytes]:
    """The content of a stream, which may be larger than memory, in chunks."""
    while chunk := stream.read(1 << 20):
        yield chunk


def timestamp(timespec: str = "seconds") -> str:
    """The current time, as stored in results."""
    return datetime.now(timezone.utc).isoformat(timespec=timespec)


@dataclass(frozen=True)
class FinishedRun:
    """A finished run of a recipe, a training or an experiment, as read from a store."""

    key: str
    name: str
    recipe: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]

    def __post_init__(self) -> None:
        for name, kind in (("key", str), ("name", str), ("recipe", dict), ("environment", dict), ("result", dict)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} is not a {kind.__name__}")
        if not isinstance(self.environment.get("made", ""), str):
            raise ValueError(f"its environment has made {self.environment['made']!r}")


class RunFolder:
    """The folder of a recipe's run in a store, finished or not."""

    def __init__(self, recipe: Recipe, root: Path = ROOT) -> None:
        self.recipe, self.path = recipe, root / recipe.key

    @property
    def run(self) -> FinishedRun | None:
        """The finished run; None if there is none, or it cannot be read."""
        return read_run(self.path)

    @property
    def interrupted(self) -> bool:
        """Whether a run was started here and did not finish."""
        return self.path.is_dir() and self.run is None

    def start(self, environment: dict[str, Any], changes: str = "") -> None:
        """Record what is about to run, on which machine and code; `changes` is the diff to the commit.

        A result from other code is removed.
        """
        for old in ("result.json", "changes.diff"):
            (self.path / old).unlink(missing_ok=True)
        if changes:
            write_atomic(self.path / "changes.diff", changes)
        recipe = {"name": self.recipe.name, **self.recipe.settings}
        write_atomic(self.path / "recipe.json", json.dumps(recipe, indent=1) + "\n")
        write_atomic(self.path / "environment.json", json.dumps(environment, indent=1) + "\n")

    def finish(self, result: dict[str, Any]) -> None:
        """Store the result, which makes the run a finished one."""
        write_atomic(self.path / "result.json", json.dumps(result, allow_nan=False) + "\n")


def get_queue_file(experiment: str, queue: str) -> str:
    """The file in results/ that has the finished runs of a queue."""
    return f"{experiment}-{queue}.json"


def read_exported(path: Path) -> list[dict[str, Any]]:
    """The finished and diverged runs in a JSON file of a queue or a sweep; none if there is no file."""
    if not path.exists():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
        done = [row for row in rows if row["status"] in ("finished", "diverged")]
        for row, (name, kind) in product(done, (("key", str), ("settings", dict), ("metrics", dict))):
            if not isinstance(row[name], kind):
                raise TypeError(f"{name} of a run is {row[name]!r}")
        return done
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidInput(f"{path} is damaged ({error}); restore it, or export it again") from error


def print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def read_run(folder: Path, on_problem: Callable[[str], Any] = lambda text: None) -> FinishedRun | None:
    """The finished run in a folder. If a file is missing or damaged, it is not finished; `on_problem` is called with
    the name of the damaged one.
    """
    parts = {}
    for part in ("result", "recipe", "environment"):
        path = folder / f"{part}.json"
        try:
            parts[part] = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(parts[part], dict):
                raise ValueError("it is not an object")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            on_problem(f"{path} cannot be read ({error}); its run is left out")
            return None
    try:
        return FinishedRun(folder.name, parts["recipe"].pop("name"), **parts)
    except (KeyError, ValueError) as error:
        on_problem(f"{folder} is not a run ({error}); it is left out")
        return None


def load_runs(*roots: Path, on_problem: Callable[[str], Any] = print_warning) -> list[FinishedRun]:
    """All finished runs in folders and bundles of the roots, by key; a key in several roots is read from the first.

    `on_problem` is called with the file, and line, of each record that cannot be read and is left out.
    """
    runs: dict[str, FinishedRun] = {}
    for root in roots:
        for folder in sorted(root.iterdir()) if root.is_dir() else []:
            if (run := read_run(folder, on_problem)) is not None:
                runs.setdefault(run.key, run)
        for run in _read_bundle(root / BUNDLE, on_problem):
            runs.setdefault(run.key, run)
    return [runs[key] for key in sorted(runs)]


def _read_bundle(path: Path, on_problem: Callable[[str], Any]) -> Iterator[FinishedRun]:
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], start=1):
        try:
            yield FinishedRun(**json.loads(line))
        except (ValueError, TypeError) as error:  # noqa: PERF203
            on_problem(f"{path}, line {number} is not a run ({error}); it is left out")


def write_bundle(path: Path, runs: list[FinishedRun]) -> None:
    """Write runs into one file, a line each, sorted by key; runs that are already in it stay.

    Raises InvalidInput if a line of the file cannot be read, because it would be lost.
    """

    def refuse(text: str) -> None:
        raise InvalidInput(f"{text.removesuffix('; it is left out')}; repair or remove that line first")

    merged = {run.key: run for run in [*_read_bundle(path, refuse), *runs]}
    lines = [json.dumps(vars(merged[key]), allow_nan=False) for key in sorted(merged)]
    write_atomic(path, "".join(f"{line}\n" for line in lines))


# Metrics


class MetricsFile:
    """metrics.jsonl: one row for every epoch of a run, however often the run was interrupted."""

    def __init__(self, path: Path, step: int, check_lock: Check = lambda: None) -> None:
        """Remove rows of steps after `step`, which an interrupted process wrote: these steps are taken again.

        `check_lock` is called before each row is written.
        """
        check_lock()
        rows = [row for row in read_rows(path) if row["step"] <= step]
        write_atomic(path, "".join(f"{json.dumps(row)}\n" for row in rows))
        self.path, self.check_lock = path, check_lock

    def add(self, row: dict[str, Any]) -> None:
        """Append a row and sync it to disk, before a checkpoint that depends on it."""
        self.check_lock()
        with name_in_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows; an incomplete last line is ignored. Raises InvalidInput for any other line that is not a row."""
    rows: list[dict[str, Any]] = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if line.endswith("\n"):
            try:
                rows.append(json.loads(line))
                if not isinstance(rows[-1]["step"], int):
                    raise TypeError(f"step is {rows[-1]['step']!r}")
            except (ValueError, TypeError, KeyError) as error:
                raise InvalidInput(
                    f"{path}, line {number} is damaged ({error}); repair it, or delete the folder to train again"
                ) from None
    return rows
