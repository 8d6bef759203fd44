"""Bytes and time of a step with small weights and state, against other implementations; and what a training needs.

    python -m benchmarks.memory [--model gpt2-124m|gpt2-30m|gpt2-tiny] [--rounds 20]

*Step*: every round steps every optimizer once, each on parameters and gradients of its own, in the dtypes it is meant
for; *of torch* is the median ratio to torch's fused AdamW in float32. *Training*: forward, backward and step of a GPT-2
on random tokens: its peak of allocated memory with one short sequence, and the phase that has it; and its time with a
usual batch, every round training every model once; release and the same without it also in rounds of their own.
Writes results/memory-DEVICE.json and .md.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import operator
import re
import statistics
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import mvngrad
from benchmarks.candidates import describe_error
from benchmarks.report import RESULTS, get_environment, markdown_table, write
from benchmarks.step import make_parameters
from benchmarks.targets import verdict
from benchmarks.timing import graph_seconds, time_step
from benchmarks.traffic import state_bytes
from mvngrad_lab.tasks.language.model import GPT2, GPT2_30M, GPT2_124M, GPT2_TINY, Shape

SHAPES = {
    "gpt2-124m": (GPT2_124M, (1, 256), (8, 1024)),
    "gpt2-30m": (GPT2_30M, (1, 256), (8, 512)),
    "gpt2-tiny": (GPT2_TINY, (1, 16), (2, 16)),
}
"""By name: the shape, and sequences and tokens of the batches that the peak and the time are measured with. The first
has few tokens, because gradients add to the peak only where activations do not take more than they do."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """An optimizer, the dtype of the weights that it steps, and whether it releases gradients."""

    name: str
    make: Callable[[Any], torch.optim.Optimizer]
    dtype: torch.dtype = torch.bfloat16
    release: bool = False
    ours: bool = True


def _peer(module: str, factory: str, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: getattr(import_module(module), factory)(params, lr=1e-6, **options)


def _ours(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: mvngrad.MVNGradW(params, lr=1e-6, **options)


SMALL = {"state_dtype": "int8", "master_bits": 24}
TORCH = "torch AdamW fused, float32"
ADAMW = "AdamW int8, 24-bit masters"
FLASH = "FlashAdamW, 24-bit masters"
MASTERS, LEAN = "MVNGradW int8, 24-bit masters", "MVNGradW lean int8, 24-bit masters"
RELEASE = f"{LEAN}, release"
ARMS = [
    Arm(TORCH, partial(torch.optim.AdamW, lr=1e-6, fused=True), torch.float32, ours=False),
    Arm("torch AdamW fused, bf16", partial(torch.optim.AdamW, lr=1e-6, fused=True), ours=False),
    Arm(FLASH, _peer("flashoptim", "FlashAdamW"), ours=False),
    Arm("torchao AdamW8bit, bf16", _peer("torchao.optim", "AdamW8bit"), ours=False),
    Arm("bitsandbytes AdamW8bit, bf16", _peer("bitsandbytes.optim", "AdamW8bit"), ours=False),
    Arm(ADAMW, lambda params: mvngrad.AdamW(params, lr=1e-6, **SMALL)),
    Arm("MVNGradW, float32", _ours(), torch.float32),
    Arm("MVNGradW int8, bf16 rounded at random", _ours(state_dtype="int8", stochastic_rounding=True)),
    Arm("MVNGradW int8, 32-bit masters", _ours(state_dtype="int8", master_bits=32)),
    Arm(MASTERS, _ours(**SMALL)),
    Arm(LEAN, _ours(lean=True, **SMALL)),
    Arm(RELEASE, _ours(lean=True, **SMALL), release=True),
]


def measure_steps(arms: list[Arm], model: str, device: str, rounds: int, notes: list[str]) -> list[dict[str, Any]]:
    """Bytes of weights and state per parameter, and times of a step, of each arm that runs."""
    with torch.device("meta"):
        shapes = [tuple(param.shape) for param in GPT2(SHAPES[model][0]).parameters()]
    running: dict[str, tuple[Arm, torch.optim.Optimizer, float, list[tuple[float, float]]]] = {}
    for arm in arms:
        if arm.release:
            continue
        before = requested_bytes(device)
        params = [torch.nn.Parameter(p.detach().to(arm.dtype)) for p in make_parameters(shapes, device)]
        for param in params:
            param.grad = torch.full_like(param, 1e-3)
        try:
            optimizer = arm.make(params)
            for _ in range(3):
                optimizer.step()
        except Exception as error:  # a peer or its compiler can raise anything
            if arm.ours:
                raise
            notes.append(f"{arm.name}: {describe_error(error)}")
            del params, param  # before the next arm counts
            continue
        kept = requested_bytes(device) - before - sum(param.nbytes for param in params)  # without gradients
        if device == "cpu":
            kept = sum(param.nbytes for param in params) + state_bytes(optimizer)
        running[arm.name] = arm, optimizer, kept / sum(param.numel() for param in params), []
    for _ in range(rounds):
        for _, optimizer, _, times in running.values():
            times.append(time_step(optimizer.step, device))
    reference = [whole for whole, _ in running[TORCH][3]]
    rows = []
    for arm, optimizer, kept, times in running.values():
        ratios = [whole / other for (whole, _), other in zip(times, reference, strict=True)]
        graph = None
        if device == "cuda":
            try:
                for group in optimizer.param_groups:
                    group["capturable"] = True
                optimizer.step()
                graph = 1e3 * graph_seconds(optimizer.step, rounds)
            except Exception as error:
                notes.append(f"{arm.name}, replayed from a graph: {describe_error(error)}")
        rows.append(
            {
                "name": arm.name,
                "bytes": kept,
                "milliseconds": 1e3 * statistics.median(whole for whole, _ in times),
                "of_torch": statistics.median(ratios),
                "of_torch_quartiles": statistics.quantiles(ratios, n=4, method="inclusive")[::2],
                "host_microseconds": 1e6 * statistics.median(host for _, host in times),
                "graph_milliseconds": graph,
            }
        )
    return rows


class Train(Protocol):
    def __call__(self, tokens: Tensor, peaks: dict[str, int] | None = None) -> None:
        """Train for one step. `peaks` gets the most bytes that are allocated in each of its phases, on a GPU.

        With `peaks` the loss is torch's. The lab's is faster, but its forward pass holds the gradient of the embedding
        in float32 and in bfloat16: with few tokens this peak is above all that backward holds with gradients.
        """


def start_training(arm: Arm, shape: Shape, device: str) -> Train:
    """A function that trains a GPT-2 for one step on the tokens it is given."""
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(arm.dtype)
        try:
            model = GPT2(shape)
        finally:
            torch.set_default_dtype(torch.float32)
    optimizer = arm.make(model.parameters())
    if arm.release:
        mvngrad.release_gradients(optimizer)  # type: ignore[arg-type]

    def train(tokens: Tensor, peaks: dict[str, int] | None = None) -> None:
        def record(phase: str) -> None:
            if peaks is not None and device == "cuda":
                peaks[phase] = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()

        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if peaks is not None and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with torch.autocast(device, torch.bfloat16, enabled=arm.dtype == torch.float32):
            if peaks is None:
                loss = model(inputs, targets)
            else:
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        record("forward")
        loss.backward()
        record("backward")
        optimizer.step()
        optimizer.zero_grad()
        record("step")

    return train


def draw_tokens(shape: Shape, sequences: int, length: int, device: str) -> Tensor:
    return torch.randint(shape.vocabulary, (sequences, length + 1), device=device)


def measure_training(arms: list[Arm], model: str, device: str, rounds: int, notes: list[str]) -> list[dict[str, Any]]:
    """The peak of allocated bytes and the time of a training step of each arm."""
    shape, *batches = SHAPES[model]
    short, usual = (draw_tokens(shape, *batch, device) for batch in batches)
    start_training(arms[0], shape, device)(usual)  # allocates what libraries keep
    running: dict[str, Train] = {}
    peaks: dict[str, tuple[str | None, int | None]] = {}
    train: Train | None = None
    for arm in arms:
        train = None  # that of an arm that failed
        before = free_memory(device)
        try:
            train = start_training(arm, shape, device)
            for _ in range(2):
                train(usual)
            train(short, {})
        except Exception as error:
            if arm.ours:
                raise
            notes.append(f"{arm.name}, training: {describe_error(error)}")
            continue
        peaks[arm.name] = measure_peak(train, short, before) if device == "cuda" else (None, None)
        running[arm.name] = train
    times = time_rounds(running, usual, device, rounds)
    rows = []
    for name, seconds in times.items():
        unreleased, (phase, peak) = name.removesuffix(", release"), peaks[name]
        of_unreleased = None
        if unreleased != name and unreleased in running:  # these two alone: with eleven others the host is slower
            pair = time_rounds({each: running[each] for each in (unreleased, name)}, usual, device, rounds)
            of_unreleased = statistics.median(map(operator.truediv, pair[name], pair[unreleased]))
        rows.append(
            {
                "name": name,
                "milliseconds": 1e3 * statistics.median(seconds),
                "of_torch": statistics.median(map(operator.truediv, seconds, times[TORCH])),
                "of_unreleased": of_unreleased,
                "peak_bytes": peak,
                "peak_in": phase,
            }
        )
    return rows


def time_rounds(running: dict[str, Train], tokens: Tensor, device: str, rounds: int) -> dict[str, list[float]]:
    """The seconds of a training step of each arm in each round; a round trains every arm once."""
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, train in running.items():
            times[name].append(time_step(partial(train, tokens), device)[0])
    return times


def measure_peak(train: Train, tokens: Tensor, before: int) -> tuple[str, int]:
    """The phase of a step in which most bytes are allocated, and these bytes less those `before` the model was made."""
    peaks: dict[str, int] = {}
    train(tokens, peaks)
    phase = max(peaks, key=peaks.__getitem__)
    return phase, peaks[phase] - before


def requested_bytes(device: str) -> int:
    """Bytes in tensors, without what the allocator adds to each."""
    return torch.cuda.memory_stats().get("requested_bytes.all.current", 0) if device == "cuda" else 0


def free_memory(device: str) -> int:
    """Free what nothing refers to; the bytes that stay allocated on a GPU."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def judge_targets(results: dict[str, Any]) -> list[list[str]]:
    """A line for each target: what, its bound, what was measured and the verdict."""
    steps, training = ({row["name"]: row for row in results[part]} for part in ("steps", "training"))

    def get(rows: dict[str, Any], name: str, key: str) -> float:
        value = rows.get(name, {}).get(key)
        return math.nan if value is None else float(value)

    shape, _, _ = SHAPES[results["model"]]
    with torch.device("meta"):
        gradients = 2 * sum(param.numel() for param in GPT2(shape).parameters())
    saved = get(training, LEAN, "peak_bytes") - get(training, RELEASE, "peak_bytes")
    flash = get(steps, FLASH, "milliseconds")
    found = [(f"{name}: `step()` over torch's", 0.60, get(steps, name, "of_torch")) for name in (ADAMW, MASTERS, LEAN)]
    found += [
        (f"{each}: over FlashAdamW's", 0.20, get(steps, each, "milliseconds") / flash) for each in (MASTERS, LEAN)
    ]
    found += [("MVNGradW: bytes of a parameter", 6.1, get(steps, MASTERS, "bytes"))]
    found += [("MVNGradW lean: bytes of a parameter", 5.1, get(steps, LEAN, "bytes"))]
    found += [("release: training step over that without", 1.03, get(training, RELEASE, "of_unreleased"))]
    lines = [
        [what, f"at most {bound:g}", f"{value:.4g}", verdict(value, bound, at_least=False)]
        for what, bound, value in found
        if not math.isnan(value)
    ]
    if not math.isnan(saved):
        share = saved / gradients
        lines += [
            ["release: peak saved, of the gradients", "at least 1", f"{share:.4g}", verdict(share, 1, at_least=True)]
        ]
    return lines


def make_markdown(results: dict[str, Any]) -> str:
    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    steps = markdown_table(
        ["step", "bytes: weights and state", "ms", "of torch", "host, us", "graph, ms"],
        [
            [
                row["name"], number(row["bytes"], 2), number(row["milliseconds"], 3),
                f"{row['of_torch']:.2f} ({row['of_torch_quartiles'][0]:.2f}-{row['of_torch_quartiles'][1]:.2f})",
                number(row["host_microseconds"], 0), number(row["graph_milliseconds"], 3),
            ]
            for row in results["steps"]
        ],
    )  # fmt: skip
    training = markdown_table(
        ["training", "peak, MB", "in", "ms", "of torch", "of the same without release"],
        [
            [
                row["name"], number(row["peak_bytes"] and row["peak_bytes"] / 1e6, 0),
                row["peak_in"] or "", number(row["milliseconds"], 2), number(row["of_torch"], 3),
                number(row["of_unreleased"], 3),
            ]
            for row in results["training"]
        ],
    )  # fmt: skip
    targets = markdown_table(
        ["target (set for GPT-2 124M on an H200)", "", "measured", "verdict"], judge_targets(results)
    )
    parts = [
        f"# {results['model']}: bytes and time",
        (__doc__ or "").partition("\n\n    ")[0],
        steps,
        training,
        targets,
    ]
    parts += ["\n".join(f"- {note}" for note in results["notes"]), f"Environment: `{results['environment']}`"]
    return "\n\n".join(filter(None, parts)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", metavar="REGEX", help="optimizers by name; torch's is always measured")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    arms = [arm for arm in ARMS if arm.name == TORCH or re.search(args.only, arm.name)]
    notes: list[str] = []
    results: dict[str, Any] = {
        "model": args.model,
        "rounds": args.rounds,
        "environment": get_environment(args.device),
        "notes": notes,
        "steps": measure_steps(arms, args.model, args.device, args.rounds, notes),
        "training": [],
    }
    write(results, args.out / f"memory-{args.device}", make_markdown(results))
    results["training"] = measure_training(arms, args.model, args.device, args.rounds, notes)
    write(results, args.out / f"memory-{args.device}", make_markdown(results))
    print(make_markdown(results))


if __name__ == "__main__":
    main()
