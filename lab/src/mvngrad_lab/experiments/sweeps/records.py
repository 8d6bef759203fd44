"""Exports of sweeps, and the benchmark of the engine that runs them."""

from __future__ import annotations

from mvngrad_lab.report.exports import sweeps
from mvngrad_lab.report.records import Record, Sources


def collect(sources: Sources) -> list[Record]:
    types = {"environment": dict, "rows": list}
    return [
        *sweeps(*sources.folders, tell=sources.warn),
        *sources.read_benchmark("engine.json", "engine", types),
    ]
