"""What a Monitor costs: train MNIST networks on synthetic digits with and without one, alternating.

    python -m benchmarks.monitor [--rounds N] [--every N] [--only REGEX] [--device cpu|cuda] [--out results]

Every round trains each arm for `every` steps, one of them recorded, in an order that rotates from round to round. A
ratio compares two arms of one round. Writes results/monitor-cpu.json and .md, or -cuda.
"""

from __future__ import annotations

import argparse
import json
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

from benchmarks.report import RESULTS, environment, markdown_table, write
from benchmarks.timing import synchronize
from mvngrad.diagnostics import Monitor

NETWORKS = ((784, 128, 10), (784, 512, 512, 10))
"""The paper's, whose step takes a millisecond, and a larger one: the cost of a monitor is nearly constant."""
BATCH = 128
OPTIMIZERS = ("mvngrad.MVNGradW", "mvngrad.AdaBeliefW", "mvngrad.LaPropW", "torch.optim.AdamW")
ARMS: dict[str, dict[str, Any] | None] = {
    "without": None,
    "sampled steps only": {"follow": False},
    "with spikes": {"follow": True},
}


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
        self.every, self.device = every, device
        if options is not None:
            Monitor(self.optimizer, every=every, sink=json.dumps, **options)

    def time_round(self) -> float:
        """Train for the steps between two records and return the seconds."""
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(self.every):
            self.step()
        synchronize(self.device)
        return time.perf_counter() - start


def measure(widths: Sequence[int], optimizer: str, every: int, rounds: int, device: str) -> list[dict[str, Any]]:
    arms = {name: Arm(widths, optimizer, options, every, device) for name, options in ARMS.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        arm.time_round()
    names = list(arms)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(arms[name].time_round())
    rows = []
    for name in names:
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
            }
        )
    return rows


def markdown(result: dict[str, Any]) -> str:
    body = []
    for row in result["rows"]:
        low, high = row["ratio_quartiles"]
        body.append([row["network"], row["optimizer"], row["monitor"], f"{row['microseconds']:.0f}"])
        body[-1].append(f"{row['ratio']:.3f} ({low:.3f}-{high:.3f})")
    text = [
        f"# What a Monitor costs on {result['environment']['device']}",
        f"Measured by `python -m benchmarks.monitor`: MLPs, batches of {BATCH}, a "
        f"record every {result['every']} steps, {result['rounds']} rounds of {result['every']} steps, alternating "
        "the arms. Times are of a whole training step with forward and backward; ratios are medians over rounds, with "
        "quartiles.",
        ", ".join(f"{key} {value}" for key, value in result["environment"].items()),
        markdown_table(["network", "optimizer", "monitor", "us a step", "of without"], body),
    ]
    return "\n\n".join(text) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--every", type=int, default=50, help="steps between two records (default 50)")
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
    result = {"environment": environment(args.device), "every": args.every, "rounds": args.rounds, "rows": rows}
    write(result, args.out / f"monitor-{args.device}", markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
