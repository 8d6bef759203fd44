"""One optimizer step: our cells beside torch's Adam, path by path, in one run.

    python -m benchmarks.step [--device cpu|cuda] [--models gpt2-30m ...] [--rounds 30]

Every round steps every candidate once, so what slows the machine slows all of them; a ratio is the median over rounds
of candidate over reference. Writes results/step-DEVICE.json and .md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mvngrad
from benchmarks.environment import RESULTS, environment
from benchmarks.models import MODELS, Shapes
from benchmarks.traffic import bytes_touched, peak_of

# Bytes a step must move for each parameter: gradient read, parameter and float32 state read and written.
NEEDED = {"Adam": 28, "AdaBelief": 28, "LaProp": 28, "MVNGrad": 36}
PATHS = {"eager": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


INTRODUCTION = """\
Measured by `python -m benchmarks.step`. A ratio is to torch's Adam(W) on the same path, in the same run: the median
over rounds and its quartiles. The limit for eager and foreach is the ratio of the bytes that a step must move (28 for
each parameter, 36 for MVN-Grad) plus 10%. Bytes are for each parameter: touched by the operations of a step as they
stand, and held at its peak beyond parameters, gradients and state. On CUDA, *of copy* is the bytes a step must move
over its time, as a fraction of the bandwidth of a copy in the same run; *host* is the time until `step` returns, and
*graph* the step replayed from a CUDA graph, which leaves the device's time alone."""


def candidates(decoupled: bool) -> dict[str, tuple[str, Callable[..., torch.optim.Optimizer], dict[str, Any]]]:
    """Name -> the reference it is compared with, and how to make it."""
    w = "W" if decoupled else ""
    made = {}
    for path, options in PATHS.items():
        reference = f"torch Adam{w} {path}"
        made[reference] = (reference, getattr(torch.optim, f"Adam{w}"), options)
        for cell in NEEDED:
            made[f"{cell}{w} {path}"] = (reference, getattr(mvngrad, f"{cell}{w}"), options)
    return made


def parameters(shapes: Shapes, device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, device=device)

    params = [torch.nn.Parameter(draw(shape, 0.02)) for shape in shapes]
    for p in params:
        p.grad = draw(tuple(p.shape), 1e-3)
    return params


def seconds(step: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start_event.record()
    step()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event) / 1e3


def host_seconds(step: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def held(step: Callable[[], Any], device: str) -> int:
    """Bytes a step holds at its peak beyond what is there before it."""
    if device == "cpu":
        return peak_of(step)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def graph_seconds(step: Callable[[], Any], rounds: int) -> float:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    return statistics.median(seconds(graph.replay, "cuda") for _ in range(rounds))


def copy_bandwidth() -> float:
    """Bytes read and written in a second by a copy of 2 GiB on the GPU."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(seconds(lambda: target.copy_(source), "cuda") for _ in range(10))


def measure(shapes: Shapes, device: str, rounds: int, decoupled: bool, bandwidth: float | None) -> list[dict[str, Any]]:
    params = parameters(shapes, device)
    size = sum(p.numel() for p in params)
    made = candidates(decoupled)
    optimizers = {
        name: make(params, lr=1e-6, capturable=device == "cuda" and name.endswith("fused"), **options)
        for name, (_, make, options) in made.items()
    }
    for optimizer in optimizers.values():  # two steps to create the state and warm up
        optimizer.step()
        optimizer.step()
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            times[name].append(seconds(optimizer.step, device))
    rows = []
    for name, (reference, make, _) in made.items():
        step, fused = optimizers[name].step, name.endswith("fused")
        graph = graph_seconds(step, rounds) if fused and bandwidth else None
        ratios = [a / b for a, b in zip(times[name], times[reference], strict=True)]
        needed = NEEDED[make.__name__.removesuffix("W")]
        rows.append(
            {
                "name": name,
                "milliseconds": 1e3 * statistics.median(times[name]),
                "reference": reference,
                "ratio": statistics.median(ratios),
                "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
                "limit": None if fused else 1.1 * needed / NEEDED["Adam"],
                "touched": None if fused else bytes_touched(step) / size,
                "held": None if fused and device == "cpu" else held(step, device) / size,
                "of_copy": bandwidth and needed * size / statistics.median(times[name]) / bandwidth,
                "host_microseconds": bandwidth and 1e6 * statistics.median(host_seconds(step) for _ in range(rounds)),
                "graph_milliseconds": graph and 1e3 * graph,
                "graph_of_copy": graph and bandwidth and needed * size / graph / bandwidth,
                "rounds": rounds,
            }
        )
    return rows


FIGURES = [  # label, key, digits
    ("limit", "limit", 2),
    ("touched", "touched", 0),
    ("held", "held", 1),
    ("of copy", "of_copy", 2),
    ("host, us", "host_microseconds", 0),
    ("graph, ms", "graph_milliseconds", 3),
    ("graph, of copy", "graph_of_copy", 2),
]


def table(rows: list[dict[str, Any]]) -> str:
    def shown(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    columns = (
        "step",
        "ms",
        "ratio (quartiles)",
        "limit",
        "touched",
        "held",
        "of copy",
        "host, us",
        "graph, ms",
        "of copy",
    )
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        low, high = row["ratio_quartiles"]
        cells = [row["name"], shown(row["milliseconds"], 2), f"{row['ratio']:.2f} ({low:.2f}-{high:.2f})"]
        cells += [shown(row[key], digits) for _, key, digits in FIGURES]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt2-30m"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", default=RESULTS, help="folder for the results")
    args = parser.parse_args()

    bandwidth = copy_bandwidth() if args.device == "cuda" else None
    result: dict[str, Any] = {"environment": environment(args.device), "copy_bytes_per_second": bandwidth, "models": {}}
    text = [f"# One optimizer step on {result['environment']['device']}", ""]
    text += [INTRODUCTION, ""]
    text += [", ".join(f"{key} {value}" for key, value in result["environment"].items()), ""]
    for model in args.models:
        shapes = MODELS[model]
        for decoupled in (False, True):
            rows = measure(shapes, args.device, args.rounds, decoupled, bandwidth)
            decay = "decoupled" if decoupled else "none"
            result["models"].setdefault(model, {})[decay] = rows
            text += [f"## {model}, {len(shapes)} float32 tensors, weight decay: {decay}, {args.rounds} rounds", ""]
            text += [table(rows), ""]
            print(f"{model} ({decay})\n{table(rows)}", flush=True)
    for suffix, content in ((".json", json.dumps(result, indent=1) + "\n"), (".md", "\n".join(text))):
        path = Path(args.out) / f"step-{args.device}{suffix}"
        path.write_text(content)
        print(path)


if __name__ == "__main__":
    main()
