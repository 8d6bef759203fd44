"""The recipes of the four arms, what is compared of them, and the file that `run.py` wrote. README.md says why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import fmean
from typing import Any, ClassVar, Literal

from mvngrad_lab.report import BenchmarkFile, Sources
from mvngrad_lab.tasks.language.recipe import STAND_IN, WikiText103

FILE = "switch-gpt2.json"
ARMS = {"AdamW": "adamw", "MVN-GradW": "mvngradw", "converted": "mvngradw", "fresh": "mvngradw"}
"""Each arm's optimizer at the end; the last two begin with AdamW."""
SEEDS = (0, 1, 2)
WINDOW = 10
"""Steps over which a bump is averaged."""
AFTER = 200
"""Steps after the switch in which a bump is looked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switched(WikiText103):
    """GPT-2 30M on the stand-in, at the rate that was the best of four for Adam and MVN-Grad after 1,000 steps."""

    name: ClassVar[str] = "switch"

    text: str = STAND_IN
    lr: float = 3e-3
    beta1: float | None = 0.95
    beta2: float | None = 0.99
    weight_decay: float = 0.1
    steps: int = 2_000
    warmup_steps: int = 200
    eval_every: int = 5
    state: Literal["own", "converted", "fresh"] = "own"
    """Which state the optimizer has at half of the steps, if AdamW trained the first half: AdamW's, converted, or none.
    `own`: one optimizer trains all steps."""

    @property
    def half(self) -> int:
        """The step of the switch, at the end of an epoch."""
        return self.epochs // 2 * self.epoch_steps


def make_arms(seed: int, **settings: Any) -> dict[str, Switched]:
    """The four runs of a seed, AdamW first, because two of the others continue it."""
    return {
        arm: Switched(
            optimizer=optimizer,
            eps_s=1e-16 if optimizer == "mvngradw" else None,
            seed=seed,
            state=arm if arm in ("converted", "fresh") else "own",  # type: ignore[arg-type]
            **settings,
        )
        for arm, optimizer in ARMS.items()
    }


def find_bump(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest mean of `WINDOW` consecutive differences to the losses of AdamW on the same data."""
    differences = [loss - other for loss, other in zip(losses, reference, strict=True)]
    width = min(WINDOW, len(differences))
    return max(fmean(differences[i : i + width]) for i in range(len(differences) - width + 1))


def collect(sources: Sources) -> list[BenchmarkFile]:
    types = {"environment": dict, "seeds": list, "recipe": dict, "data": str}
    return sources.read_benchmark(FILE, "switch", types)
