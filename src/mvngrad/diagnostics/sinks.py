"""Destinations of records: a file of JSON lines, TensorBoard, or any callable. Standard library only."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from mvngrad.diagnostics.records import NEW_RUN, Record, add_checksum

Sink = Callable[[Record], object]


class JSONLines:
    """Append each record to a file as one line, in one write, so that records survive if the process is killed.

    A line also has a checksum, so that `read_records` notices if it was changed. A file that has records of an earlier
    run gets a line `NEW_RUN` before those of a new one, and a warning says so.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: BinaryIO | None = None

    def check(self) -> None:
        """Create the folder, and raise an OSError if the file cannot be appended to. Creates no file."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self.path.open("ab+", buffering=0).close()
            else:
                TemporaryFile(dir=self.path.parent).close()
        except OSError as error:
            raise type(error)(
                f"sink={str(self.path)!r} cannot be written: {error}; name a file in a folder that you can write to"
            ) from error

    def __call__(self, record: Record) -> None:
        line = json.dumps(add_checksum(record), allow_nan=False).encode() + b"\n"
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab+", buffering=0)
            if self._file.tell():
                if record.get("start") == 0:
                    line = NEW_RUN.encode() + b"\n" + line
                    warnings.warn(
                        f"{self.path} has records of an earlier run; those of this run follow as a new section, and "
                        "only the last section is read: name another file to keep both",
                        stacklevel=2,
                    )
                self._file.seek(-1, os.SEEK_END)
                line = line if self._file.read(1) == b"\n" else b"\n" + line  # the last line is incomplete
        self._file.write(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoard:
    """Write scalars for TensorBoard. As the sink of a Monitor, it names them `mvngrad/group0/snr/0.5` and the like.

    The first write hides the steps from there on that were written to the same folder: those of an interrupted run, but
    also those of another writer. Give it a folder of its own.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard needs the package tensorboard: pip install tensorboard") from error
        self.folder = Path(folder)
        self._open: Callable[..., Any] = SummaryWriter
        self._writer: Any = None

    def __call__(self, record: Record) -> None:
        self.add_scalars(named_scalars(record), record["step"])

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            self._writer = self._open(str(self.folder), purge_step=step)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def named_scalars(record: Record) -> dict[str, float]:
    """The changing numbers of a record as `mvngrad/group0/snr/0.5` and the like, for a logger, without None."""
    numbers: dict[str, float | None] = {f"mvngrad/{name}": value for name, value in record.get("logged", {}).items()}
    for entry in record["groups"]:
        prefix = f"mvngrad/group{entry['group']}"
        for name in ("ratio", "snr", "update", "gradient_norm"):
            numbers |= {f"{prefix}/{name}/{key}": value for key, value in (entry[name] or {}).items()}
        for name in ("lr", "dead", "noise_hidden", "sign_collapse", "epsilon_floor", "clipped"):
            numbers[f"{prefix}/{name}"] = entry.get(name)  # early records do not have all
        numbers[f"{prefix}/spikes"] = float(len(entry["spikes"]))
    return {name: number for name, number in numbers.items() if number is not None}


def make_sink(sink: str | os.PathLike[str] | Sink) -> Sink:
    """Make a `JSONLines` from a path; return a callable unchanged.

    Raises an IsADirectoryError for a folder, and a TypeError for anything else.
    """
    if callable(sink):
        return sink
    if isinstance(sink, (str, os.PathLike)):
        if Path(sink).is_dir():
            raise IsADirectoryError(f"sink={sink!r} is a folder; name a file in it, such as monitor.jsonl")
        return JSONLines(sink)
    raise TypeError(f"sink={sink!r} is invalid; it must be a path, or a callable that takes a record")


def check_sink(sink: Sink | None) -> None:
    """Raise an OSError if the sink is a file that cannot be written, before a training spends time."""
    if isinstance(sink, JSONLines):
        sink.check()


def close_sink(sink: Sink | None) -> None:
    """Close a sink that can be closed; `JSONLines` opens its file again at the next record."""
    if sink is not None and hasattr(sink, "close"):
        sink.close()
