"""The first fused step on a CPU, with the compilation of its kernel, and the first one with a kernel in the cache.

    python -m benchmarks.first_step [--repeats 7] [--out results]

GPT-2 30M, MVNGradW; every step in a process of its own. Writes results/first-step-cpu.json and .md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.models import MODELS
from benchmarks.report import RESULTS, get_environment, markdown_table, write
from benchmarks.targets import verdict
from mvngrad import MVNGradW

BOUND = 1.5
"""The target for the first step, in seconds."""


def time_step() -> float:
    """The seconds of the first step of this process."""
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in MODELS["gpt2-30m"]]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = MVNGradW(params, fused=True)
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


def time_in_process(cache: str) -> float:
    """The seconds of the first step of a new process with this cache."""
    code = "from benchmarks.first_step import time_step; print(time_step())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "XDG_CACHE_HOME": cache},
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(done.stdout)


def make_markdown(results: dict[str, Any]) -> str:
    rows = [
        [name, f"{median(seconds):.2f}", f"{min(seconds):.2f} to {max(seconds):.2f}", str(len(seconds))]
        for name, seconds in results["seconds"].items()
    ]
    table = markdown_table(["first step", "median, s", "range, s", "processes"], rows)
    target = f"Target: {BOUND} s with compilation, {results['verdict']}."
    parts = ["# The first fused step on a CPU", table, target, f"Environment: `{results['environment']}`"]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="processes with an empty cache, and with a full one")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {"with compilation": [], "with the kernel in the cache": []}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for times in seconds.values():
                times.append(time_in_process(cache))
    results = {"environment": get_environment("cpu"), "seconds": seconds}
    results["verdict"] = verdict(median(seconds["with compilation"]), BOUND, at_least=False)
    write(results, args.out / "first-step-cpu", make_markdown(results))
    print(make_markdown(results))


if __name__ == "__main__":
    main()
