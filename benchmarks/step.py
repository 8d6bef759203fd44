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
from typing import Any

import torch

import mvngrad
from benchmarks.bytes_touched import bytes_touched
from benchmarks.environment import RESULTS, environment
from benchmarks.models import MODELS, Shapes

CELLS = ["Adam", "AdaBelief", "LaProp", "MVNGrad"]
PATHS = {"eager": {"foreach": False}, "foreach": {"foreach": True}}


INTRODUCTION = """\
Measured by `python -m benchmarks.step`. A ratio is to torch's Adam(W) on the same path, in the same run: the median
over rounds and its quartiles. The limit is the ratio of the bytes that the operations of the two paths read and write,
counted, plus 10%. Bytes are per parameter: touched by a step, and held at its peak beyond parameters, gradients and
state (where the device's allocator tells)."""


def candidates(decoupled: bool) -> dict[str, tuple[str, Callable[..., torch.optim.Optimizer], dict[str, Any]]]:
    """Name -> the reference it is compared with, and how to make it."""
    w = "W" if decoupled else ""
    made = {}
    for path, options in PATHS.items():
        reference = f"torch Adam{w} {path}"
        made[reference] = (reference, getattr(torch.optim, f"Adam{w}"), options)
        for cell in CELLS:
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


def temporaries(step: Callable[[], Any], device: str) -> int | None:
    """Bytes a step holds at its peak beyond what is there before it; the CPU's allocator does not tell."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(shapes: Shapes, device: str, rounds: int, decoupled: bool) -> list[dict[str, Any]]:
    params = parameters(shapes, device)
    size = sum(p.numel() for p in params)
    made = candidates(decoupled)
    optimizers = {name: make(params, lr=1e-6, **options) for name, (_, make, options) in made.items()}
    for optimizer in optimizers.values():  # two steps to create the state and warm up
        optimizer.step()
        optimizer.step()
    touched = {name: bytes_touched(optimizer.step) for name, optimizer in optimizers.items()}
    peaks = {name: temporaries(optimizer.step, device) for name, optimizer in optimizers.items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            times[name].append(seconds(optimizer.step, device))
    rows = []
    for name, (reference, _, _) in made.items():
        ratios = [a / b for a, b in zip(times[name], times[reference], strict=True)]
        rows.append(
            {
                "name": name,
                "milliseconds": 1e3 * statistics.median(times[name]),
                "reference": reference,
                "ratio": statistics.median(ratios),
                "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
                "limit": 1.1 * touched[name] / touched[reference],
                "touched_per_parameter": touched[name] / size,
                "peak_temporaries_per_parameter": None if (peak := peaks[name]) is None else peak / size,
                "rounds": rounds,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| step | ms | ratio (quartiles) | limit | bytes touched | bytes held |", "|---|---|---|---|---|---|"]
    for row in rows:
        low, high = row["ratio_quartiles"]
        held = row["peak_temporaries_per_parameter"]
        lines.append(
            f"| {row['name']} | {row['milliseconds']:.2f} | {row['ratio']:.2f} ({low:.2f}-{high:.2f}) "
            f"| {row['limit']:.2f} | {row['touched_per_parameter']:.0f} | {'' if held is None else f'{held:.1f}'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt2-30m"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", default=RESULTS, help="folder for the results")
    args = parser.parse_args()

    result: dict[str, Any] = {"environment": environment(args.device), "models": {}}
    text = [f"# One optimizer step on {result['environment']['device']}", ""]
    text += [INTRODUCTION, ""]
    text += [", ".join(f"{key} {value}" for key, value in result["environment"].items()), ""]
    for model in args.models:
        shapes = MODELS[model]
        for decoupled in (False, True):
            rows = measure(shapes, args.device, args.rounds, decoupled)
            decay = "decoupled" if decoupled else "none"
            result["models"].setdefault(model, {})[decay] = rows
            text += [f"## {model}, {len(shapes)} float32 tensors, weight decay: {decay}, {args.rounds} rounds", ""]
            text += [table(rows), ""]
            print(f"{model} ({decay})\n{table(rows)}", flush=True)
    for suffix, content in ((".json", json.dumps(result, indent=1) + "\n"), (".md", "\n".join(text))):
        path = RESULTS.__class__(args.out) / f"step-{args.device}{suffix}"
        path.write_text(content)
        print(path)


if __name__ == "__main__":
    main()
