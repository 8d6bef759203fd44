"""What `run.py` wrote."""

from __future__ import annotations

from mvngrad_lab.report.records import BenchmarkFile, Sources

FILE = "switch-gpt2.json"


def collect(sources: Sources) -> list[BenchmarkFile]:
    types = {"environment": dict, "seeds": list, "recipe": dict, "data": str}
    return sources.read_benchmark(FILE, "switch", types)
