"""The table of torch versions that the library was tested with, from the records of `make torch-floor` and the others.

python -m benchmarks.versions      # reads results/torch-*.json, writes results/torch-versions.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, markdown_table

HEAD = ["torch", "Python", "passed", "failed", "skipped", "tests", "commit"]
INTRODUCTION = """\
# torch versions

Each row is a run of the library's tests with one torch: `make torch-floor` (the oldest that we support), `make
torch-pinned` (the one that all other checks use) and `make torch-newest`. Without a CUDA device, tests that need one
are skipped."""


def make_row(record: dict[str, Any]) -> list[str]:
    failed = record["failed"] + record["error"]
    tests = record["command"].removeprefix("pytest ")
    counts = f"{record['passed']:,}", f"{failed:,}", f"{record['skipped']:,}"
    return [record["torch"], record["python"], *counts, f"`{tests}`, {record['device']}", (record["commit"] or "")[:7]]


def make_page(folder: Path) -> str:
    """The table, and the names of tests that failed."""
    paths = [*sorted(folder.glob("torch-2*.json")), folder / "gpu-tests.json"]
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    parts = [INTRODUCTION, markdown_table(HEAD, map(make_row, records))]
    failures = [f"- torch {record['torch']}: `{name}`" for record in records for name in record.get("failures", [])]
    return "\n\n".join([*parts, *(["Failed:\n\n" + "\n".join(failures)] if failures else [])]) + "\n"


if __name__ == "__main__":
    (RESULTS / "torch-versions.md").write_text(make_page(RESULTS), encoding="utf-8")
