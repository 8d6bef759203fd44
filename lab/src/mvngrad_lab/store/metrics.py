"""metrics.jsonl: a row for every epoch of a run, each once, however often the run was interrupted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mvngrad_lab import store
from mvngrad_lab.store.lock import Check


class MetricsFile:
    """The rows of a run up to a step, to be written on."""

    def __init__(self, path: Path, step: int, check: Check = lambda: None) -> None:
        """Rows of later steps, from before an interruption, go: their steps will be taken again.

        `check` is asked before each row.
        """
        check()
        kept = [row for row in read_rows(path) if row["step"] <= step]
        store.write_atomic(path, "".join(_line(row) for row in kept))
        self.path, self.check = path, check

    def add(self, row: dict[str, Any]) -> None:
        """Write a row down for good: a checkpoint may take it for written."""
        self.check()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows; a last line that was cut short is none."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
