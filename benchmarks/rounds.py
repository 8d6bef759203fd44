"""Compare training loops: each is set up once, then they alternate in rounds that share the remaining time."""

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
        """Train for about `seconds` and return the examples per second."""


@dataclass
class TimedArm:
    """An arm after its set-up, its table row, and its rate in each round."""

    arm: Any
    row: dict[str, Any]
    rates: list[float] = field(default_factory=list)


def reset_peak_memory(device: torch.device) -> int:
    """Free torch's cached memory, reset the peak, and return the bytes that stay reserved on the device."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


def peak_reserved(device: torch.device) -> int:
    """The most bytes reserved since `reset_peak_memory`."""
    return torch.cuda.max_memory_reserved() if device.type == "cuda" else 0


def run_rounds(
    makers: Mapping[str, Callable[[], Arm]],
    device: torch.device,
    title: str,
    args: argparse.Namespace,
    notes: list[str],
    end: float,
) -> dict[str, TimedArm]:
    """Time the arms that can run here. Arms that fail, or would start after `end`, become notes.

    `title` is a format string for the name of an arm in these notes.
    """
    running: dict[str, TimedArm] = {}
    for name, make in makers.items():
        before, start = reset_peak_memory(device), time.perf_counter()
        if start >= end:
            notes.append(f"{title.format(name)}: no time left of --within {args.within:g}")
            continue
        try:
            arm = make()
        except (ImportError, RuntimeError) as error:
            notes.append(f"{title.format(name)}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        setup = time.perf_counter() - start
        row = {"name": name, "setup_seconds": setup, "memory_bytes": peak_reserved(device) - before}
        running[name] = TimedArm(arm, row)
    turns = [each for _ in range(args.rounds) for each in running.values()]
    for done, each in enumerate(turns):
        share = max(0.0, end - time.perf_counter()) / (len(turns) - done)
        each.rates.append(each.arm.train(min(args.seconds / args.rounds, share)))
    return running
