"""Training loops side by side: each is set up once, then they take turns in rounds that share the time left."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class Arm(Protocol):
    def train(self, seconds: float) -> float:
        """Train for about so long; examples a second."""


@dataclass
class Running:
    """An arm that is set up, its row of a table, and its rate in each round."""

    arm: Any
    row: dict[str, Any]
    rates: list[float] = field(default_factory=list)


def reserved(device: torch.device) -> int:
    """Bytes that torch holds of a device, after giving back what it can; from here on its peak is counted anew."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


def peak(device: torch.device) -> int:
    """The most it held since."""
    return torch.cuda.max_memory_reserved() if device.type == "cuda" else 0


def side_by_side(
    makers: Mapping[str, Callable[[], Arm]],
    device: torch.device,
    title: str,
    args: argparse.Namespace,
    notes: list[str],
    end: float,
) -> dict[str, Running]:
    """The arms that can run here, none begun after `end`. Others are notes; `title` has a place for a name."""
    running: dict[str, Running] = {}
    for name, make in makers.items():
        before, start = reserved(device), time.perf_counter()
        if start >= end:
            notes.append(f"{title.format(name)}: no time was left of --within {args.within:g}")
            continue
        try:
            arm = make()
        except (ImportError, RuntimeError) as error:
            notes.append(f"{title.format(name)}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        setup = time.perf_counter() - start
        row = {"name": name, "setup_seconds": setup, "memory_bytes": peak(device) - before}
        running[name] = Running(arm, row)
    turns = [each for _ in range(args.rounds) for each in running.values()]
    for done, each in enumerate(turns):
        share = max(0.0, end - time.perf_counter()) / (len(turns) - done)
        each.rates.append(each.arm.train(min(args.seconds / args.rounds, share)))
    return running
