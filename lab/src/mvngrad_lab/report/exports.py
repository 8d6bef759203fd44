"""Sweeps as `mvngrad sweep export NAME FILE.json` writes them, read without the engine that ran them.

A file comes from anywhere, so its shape is checked once, here; what uses it need not.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mvngrad_lab.experiments.sweeps.plans import SWEEPS, Outcome, Results
from mvngrad_lab.recipe import Recipe
from mvngrad_lab.store import FinishedRun

PREFIX = "sweep-"
"""Of files, and of the targets of claims that a sweep decides."""
SAMPLE = "-5k"
"""Ends the name of a sweep on a sample of the data, which decides the same claims where there is no other."""
SEEDS = "seeds"
"""The stage of runs that only repeat a selected configuration."""
LOST, OPEN = ("diverged", "raised"), ("waiting", "running", "lost")
CODE = ("commit", "mvngrad", "torch", "python")
"""What results that are compared should have in common."""

WHOLE: dict[str, type] = {"sweep": str, "made": str, "metric": str, "higher": bool, "selected": dict, "runs": list}
ROW: dict[str, type] = {"key": str, "stage": str, "status": str, "settings": dict, "metrics": dict}


class SweepExport(FinishedRun):
    """An export, as a record of the report."""

    @property
    def title(self) -> str:
        return f"Sweep {self.result['sweep']}"

    @property
    def run_keys(self) -> list[str]:
        return [row["key"] for row in self.result["runs"]]

    @property
    def left(self) -> int:
        return int(self.result["left"])


def sweeps(*roots: Path, tell: Callable[[str], object]) -> list[SweepExport]:
    """Every export in the folders, as a run whose result is the export. One that cannot be read is told and left out.

    The result also has `grid`: the keys of all configurations as this version knows the sweep, or None; and `left`, how
    many of these are to come.
    """
    paths = [path for root in roots for path in sorted(root.glob(f"{PREFIX}*.json"))]
    read_ones = [run for path in paths if (run := _read_or_told(path, tell)) is not None]
    return list({run.key: run for run in read_ones}.values())


def _read_or_told(path: Path, tell: Callable[[str], object]) -> SweepExport | None:
    try:
        return read(path)
    except (OSError, ValueError, RecursionError) as error:
        tell(f"{path} is left out, because it is no export of a sweep: {' '.join(str(error).split())}")
        return None


def read(path: Path) -> SweepExport:
    """
    Raises:
        ValueError: the file is damaged, or not an export.
    """
    text = path.read_text(encoding="utf-8")
    whole = _checked(json.loads(text))
    name, rows = whole["sweep"], {row["key"]: row for row in whole["runs"]}
    swept = [row for row in whole["runs"] if row["stage"] != SEEDS]
    grid = _grid(name, rows)
    left = sum(key not in rows for key in grid or ())
    left += sum(row["status"] in OPEN for row in swept if grid is None or row["key"] in grid)
    fields = dict.fromkeys(field for row in swept for field in row["settings"])
    shared = {
        f: swept[0]["settings"].get(f) for f in fields if len({_text(row["settings"].get(f)) for row in swept}) == 1
    }
    environment = {
        **{field: ", ".join(sorted({row[field] for row in whole["runs"] if row.get(field)})) for field in CODE},
        "workers": len({row["worker"] for row in whole["runs"] if row.get("worker")}),
        "made": whole["made"],
    }
    key = f"{PREFIX}{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    result = {**whole, "grid": grid, "left": left}
    return SweepExport(key, PREFIX + name.removesuffix(SAMPLE), {"sweep": name, **shared}, environment, result)


def number(value: Any) -> bool:
    """Whether a value of JSON, as Python reads it, is a number one can compute with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _checked(whole: Any) -> dict[str, Any]:
    _of_kind(whole, WHOLE, "the file")
    if not whole["runs"]:
        raise ValueError("it has no runs")
    if not (whole.get("occupied") is None or number(whole["occupied"])):
        raise ValueError(f"it has occupied {whole['occupied']!r}")
    for place, row in enumerate(whole["runs"]):
        where = f"run {place}"
        _of_kind(row, ROW, where)
        if row["status"] not in ("finished", *LOST, *OPEN):
            raise ValueError(f"{where} has the status {row['status']!r}")
        if (row["status"] == "finished") != number(row.get("value")):
            raise ValueError(f"{where} is {row['status']} and has the value {row.get('value')!r}")
        for field in ("optimizer", "worker", *CODE):
            if not isinstance(row.get(field), str | None):
                raise ValueError(f"{where} has {field} {row[field]!r}")
        if row.get("seconds") is not None and not number(row["seconds"]):
            raise ValueError(f"{where} has seconds {row['seconds']!r}")
    keys = [row["key"] for row in whole["runs"]]
    if len(set(keys)) < len(keys):
        raise ValueError("two runs have one key")
    if all(row["stage"] == SEEDS for row in whole["runs"]):
        raise ValueError("it has no run of a grid")
    finished = {_text(row["key"]) for row in whole["runs"] if row["status"] == "finished"}
    if not {_text(key) for key in whole["selected"].values()} <= finished:
        raise ValueError("what it selected is none of its finished runs")
    checked: dict[str, Any] = whole
    return checked


def _of_kind(value: Any, kinds: dict[str, type], where: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not an object")
    for name, kind in kinds.items():
        if not isinstance(value.get(name), kind):
            raise ValueError(f"{where} has no {name} that is a {kind.__name__}")


def _grid(name: str, rows: dict[str, dict[str, Any]]) -> list[str] | None:
    """Of a sweep of ours, as far as it is known: a stage that follows from results needs these.

    Others' sweeps are code that a report should not run.
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
    return list(recipes)
