"""Exports of sweeps, as `mvngrad sweep export NAME FILE.json` writes them, and the benchmark of the engine.

A file comes from anywhere, so its shape is checked once, here; what uses it need not.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mvngrad.diagnostics.records import pop_checksum
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.experiments.sweeps.sweeps import SWEEPS
from mvngrad_lab.recipe import Recipe
from mvngrad_lab.report import Record, Sources
from mvngrad_lab.report.tables import OPTIMIZERS
from mvngrad_lab.report.verdicts import SAMPLE
from mvngrad_lab.sweep.grids import Outcome, Results
from mvngrad_lab.sweep.records import CODE, DONE, FAILED, OPEN, SEEDS

PREFIX = "sweep-"
"""Of files, and of the targets of claims that a sweep decides."""
LABELS = {f"{name}{w}": f"{cell}{w.upper()}" for w in ("", "w") for cell, name in OPTIMIZERS.items()}
Row = dict[str, Any]
"""One run: key, stage, optimizer, status, value, settings, metrics, seconds, reason, worker and the fields of CODE."""

WHOLE: dict[str, type] = {"sweep": str, "made": str, "metric": str, "higher": bool, "selected": dict, "runs": list}
ROW: dict[str, type] = {"key": str, "stage": str, "status": str, "settings": dict, "metrics": dict}


def get_label(row: Row) -> str:
    """The optimizer as the paper writes it, or by its own name; a recipe without one, by the recipe's name."""
    name = str(row.get("optimizer") or row["key"].rpartition("-")[0])
    return LABELS.get(name, name)


def settings_without(row: Row, *fields: str) -> str:
    """All other settings as text: equal for runs that differ in `fields` alone."""
    return _to_text({name: value for name, value in row["settings"].items() if name not in fields})


@dataclass(frozen=True)
class SweepExport:
    """All runs of one sweep. A run that failed ranks below every finished one and is never left out."""

    key: str
    name: str
    """The target of the claims that it decides."""
    recipe: dict[str, Any]
    """The sweep's name, and the settings that all its runs share."""
    environment: dict[str, Any]
    sweep: str
    metric: str
    higher: bool
    test_because: str
    share_trained: float | None
    """How much of their time workers trained, if the file says so."""
    selected: dict[str, str]
    """Optimizer -> key."""
    rows: list[Row]
    """All runs, those that repeat a selected configuration included."""
    grid: frozenset[str] | None
    """The keys of all configurations as this version knows the sweep; None if it does not."""
    left: int
    """How many configurations of the grid are not done, at least."""

    @property
    def title(self) -> str:
        return f"Sweep {self.sweep}"

    @property
    def run_keys(self) -> list[str]:
        return [row["key"] for row in self.rows]

    @property
    def result(self) -> SweepExport:
        """What judges and figures read."""
        return self

    @cached_property
    def swept(self) -> list[Row]:
        """Runs of the grids, of earlier versions' grids too."""
        return [row for row in self.rows if row["stage"] != SEEDS]

    @cached_property
    def repeated(self) -> list[Row]:
        """Runs that repeat a selected configuration with other seeds."""
        return [row for row in self.rows if row["stage"] == SEEDS]

    @cached_property
    def optimizers(self) -> list[str]:
        """The paper's first, in its order."""
        labels = {get_label(row) for row in self.swept}
        cells = [cell for cell in LABELS.values() if cell in labels]
        return cells + sorted(labels - set(cells))

    @cached_property
    def varied(self) -> list[str]:
        """The fields for which some optimizer tried more than one value."""
        fields = dict.fromkeys(name for row in self.swept for name in row["settings"])
        return [
            field
            for field in fields
            if field not in ("optimizer", "seed")
            and any(len({_to_text(r["settings"].get(field)) for r in self.rows_of(o)}) > 1 for o in self.optimizers)
        ]

    def rows_of(self, optimizer: str) -> list[Row]:
        """Its runs in `swept`, done or not."""
        return [row for row in self.swept if get_label(row) == optimizer]

    def judged(self, optimizer: str) -> list[Row]:
        """Its runs that decide claims: those in the grid, or all if this version does not have the grid."""
        return [row for row in self.rows_of(optimizer) if self.grid is None or row["key"] in self.grid]

    def value(self, row: Row, metric: str) -> float | None:
        """None if the run is not done; the worst possible value if it failed."""
        if row["status"] in OPEN:
            return None
        if row["status"] in FAILED:
            return -math.inf if self.higher else math.inf
        return float(row["value"] if metric == self.metric else row["metrics"][metric])

    def values(self, rows: Sequence[Row], metric: str) -> list[float]:
        return [value for row in rows if (value := self.value(row, metric)) is not None]

    def pairs(self, one: str, other: str, metric: str) -> list[tuple[float, float]]:
        """Values of two optimizers with the same settings; eps_s is compared if both have one."""
        rows = [self.judged(name) for name in (one, other)]
        both = all(row["settings"].get("eps_s") is not None for of in rows for row in of)
        left_out = ("optimizer",) if both else ("optimizer", "eps_s")
        ours, theirs = ({settings_without(row, *left_out): self.value(row, metric) for row in of} for of in rows)
        pairs = [(value, theirs.get(settings)) for settings, value in ours.items()]
        return [(first, second) for first, second in pairs if first is not None and second is not None]

    def measures(self, metric: str) -> bool:
        """Whether every finished run has the metric."""
        finished = [row for row in self.rows if row["status"] == "finished"]
        return metric == self.metric or (
            bool(finished) and all(is_number(row["metrics"].get(metric)) for row in finished)
        )

    @property
    def train_metric(self) -> str | None:
        """The sweep's metric on training data, if it was measured."""
        kind = self.metric.partition("_")[2]
        other = f"train_{kind}"
        return other if kind and other != self.metric and self.measures(other) else None

    def selected_row(self, optimizer: str) -> Row | None:
        return next((row for row in self.rows_of(optimizer) if row["key"] in self.selected.values()), None)

    def seeds_of(self, selected: Row) -> list[Row]:
        """The selected run and those that repeat it."""
        same = settings_without(selected, "seed")
        return [selected, *(row for row in self.repeated if settings_without(row, "seed") == same)]


def collect(sources: Sources) -> list[Record]:
    benchmarks = sources.read_benchmark("engine.json", "engine", {"environment": dict, "rows": list})
    return [*load_exports(*sources.folders, warn=sources.warn), *benchmarks]


def load_exports(*roots: Path, warn: Callable[[str], object]) -> list[SweepExport]:
    """Every export in the folders. A file that cannot be read is left out with a warning."""

    def try_to_read(path: Path) -> SweepExport | None:
        try:
            return read_export(path)
        except (OSError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            warn(f"{path} is left out, because it is no export of a sweep: {reason}; export the sweep again")
            return None

    paths = [path for root in roots for path in sorted(root.glob(f"{PREFIX}*.json"))]
    return list({export.key: export for path in paths if (export := try_to_read(path)) is not None}.values())


def read_export(path: Path) -> SweepExport:
    """Read one file. Raises ValueError if it is damaged, or not an export."""
    text = path.read_text(encoding="utf-8")
    whole = json.loads(text, parse_int=_parse_int)
    _check(whole)
    if not pop_checksum(whole):
        raise InvalidInput("its content is not what was written")
    name, rows = whole["sweep"], {row["key"]: row for row in whole["runs"]}
    swept = [row for row in whole["runs"] if row["stage"] != SEEDS]
    grid = _find_grid(name, rows)
    left = sum(key not in rows for key in grid or ())
    left += sum(row["status"] in OPEN for row in swept if grid is None or row["key"] in grid)
    values = {
        field: [row["settings"].get(field) for row in swept]
        for field in dict.fromkeys(field for row in swept for field in row["settings"])
    }
    shared = {field: of[0] for field, of in values.items() if len(set(map(_to_text, of))) == 1}
    code = {field: ", ".join(sorted({row[field] for row in whole["runs"] if row.get(field)})) for field in CODE}
    environment = {
        **{field: text for field, text in code.items() if text},
        "workers": len({row["worker"] for row in whole["runs"] if row.get("worker")}),
        "made": whole["made"],
    }
    return SweepExport(
        key=f"{PREFIX}{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}",
        name=PREFIX + name.removesuffix(SAMPLE),
        recipe={"sweep": name, **shared},
        environment=environment,
        sweep=name,
        metric=whole["metric"],
        higher=whole["higher"],
        test_because=whole.get("test_because") or "",
        share_trained=whole.get("occupied"),
        selected=whole["selected"],
        rows=whole["runs"],
        grid=grid,
        left=left,
    )


def is_number(value: Any) -> bool:
    """Whether a value of JSON, as Python reads it, is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _parse_int(text: str) -> int:
    """As int; raises InvalidInput for a number that has no float, which no figure can show."""
    value = int(text)
    if abs(value) > sys.float_info.max:
        raise InvalidInput(f"it has a number of {len(text)} digits")
    return value


def _to_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _check(whole: Any) -> None:
    _check_types(whole, WHOLE, "the file")
    if not whole["runs"]:
        raise InvalidInput("it has no runs")
    if not (whole.get("occupied") is None or is_number(whole["occupied"])):
        raise InvalidInput(f"it has occupied {whole['occupied']!r}")
    for index, row in enumerate(whole["runs"]):
        where = f"run {index}"
        _check_types(row, ROW, where)
        if row["status"] not in (*DONE, *OPEN):
            raise InvalidInput(f"{where} has the status {row['status']!r}")
        if (row["status"] == "finished") != is_number(row.get("value")):
            raise InvalidInput(f"{where} is {row['status']} and has the value {row.get('value')!r}")
        for field in ("optimizer", "worker", *CODE):
            if not isinstance(row.get(field), str | None):
                raise InvalidInput(f"{where} has {field} {row[field]!r}")
        if row.get("seconds") is not None and not is_number(row["seconds"]):
            raise InvalidInput(f"{where} has seconds {row['seconds']!r}")
    if len({row["key"] for row in whole["runs"]}) < len(whole["runs"]):
        raise InvalidInput("two runs have one key")
    if all(row["stage"] == SEEDS for row in whole["runs"]):
        raise InvalidInput("it has no run of a grid")
    finished = {_to_text(row["key"]) for row in whole["runs"] if row["status"] == "finished"}
    if not {_to_text(key) for key in whole["selected"].values()} <= finished:
        raise InvalidInput("what it selected is none of its finished runs")


def _check_types(value: Any, types: dict[str, type], where: str) -> None:
    if not isinstance(value, dict):
        raise InvalidInput(f"{where} is not an object")
    for name, kind in types.items():
        if not isinstance(value.get(name), kind):
            raise InvalidInput(f"{where} has no {name} that is a {kind.__name__}")


def _find_grid(name: str, rows: dict[str, Row]) -> frozenset[str] | None:
    """The keys of one of our own sweeps; None for others, which are code that a report should not run.

    A stage that depends on results is included once the runs before it are done.
    """
    if name not in SWEEPS:
        return None
    sweep, recipes = SWEEPS[name](), dict[str, Recipe]()
    for stage in sweep.stages:
        if callable(stage):
            if any(key not in rows or rows[key]["status"] in OPEN for key in recipes):
                break
            outcomes = [Outcome(recipes[key], rows[key].get("value")) for key in sorted(recipes)]
            stage = stage(Results(outcomes, sweep.higher))
        recipes |= {recipe.key: recipe for recipe in stage}
    return frozenset(recipes)
