"""Experiments, one folder for each topic; to add one is to add a folder, because nothing else lists them.

A folder mvngrad_lab/experiments/<topic>/ is found here and in every other folder of sys.path. It holds

    __init__.py   EXPERIMENTS: what `mvngrad reproduce` can run. Read to print help, so it imports nothing heavy.
    run.py        make_recipe and run, or train_all for an experiment that needs a GPU: see RunModule
    records.py    collect(sources): what the report reads besides the results of run.py, such as tables; train_all, if
                  all there is to run is the trainings of a table
    judge.py      one function for each claim, marked with `mvngrad_lab.report.verdicts.judges`
    figure.py     FIGURES: a function for each record that it draws; FINDINGS, LEAD: see mvngrad_lab.report.findings
    power.py      make_sentences(): the sentence on power in the rule of each claim, for `mvngrad_lab.report.power`
    claims.toml   the claims and their rules, as `mvngrad_lab.report.claims` reads them
    README.md     the question, what runs, what decides

Only `__init__.py` is required. judge.py and figure.py import neither torch nor the training.

`reproduce` runs experiments and stores their results. Finished ones are not repeated, and a failure does not stop the
others.
"""

from __future__ import annotations

import hashlib
import os
import pkgutil
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mvngrad_lab.discovery import Experiment, OnEvent, RunModule, Tick, find_experiments
from mvngrad_lab.errors import UserError
from mvngrad_lab.store import RunFolder, timestamp
from mvngrad_lab.store.environment import LIBRARY, get_environment
from mvngrad_lab.store.lock import Check

__all__ = ["Experiment", "OnEvent", "RunModule", "Tick", "find_experiments", "reproduce", "select_experiments"]
__path__ = pkgutil.extend_path(__path__, __name__)

LAB = Path(__file__).parents[1]
SHARED = ("*.py", "tasks/**/*.py", "training/**/*.py")
"""Files of the lab that results of every experiment may depend on."""
AFTER_THE_RUN = ("judge.py", "figure.py", "records.py", "power.py")
"""Files of an experiment that no result depends on."""


@dataclass(frozen=True)
class Outcome:
    experiment: Experiment
    status: str
    """ran, stored (it had finished before) or failed."""
    seconds: float = 0.0
    error: str = ""


class Display(Protocol):
    """What a person sees while experiments run."""

    def plan(self, experiments: Sequence[tuple[Experiment, float]]) -> None:
        """Called once with what will run, and its expected seconds where `Experiment.seconds` was measured."""

    def begin(self, experiment: Experiment, interrupted: bool) -> Tick: ...

    def event(self, event: Any) -> None:
        """Called with each event of a training."""

    def end(self, outcome: Outcome) -> None: ...


def select_experiments(names: Sequence[str]) -> list[Experiment]:
    """The experiments of these names, in the order of `find_experiments`; without names those that need no GPU
    and are not long."""
    experiments = find_experiments()
    if unknown := [name for name in names if name not in experiments]:
        raise UserError(f"no experiment {', '.join(map(repr, unknown))}; choose from {', '.join(experiments)}")
    return [each for name, each in experiments.items() if name in names or not (names or each.gpu or each.on_request)]


def code_hash(experiment: Experiment) -> str:
    """Hash the code that the experiment's results depend on; a stored result of other code is not reused."""
    folder = Path(experiment.load().__file__).parent
    paths = {*LIBRARY.rglob("*.py"), *LIBRARY.rglob("*.cpp")}
    paths |= {path for pattern in SHARED for path in LAB.glob(pattern)}
    paths |= {path for path in folder.glob("*.py") if path.name not in AFTER_THE_RUN}
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()[:12]


def reproduce(
    experiments: Iterable[Experiment],
    display: Display,
    *,
    root: Path,
    quick: bool = False,
    data: Path | None = None,
    check: Check = lambda: None,
) -> list[Outcome]:
    """Run what the store does not have yet. An exception ends its experiment, Ctrl-C ends all.

    `check` is called before each experiment and before its result is written.
    """
    outcomes = list[Outcome]()
    waiting: list[tuple[Experiment, RunModule, RunFolder | None, str]] = []
    for experiment in experiments:
        module, code = experiment.load(), code_hash(experiment)
        # train_all stores each training as a run of its own, and skips those that are stored.
        run_folder = None if experiment.gpu else RunFolder(module.make_recipe(quick, data), root)
        run = run_folder.run if run_folder else None
        if run is not None and not isinstance(run.result.get("seconds"), int | float):
            run = None  # its file was damaged
        if run is not None and run.environment.get("code") == code:
            outcomes.append(Outcome(experiment, "stored", run.result["seconds"]))
            display.end(outcomes[-1])
        else:
            waiting.append((experiment, module, run_folder, code))
    here = get_environment() if waiting else {}  # imports torch, which the plan's estimate need not contain
    display.plan(
        [(each, each.expected_seconds(quick, folder.recipe if folder else None)) for each, _, folder, _ in waiting]
    )
    for experiment, module, run_folder, code in waiting:
        check()
        tick, start = display.begin(experiment, run_folder is not None and run_folder.interrupted), time.perf_counter()
        try:
            if run_folder is None:
                module.train_all(root, data, tick, display.event)
            else:
                run_folder.start({**here, "code": code, "quick": quick, "made": timestamp()})
                _run_and_store(module, run_folder, data, tick, check)
            outcomes.append(Outcome(experiment, "ran", time.perf_counter() - start))
        except Exception as error:
            check()  # whose own error ends all
            if os.environ.get("MVNGRAD_DEBUG"):
                raise
            outcomes.append(Outcome(experiment, "failed", error=_describe(error)))
        display.end(outcomes[-1])
    return outcomes


def _run_and_store(module: RunModule, folder: RunFolder, data: Path | None, tick: Tick, check: Check) -> None:
    start = time.perf_counter()
    result = module.run(folder.recipe, data, tick)
    check()
    folder.finish({**result, "seconds": round(time.perf_counter() - start, 2)})


def _describe(error: Exception) -> str:
    """One line: the message, and for a bug its type and place."""
    if isinstance(error, UserError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"
