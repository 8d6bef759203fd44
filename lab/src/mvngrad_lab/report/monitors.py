"""What Monitors recorded: monitor.jsonl in the folder of a run, monitors/KEY.jsonl where small results are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from mvngrad.diagnostics.diagnosis import Diagnosis, diagnose
from mvngrad.diagnostics.sinks import read_records
from mvngrad_lab import store
from mvngrad_lab.store import FinishedRun

FOLDER = "monitors"


def monitors(runs: Iterable[FinishedRun], *roots: Path, tell: Callable[[str], object]) -> dict[str, Diagnosis]:
    """Key -> what the record of a run says, for those that have one that can be read; the others are told."""
    places = {run.key: next(filter(Path.is_file, _places(run.key, roots)), None) for run in runs}
    said = {key: _said_or_told(path, tell) for key, path in places.items() if path is not None}
    return {key: diagnosis for key, diagnosis in said.items() if diagnosis is not None}


def _places(key: str, roots: Sequence[Path]) -> Iterator[Path]:
    for root in roots:
        yield root / key / store.MONITOR
        yield root / FOLDER / f"{key}.jsonl"


def _said_or_told(path: Path, tell: Callable[[str], object]) -> Diagnosis | None:
    try:
        return diagnose(read_records(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        tell(f"{path} is left out, because it is no record of a Monitor: {error!r}")
        return None


def keep(runs: Iterable[FinishedRun], root: Path, there: Path) -> None:
    """Put the records that are with these runs in `root` beside small results."""
    for run in runs:
        if (path := root / run.key / store.MONITOR).is_file():
            store.write_atomic(there / FOLDER / f"{run.key}.jsonl", path.read_text(encoding="utf-8"))
