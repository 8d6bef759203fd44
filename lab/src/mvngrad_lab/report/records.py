"""What the report reads: stored runs, and tables, sweeps and benchmarks as the folders of experiments collect them.

The records.py of an experiment defines collect(sources), which returns the records that it finds there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mvngrad.diagnostics.diagnosis import Diagnosis, diagnose
from mvngrad.diagnostics.sinks import read_records
from mvngrad_lab import store
from mvngrad_lab.experiments import find_experiments, import_all
from mvngrad_lab.store import read_rows

MONITORS = "monitors"
"""In a folder of small results: the records of Monitors, KEY.jsonl for each run that has one."""


class Record(Protocol):
    """What is judged and drawn. A stored run is one."""

    @property
    def key(self) -> str:
        """Names it on the page; unique."""

    @property
    def name(self) -> str:
        """Claims have it as their target."""

    @property
    def recipe(self) -> Mapping[str, Any]: ...

    @property
    def environment(self) -> Mapping[str, Any]: ...

    @property
    def result(self) -> Any:
        """What judges and figures read."""


@runtime_checkable
class Summary(Protocol):
    """A record that summarizes many runs, which the page then does not list one by one."""

    @property
    def title(self) -> str: ...

    @property
    def run_keys(self) -> Sequence[str]:
        """Of the runs that are done."""

    @property
    def left(self) -> int:
        """How many runs are to come, at least."""


@dataclass(frozen=True)
class TableResult:
    """A table of the paper, made of many training runs."""

    name: str
    recipe: dict[str, Any]
    """The settings that all its runs share."""
    environment: dict[str, Any]
    """Devices and versions: all that its runs had."""
    result: dict[str, Any]
    run_keys: tuple[str, ...]
    left: int

    @property
    def key(self) -> str:
        return self.name

    @property
    def title(self) -> str:
        experiment = find_experiments().get(self.name)
        summary = experiment.summary if experiment else self.name
        return f"{summary[:1].upper()}{summary[1:]}: {len(self.run_keys)} done"


@dataclass(frozen=True)
class BenchmarkFile:
    """What `python -m benchmarks.NAME` measured and wrote to a file."""

    key: str
    name: str
    environment: dict[str, Any]
    result: dict[str, Any]
    recipe: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sources:
    """The folders of results, and the runs in them by key."""

    folders: tuple[Path, ...]
    runs: Mapping[str, store.FinishedRun]
    warn: Callable[[str], object]
    """Called with a message about each file that cannot be read."""

    def read_benchmark(self, file: str, name: str, types: Mapping[str, type]) -> list[BenchmarkFile]:
        """The first `file` of the folders whose fields have these `types`; an empty list if there is none.

        Files come from anywhere, so their shape is checked here, and what uses them need not.
        """
        for path in (folder / file for folder in self.folders):
            if not path.is_file():
                continue
            try:
                content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                wrong = [key for key, kind in types.items() if not isinstance(content[key], kind)]
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                wrong = [repr(error)]
            if not wrong:
                return [BenchmarkFile(path.stem, name, content.pop("environment"), content)]
            self.warn(f"{path} is left out, because it is not what a benchmark writes: {wrong[0]}")
        return []

    def diagnose(self, key: str) -> Diagnosis | None:
        """The diagnosis of what a Monitor recorded during a run; None without a record that can be read."""
        pairs = [(folder / key / store.MONITOR, _bundled_monitor(folder, key)) for folder in self.folders]
        path = next((path for pair in pairs for path in pair if path.is_file()), None)
        if key not in self.runs or path is None:
            return None
        try:
            return diagnose(read_records(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.warn(f"{path} is left out, because it is not a record of a Monitor: {error!r}")
            return None


def load_records(*folders: Path, warn: Callable[[str], object]) -> list[Record]:
    """All finished runs in the folders, and what the experiments collect there."""
    runs = {run.key: run for run in store.load_runs(*folders)}
    sources = Sources(folders, runs, warn)
    return [*runs.values(), *collect(sources)]


def collect(sources: Sources) -> Iterable[Record]:
    return (record for module in import_all("records") for record in module.collect(sources))


def keep_runs(folder: Path, bundle: Path) -> int:
    """Add the runs of `folder` that a repository should keep to the file `bundle`; return how many.

    These are the runs behind tables, and those of experiments that need a GPU, with their test accuracy at each
    evaluation. Records of Monitors are copied too.
    """
    runs = {run.key: run for run in store.load_runs(folder)}
    tables = [
        each for each in collect(Sources((folder,), runs, warn=lambda text: None)) if isinstance(each, TableResult)
    ]
    in_table = {key for table in tables for key in table.run_keys}
    on_gpu = {experiment.name for experiment in find_experiments().values() if experiment.gpu}
    selected = [run for run in runs.values() if run.key in in_table or run.name in on_gpu]
    store.write_bundle(bundle, [_with_curve(run, folder) for run in selected])
    for run in selected:
        if (path := folder / run.key / store.MONITOR).is_file():
            store.write_atomic(_bundled_monitor(bundle.parent, run.key), path.read_text(encoding="utf-8"))
    return len(selected)


def _with_curve(run: store.FinishedRun, folder: Path) -> store.FinishedRun:
    """The run with [epoch, test accuracy] of each evaluation in its result, if it evaluates accuracy."""
    rows = read_rows(folder / run.key / "metrics.jsonl")
    curve = [[row["epoch"], row["test_accuracy"]] for row in rows if row.get("test_accuracy") is not None]
    return replace(run, result={**run.result, "curve": curve}) if curve else run


def _bundled_monitor(folder: Path, key: str) -> Path:
    return folder / MONITORS / f"{key}.jsonl"
