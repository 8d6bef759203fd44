"""The report: claims of the paper, a verdict on each, and one page that shows both. Imports neither torch nor training.

from mvngrad_lab import report

report.build("runs", "results", out="report.html")
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def print_warning(text: str) -> None:
    import sys

    print(f"warning: {text}", file=sys.stderr)


def build(*folders: str | Path, out: str | Path, warn: Callable[[str], object] = print_warning) -> Path:
    """Judge every claim by the results in `folders`, write the report to `out` and return its path.

    If two folders have a run with the same key, the first folder's is taken. Files that cannot be read are passed to
    `warn` and left out.
    """
    from mvngrad_lab import __version__, store
    from mvngrad_lab.report.page import render
    from mvngrad_lab.report.records import load_records
    from mvngrad_lab.report.verdicts import judge

    records = load_records(*map(Path, folders), warn=warn)
    store.write_atomic(Path(out), render(judge(records), records, version=__version__, made=store.timestamp()))
    return Path(out)
