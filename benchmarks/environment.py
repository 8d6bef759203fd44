"""The machine and commit of a benchmark, and the folder of its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mvngrad_lab.store import environment as lab

RESULTS = Path(__file__).parents[1] / "results"


def environment(device: str) -> dict[str, Any]:
    return lab.environment(device, RESULTS.parent / "benchmarks")
