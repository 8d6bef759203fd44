"""Run targets and keep their results: what is done is not done again, and what fails takes nothing with it."""

from __future__ import annotations

import hashlib
import os
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mvngrad_lab.experiments import TARGETS, Module, Target, Tick
from mvngrad_lab.store import Slot, now
from mvngrad_lab.store.environment import LIBRARY, PACKAGE, environment
from mvngrad_lab.training.events import Event


class UnknownTarget(ValueError):
    """A target that does not exist was asked for."""


@dataclass(frozen=True)
class Outcome:
    target: str
    status: str
    """ran, kept (it was there already) or failed."""
    seconds: float = 0.0
    error: str = ""


class Display(Protocol):
    """What a person sees while targets run."""

    def plan(self, seconds: dict[str, float]) -> None:
        """What will run, and about how long each takes."""

    def begin(self, target: Target, interrupted: bool) -> Tick: ...

    def event(self, event: Event) -> None:
        """What a training of a target tells."""

    def end(self, outcome: Outcome) -> None: ...


def chosen(names: Sequence[str]) -> list[Target]:
    """The targets of these names, in the order they are listed; for none, all that a CPU can run."""
    if unknown := [name for name in names if name not in TARGETS]:
        raise UnknownTarget(f"no target {', '.join(map(repr, unknown))}; there are: {', '.join(TARGETS)}")
    return [target for name, target in TARGETS.items() if name in names or not (names or target.gpu)]


def code() -> str:
    """A hash of the code that computes results: a result of another version is computed again.

    Judges and figures only read results, so they do not count.
    """
    folders = [LIBRARY, PACKAGE / "experiments", PACKAGE / "tasks" / "mnist"]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    content = [path.read_bytes() for path in files if not path.stem.endswith(("judge", "figure"))]
    return hashlib.sha256(b"".join(content)).hexdigest()[:12]


def reproduce(
    targets: Iterable[Target], display: Display, *, root: Path, quick: bool = False, data: Path | None = None
) -> list[Outcome]:
    """Run what the store does not have yet; an error ends its target, and Ctrl-C the rest."""
    version, outcomes = code(), list[Outcome]()
    waiting: list[tuple[Target, Module, Slot | None]] = []
    for target in targets:
        module = target.load()
        # The runs of a target for GPUs are in the store one by one, and it skips them by itself.
        slot = None if target.gpu else Slot(module.recipe(quick, data), root)
        run = slot.run if slot else None
        if run is not None and run.environment.get("code") == version:
            outcomes.append(Outcome(target.name, "kept", run.result["seconds"]))
            display.end(outcomes[-1])
        else:
            waiting.append((target, module, slot))
    display.plan({target.name: target.seconds[quick] for target, _, _ in waiting})
    for target, module, slot in waiting:
        tick, start = display.begin(target, slot is not None and slot.interrupted), time.perf_counter()
        try:
            if slot is None:
                module.train_all(root, data, tick, display.event)
            else:
                slot.begin({**environment(), "code": version, "quick": quick, "made": now()})
                result = module.run(slot.recipe, data, tick)
                slot.finish({**result, "seconds": round(time.perf_counter() - start, 2)})
            outcomes.append(Outcome(target.name, "ran", time.perf_counter() - start))
        except Exception as error:
            if os.environ.get("MVNGRAD_DEBUG"):
                raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f" ({Path(last.filename).name}, line {last.lineno})"
            outcomes.append(Outcome(target.name, "failed", error=f"{type(error).__name__}: {error}{where}"))
        display.end(outcomes[-1])
    return outcomes
