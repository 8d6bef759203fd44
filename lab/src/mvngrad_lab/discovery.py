"""Find the experiments, which are folders, and import their modules.

The experiments import the report, so the report imports them by this alone.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from mvngrad_lab.recipe import Recipe

EXPERIMENTS = "mvngrad_lab.experiments"
"""The package whose folders are experiments; its docstring says what they hold."""
Tick = Callable[[float], None]
"""Called with the share of an experiment that is done."""
OnEvent = Callable[[Any], Any]
"""Called with each event of a training (mvngrad_lab.training.events)."""


class RunModule(Protocol):
    """What the run module of an experiment defines: the first two functions, or with `gpu` the third."""

    __file__: str

    def make_recipe(self, quick: bool, data: Path | None) -> Recipe:
        """The settings of a run; `data` is the folder given on the command line, if any."""

    def run(self, recipe: Any, data: Path | None, tick: Tick) -> dict[str, Any]:
        """Run and return the result as plain JSON values."""

    def train_all(self, root: Path, data: Path | None, tick: Tick, on_event: OnEvent) -> None:
        """Train many networks, each stored as a run of its own."""


@dataclass(frozen=True)
class Experiment:
    """Something that `mvngrad reproduce` can run."""

    name: str
    """On the command line; also the name of its runs and the `target` of its claims."""
    summary: str
    seconds: tuple[float, float]
    """Expected duration in full, and with `quick`: on one core of the machine of `cli.progress.PROBE_SECONDS`, or on an
    H200."""
    module: str
    """The full name of its run module."""
    jobs: int = 1
    """How many processes it can use, if there are as many cores."""
    gpu: bool = False
    """Needs a GPU, so it runs only if named on the command line."""
    on_request: bool = False
    """Takes long, so it runs only if named, too."""
    cpu_form: str = ""
    """The name of a smaller experiment on the same question that needs no GPU, if there is one."""
    seconds_by_data: Mapping[str, float] = field(default_factory=dict)
    """Expected duration in full by `data` of the recipe, where it is not that of `seconds`."""

    def expected_seconds(self, quick: bool, recipe: Recipe | None) -> float:
        """Expected duration of a recipe; without one, of the trainings on a GPU."""
        usual = self.seconds[quick]
        return usual if quick else self.seconds_by_data.get(getattr(recipe, "data", ""), usual)

    def load(self) -> RunModule:
        return cast(RunModule, import_module(self.module))


def find_topics() -> list[str]:
    """The names of all folders of experiments, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(import_module(EXPERIMENTS).__path__) if module.ispkg)


def find_experiments() -> dict[str, Experiment]:
    """All experiments by name: those for a CPU first, the shortest first."""
    topics = (import_module(f"{EXPERIMENTS}.{topic}") for topic in find_topics())
    experiments = [experiment for topic in topics for experiment in getattr(topic, "EXPERIMENTS", ())]
    experiments.sort(key=lambda each: (each.gpu, each.seconds[0], each.name))
    return {experiment.name: experiment for experiment in experiments}


def import_all(part: str) -> Iterator[ModuleType]:
    """Import the module `part`, such as "judge", of every topic that has one."""
    for topic in find_topics():
        if find_spec(name := f"{EXPERIMENTS}.{topic}.{part}") is not None:
            yield import_module(name)
