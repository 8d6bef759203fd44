"""What a Monitor costs: train MNIST networks on synthetic digits with and without one, alternating.

    python -m benchmarks.monitor [--rounds N] [--every N] [--only REGEX] [--device cpu|cuda] [--out results]

Every round trains each arm for `every` steps, one of them recorded, in short blocks that alternate between the arms, so
that a slow moment of the machine slows all of them. A ratio compares two arms of one round. The Monitor's hook is timed
on its own, too, and the parts of a record with a profiler. Writes results/monitor-cpu.json and .md, or -cuda.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import operator
import pstats
import re
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.report import RESULTS, get_environment, markdown_table, write
from benchmarks.timing import synchronize
from mvngrad.diagnostics import Monitor

NETWORKS = ((784, 128, 10), (784, 512, 512, 10))
"""The paper's, whose step takes a millisecond, and a larger one: the cost of a monitor is nearly constant."""
BATCH = 128
BLOCK = 10
"""Steps of an arm before the next one's turn."""
OPTIMIZERS = ("mvngrad.MVNGradW", "mvngrad.AdaBeliefW", "mvngrad.LaPropW", "torch.optim.AdamW")
ARMS: dict[str, dict[str, Any] | None] = {
    "without": None,
    "sampled steps only": {"follow": False},
    "with spikes": {"follow": True},
}
PARTS = {
    "collect": "read the state on the device",
    "copy_to_host": "copy it, and wait for the device",
    "_add_noted_steps": "look for spikes in the steps since the last record",
    "measure_sample": "quantiles and shares",
    "dumps": "write JSON",
}
"""What a record does, by the name of the function; the rest is small."""


class Arm:
    """One training, with or without a monitor."""

    def __init__(self, widths: Sequence[int], optimizer: str, options: dict[str, Any] | None, every: int, device: str):
        torch.manual_seed(0)
        inputs, classes = widths[0], widths[-1]
        layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
        model = nn.Sequential(*layers[:-1]).to(device)
        module, name = optimizer.rsplit(".", 1)
        self.optimizer = getattr(import_module(module), name)(model.parameters(), lr=1e-3)
        x, y = torch.randn(BATCH, inputs, device=device), torch.randint(classes, (BATCH,), device=device)

        def step() -> None:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            self.optimizer.step()

        self.step: Callable[[], None] = step
        self.device, self.hook_seconds = device, 0.0
        self.profile: cProfile.Profile | None = None
        if options is not None:
            monitor = Monitor(self.optimizer, every=every, sink=json.dumps, **options)
            monitor._handle.remove()

            def timed_hook(*args: Any) -> None:
                profiled = self.profile is not None and (monitor.step + 1) % every == 0
                start = time.perf_counter()
                if profiled:
                    self.profile.runcall(monitor._after_step, *args)  # type: ignore[union-attr]
                else:
                    monitor._after_step(*args)
                self.hook_seconds += time.perf_counter() - start

            self.optimizer.register_step_post_hook(timed_hook)

    def time_block(self, steps: int) -> float:
        """Train for some steps and return the seconds."""
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize(self.device)
        return time.perf_counter() - start

    def profile_records(self, every: int, records: int = 20) -> dict[str, float]:
        """Microseconds of each part of a record, and of all of it: means, with what the profiler adds."""
        self.profile = cProfile.Profile()
        self.time_block(every * records)
        stats = pstats.Stats(self.profile).stats  # type: ignore[attr-defined]
        self.profile = None
        seconds = {name: times[3] for (_, _, name), times in stats.items() if name in (*PARTS, "_after_step")}
        return {name: 1e6 * value / records for name, value in seconds.items()}

    def find_moved_share(self, steps: int = 20) -> float:
        """The share of steps whose gradients are at other addresses than those of the step before: these cost more."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        addresses = []
        for _ in range(steps):
            self.step()
            addresses.append([param.grad.data_ptr() for param in params])
        return sum(before != after for before, after in pairwise(addresses)) / (steps - 1)


def time_rounds(arms: dict[str, Arm], every: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The seconds of each arm in each round, and those inside its hook."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    inside: dict[str, list[float]] = {name: [] for name in arms}
    names, turn = list(arms), 0
    for _ in range(rounds):
        seconds = dict.fromkeys(names, 0.0)
        for arm in arms.values():
            arm.hook_seconds = 0.0
        for done in range(0, every, BLOCK):
            for name in names[turn:] + names[:turn]:
                seconds[name] += arms[name].time_block(min(BLOCK, every - done))
            turn = (turn + 1) % len(names)
        for name, arm in arms.items():
            times[name].append(seconds[name])
            inside[name].append(arm.hook_seconds)
    return times, inside


def find_interval(values: Sequence[float]) -> list[float]:
    """A 95% interval of the median, from the ranks between which it lies whatever the distribution."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low = max(0, math.floor(len(ordered) / 2 - half))
    return [ordered[low], ordered[-1 - low]]


def measure(widths: Sequence[int], optimizer: str, every: int, rounds: int, device: str) -> list[dict[str, Any]]:
    arms = {name: Arm(widths, optimizer, options, every, device) for name, options in ARMS.items()}
    time_rounds(arms, every, 1)
    times, inside = time_rounds(arms, every, rounds)
    rows = []
    for name, arm in arms.items():
        ratios = [a / b for a, b in zip(times[name], times["without"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "network": "-".join(map(str, widths)),
                "optimizer": optimizer,
                "monitor": name,
                "microseconds": 1e6 * statistics.median(times[name]) / every,
                "ratio": statistics.median(ratios),
                "ratio_quartiles": [low, high],
                "ratio_interval": find_interval(ratios),
                "inside_share": statistics.median(map(operator.truediv, inside[name], times["without"])),
                "moved_share": arm.find_moved_share(),
                "parts": arm.profile_records(every) if name == "with spikes" else {},
            }
        )
    return rows


def markdown(result: dict[str, Any]) -> str:
    body, parts = [], []
    for row in result["rows"]:
        if found := row["parts"]:
            values = [f"{found.get(name, 0):.0f}" for name in (*PARTS, "_after_step")]
            parts.append([row["network"], row["optimizer"], *values])
        low, high = row["ratio_interval"]
        body.append([row["network"], row["optimizer"], row["monitor"], f"{row['microseconds']:.0f}"])
        body[-1].append(f"{row['ratio']:.3f} ({low:.3f}-{high:.3f})")
        body[-1].append(f"{row['inside_share']:.1%}" if row["monitor"] != "without" else "")
        body[-1].append(f"{row['moved_share']:.0%}")
    text = [
        f"# What a Monitor costs on {result['environment']['device']}",
        f"Measured by `python -m benchmarks.monitor`: MLPs, batches of {BATCH}, {result['rounds']} rounds of "
        f"{result['every']} steps with one record, the arms alternating after every {BLOCK} steps. Times are of a "
        "whole training step with forward and backward; ratios are medians over rounds, with a 95% interval. The "
        "next column is the time inside the Monitor's hook as a share of a step without one; a record's "
        "includes the wait for the device. The last is the share of steps whose gradients have moved since the step "
        "before.",
        ", ".join(f"{key} {value}" for key, value in result["environment"].items()),
        markdown_table(
            ["network", "optimizer", "monitor", "us a step", "of without", "in the hook", "gradients moved"], body
        ),
        "Parts of a record with spikes, in microseconds, with what the profiler adds (means of 20 records):",
        markdown_table(["network", "optimizer", *PARTS.values(), "all"], parts),
    ]
    return "\n\n".join(text) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--every", type=int, default=100, help="steps between two records, by default 100")
    parser.add_argument("--only", default="", metavar="REGEX", help="optimizers by name")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args(arguments)
    rows = [
        row
        for widths in NETWORKS
        for optimizer in OPTIMIZERS
        if re.search(args.only, optimizer)
        for row in measure(widths, optimizer, args.every, args.rounds, args.device)
    ]
    result = {"environment": get_environment(args.device), "every": args.every, "rounds": args.rounds, "rows": rows}
    write(result, args.out / f"monitor-{args.device}", markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
