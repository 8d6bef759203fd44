"""metrics.jsonl: one row for every epoch of a run, however often the run was interrupted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mvngrad_lab import store
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.store.lock import Check


class MetricsFile:
    """The rows of a run up to a step; more can be added."""

    def __init__(self, path: Path, step: int, check: Check = lambda: None) -> None:
        """Rows of later steps, which were written before an interruption, are removed: these steps are taken again.

        `check` is called before each row is written.
        """
        check()
        rows = [row for row in read_rows(path) if row["step"] <= step]
        store.write_atomic(path, "".join(_format_row(row) for row in rows))
        self.path, self.check = path, check

    def add(self, row: dict[str, Any]) -> None:
        """Append a row and sync it to disk, before a checkpoint that depends on it."""
        self.check()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_format_row(row))
            file.flush()
            os.fsync(file.fileno())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows; an incomplete last line is ignored. Raises ValueError for any other line that is not a row."""
    rows: list[dict[str, Any]] = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if line.endswith("\n"):
            try:
                rows.append(json.loads(line))
                rows[-1]["step"]
            except (ValueError, TypeError, KeyError) as error:
                raise InvalidInput(
                    f"{path}, line {number} is damaged ({error}); repair it, or delete the folder to train again"
                ) from None
    return rows


def _format_row(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
