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


def build(
    *folders: str | Path,
    out: str | Path,
    docs: str = "",
    warn: Callable[[str], object] = print_warning,
    say: Callable[[str], object] = lambda line: None,
) -> Path:
    """Judge every claim by the results in `folders`, write the report to `out` and return its path.

    Sweeps that no claim is about get a page of their own next to it. If two folders have a run with the same key, the
    first folder's is taken. Files that cannot be read are passed to `warn` and left out. `say` is called with each line
    of a summary: how many claims of each kind hold, and what we found. `docs` is the address of the documentation.
    """
    from mvngrad_lab import __version__, store
    from mvngrad_lab.report.findings import summarize
    from mvngrad_lab.report.page import find_own, get_slug, render, render_own
    from mvngrad_lab.report.records import load_records
    from mvngrad_lab.report.verdicts import find_latest, judge

    records, made, path = load_records(*map(Path, folders), warn=warn), store.timestamp(), Path(out)
    judged, by_name = judge(records), find_latest(records)
    store.write_atomic(path, render(judged, records, version=__version__, made=made, docs=docs))
    for name, record in find_own(judged, by_name).items():
        store.write_atomic(path.with_name(f"{get_slug(name)}.html"), render_own(record, version=__version__, made=made))
    for line in summarize(judged, by_name):
        say(line)
    return path
