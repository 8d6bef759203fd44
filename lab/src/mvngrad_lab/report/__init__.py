"""The report: claims of the paper, a verdict on each, and one page that shows both. Imports neither torch nor training.

    from mvngrad_lab import report

    report.build("runs", "results", out="report.html")

It reads records: stored runs, and tables, sweeps and benchmarks as the folders of experiments collect them. The
records.py of an experiment defines collect(sources), which returns the records that it finds there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mvngrad.diagnostics import Diagnosis, diagnose
from mvngrad.diagnostics.records import read_records
from mvngrad_lab import store
from mvngrad_lab.discovery import find_experiments, import_all
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.recipe import TrainingRecipe
from mvngrad_lab.store import print_warning, read_rows

MONITORS = "monitors"
"""In a folder of small results: the records of Monitors, KEY.jsonl for each run that has one."""
ENVIRONMENT = ("device", "torch", "python", "commit")
"""The parts of an environment that tables of exported runs have."""


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


DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What code raises that reads a result of another shape: of an older version, or edited."""


class UnreadableRecord(Exception):
    """The result of a stored run is not what its experiment writes in this version."""

    def __init__(self, key: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        super().__init__(f"{key} is left out, because its result is not what this version writes ({reason})")
        self.key = key


@contextmanager
def catch_unreadable(record: Record) -> Iterator[None]:
    """Raise UnreadableRecord for errors of code that judges or draws a record, whose shape was not checked in full."""
    try:
        yield
    except DAMAGE as error:
        if os.environ.get("MVNGRAD_DEBUG"):
            raise
        raise UnreadableRecord(record.key, error) from error


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

        Files come from anywhere, so the types of their fields are checked here.
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
            return diagnose(read_records(path, self.warn))
        except (OSError, ValueError) as error:
            self.warn(f"{path} is left out, because it is not a record of a Monitor: {error}")
            return None


def load_records(*folders: Path, warn: Callable[[str], object]) -> list[Record]:
    """All finished runs in the folders, and what the experiments collect there."""
    runs = {run.key: run for run in store.load_runs(*folders, on_problem=warn)}
    sources = Sources(folders, runs, warn)
    return [*runs.values(), *collect(sources)]


def collect(sources: Sources) -> Iterable[Record]:
    """The records of all experiments; one whose files cannot be read is left out with a warning."""
    for module in import_all("records"):
        try:
            records = module.collect(sources)
        except DAMAGE as error:
            if not isinstance(error, InvalidInput) and os.environ.get("MVNGRAD_DEBUG"):
                raise
            reason = error if isinstance(error, InvalidInput) else f"{type(error).__name__}: {error}"
            sources.warn(f"{module.__name__.split('.')[-2]} is left out: {reason}")
            continue
        yield from records


def keep_runs(folder: Path, bundle: Path) -> int:
    """Add the runs of `folder` that a repository should keep to the file `bundle`; return how many.

    These are the runs behind tables, and those of experiments that run only if named, with their test accuracy at
    each evaluation. Records of Monitors are copied too.
    """
    runs = {run.key: run for run in store.load_runs(folder)}
    tables = [each for each in collect(Sources((folder,), runs, warn=print_warning)) if isinstance(each, TableResult)]
    in_table = {key for table in tables for key in table.run_keys}
    long = {experiment.name for experiment in find_experiments().values() if experiment.gpu or experiment.on_request}
    selected = [run for run in runs.values() if run.key in in_table or run.name in long]
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


# Tables of the paper, of many training runs


Row = dict[str, Any]
"""Lists with a value for each seed that is done, and counts: `to_come`, `diverged`."""
MakeRow = Callable[[Sequence[TrainingRecipe]], Row]


def make_table(
    name: str,
    recipes: Sequence[TrainingRecipe],
    sources: Sources,
    metrics: Sequence[str],
    fill: Callable[[MakeRow], dict[str, Any]],
) -> list[TableResult]:
    """The table of these trainings, with the result that `fill` makes from rows; an empty list if none is done."""
    done = [sources.runs[recipe.key] for recipe in recipes if recipe.key in sources.runs]
    if not done:
        return []
    settings = [recipe.settings for recipe in recipes]
    shared = {key: value for key, value in settings[0].items() if len({str(each[key]) for each in settings}) == 1}
    parts = [part for run in done for part in (run.environment, *run.result.get("environments", []))]
    environment = join_environments(parts, dict.fromkeys(key for run in done for key in run.environment))
    data = "; ".join(sorted({run.result["data"] for run in done if "data" in run.result}))
    result = {
        **fill(lambda some: make_row(some, sources, metrics)),
        "done": len(done),
        "of": len(recipes),
        "data": data,
    }
    run_keys = tuple(run.key for run in done)
    return [TableResult(name, shared, environment, result, run_keys, len(recipes) - len(done))]


def join_environments(parts: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, str]:
    """By name, the different values that runs had, as text.

    >>> join_environments([{"torch": "2.13"}, {"torch": "2.11"}, {"torch": "2.13"}], ["torch", "device"])
    {'torch': '2.11, 2.13', 'device': ''}
    """
    return {name: ", ".join(sorted({str(part[name]) for part in parts if name in part})) for name in names}


def make_row(recipes: Sequence[TrainingRecipe], sources: Sources, metrics: Sequence[str]) -> Row:
    """One row. The time of a run that shared its GPU with another is None.

    Its environment has `beside`, what else ran there: no code writes it, it is added to results/runs.jsonl by hand.
    """
    done = [sources.runs[recipe.key] for recipe in recipes if recipe.key in sources.runs]
    return {
        **{name: [run.result.get(name) for run in done] for name in metrics},
        "seconds": [
            None if "beside" in run.environment or run.result["status"] != "finished" else run.result["seconds"]
            for run in done
        ],
        "seeds": [run.recipe["seed"] for run in done],
        "to_come": len(recipes) - len(done),
        "diverged": sum(run.result["status"] != "finished" for run in done),
    }


def build(
    *folders: str | Path,
    out: str | Path,
    docs: str = "",
    warn: Callable[[str], object] = print_warning,
    say: Callable[[str], object] = lambda line: None,
    experiments: Sequence[str] = (),
) -> Path:
    """Judge every claim by the results in `folders`, write the report to `out` and return its path.

    Sweeps that no claim is about get a page of their own next to it. If two folders have a run with the same key, the
    first folder's is taken. Files that cannot be read are passed to `warn` and left out. `say` is called with each line
    of a summary: how many claims of each kind hold, what we found, of these `experiments` first, if some are named, and
    the paths of other pages. `docs` is the address of the documentation.
    """
    from mvngrad_lab import __version__
    from mvngrad_lab.report.findings import summarize
    from mvngrad_lab.report.page import find_own, name_pages, render, render_own
    from mvngrad_lab.report.verdicts import find_latest, judge

    records, made, path = load_records(*map(Path, folders), warn=warn), store.timestamp(), Path(out)
    while True:
        try:
            judged, by_name = judge(records), find_latest(records)
            page = render(judged, records, version=__version__, made=made, docs=docs)
            summary = summarize(judged, by_name, experiments)
            break
        except UnreadableRecord as error:
            warn(str(error))
            records = [record for record in records if record.key != error.key]
    own_pages = {name: path.with_name(page) for name, page in name_pages(find_own(judged, by_name)).items()}
    if path.resolve() in {own_page.resolve() for own_page in own_pages.values()}:
        raise InvalidInput(f"{path} is the name of the page of one sweep; give the report another name")
    store.write_atomic(path, page)
    for line in summary:
        say(line)
    for name, own_page in own_pages.items():
        record = by_name[name]
        store.write_atomic(own_page, render_own(record, version=__version__, made=made))
        say(f"{name}: {own_page.resolve()}")
    targets = {claim.target for claim, _ in judged}
    own = {run.key for run in store.load_runs(Path(folders[0]))}
    replaced = {r.name for r in records if r.key in own and r.name in targets and by_name[r.name].key not in own}
    if replaced and len(folders) > 1:
        say(
            f"{', '.join(sorted(replaced))}: the claims are judged by the larger runs in {folders[1]}; yours are at "
            "the end of the report, under Other runs."
        )
    return path
