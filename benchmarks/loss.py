"""The loss of GPT-2 alone, forward and backward: ours by rows at a time, and torch's on all logits at once.

    python -m benchmarks.loss [--models 30M 124M] [--rows 4096 8192 16384 32768] [--rounds 5]

Writes loss-DEVICE.md. The loss is about half of a step of the 30M model, so the number of rows is worth measuring.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.language import RECIPES
from benchmarks.report import RESULTS, get_environment, markdown_table
from benchmarks.timing import synchronize
from mvngrad_lab.tasks.language.kernels.cross_entropy import cross_entropy
from mvngrad_lab.tasks.language.model import PADDED_VOCABULARY, VOCABULARY
from mvngrad_lab.tasks.language.task import SHAPES

INTRODUCTION = """\
Measured by `python -m benchmarks.loss`: forward and backward of the loss alone, compiled on a GPU, for one
micro-batch. Ours computes the logits of this many rows at a time; *peak* is all memory that tensors held."""


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The loss as most people write it."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def make_losses(rows: list[int], tokens: int, compiled: bool) -> dict[str, Callable[..., Tensor]]:
    """Functions of (hidden, weight, targets) that return the loss, by name."""

    def ours(size: int) -> Callable[..., Tensor]:
        return lambda hidden, weight, targets: cross_entropy(hidden, weight, targets, size)

    sizes = [size for size in rows if size < tokens]
    losses = {f"{size:,} rows": ours(size) for size in sizes} | {"all rows": ours(tokens), "torch's": plain_loss}
    return {name: torch.compile(loss, dynamic=False) if compiled else loss for name, loss in losses.items()}


class TimedLoss:
    """One loss with its tensors, after two passes that warm up and measure its memory."""

    def __init__(self, loss: Callable[..., Tensor], tokens: int, width: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.hidden = torch.randn(tokens, width, device=device, generator=generator, requires_grad=True)
        self.weight = (torch.randn(PADDED_VOCABULARY, width, device=device, generator=generator) / 50).requires_grad_()
        self.targets = torch.randint(VOCABULARY, (tokens,), device=device, generator=generator)
        self.loss, self.device = loss, device
        self.time_pass()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.time_pass()
        self.peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0

    def time_pass(self) -> float:
        """Run a forward and backward pass and return its seconds."""
        self.hidden.grad = self.weight.grad = None
        synchronize(self.device)
        start = time.perf_counter()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            value = self.loss(self.hidden, self.weight, self.targets)
        value.backward()
        synchronize(self.device)
        return time.perf_counter() - start


def measure(model: str, args: argparse.Namespace, device: torch.device) -> list[list[str]]:
    """The table rows of a model, for one micro-batch of its recipe."""
    shape = SHAPES[model]
    tokens = RECIPES[model].micro_batch_size * shape.context
    rows = []
    for name, loss in make_losses(args.rows, tokens, device.type == "cuda").items():
        timed = TimedLoss(loss, tokens, shape.width, device)  # one at a time: torch's holds gigabytes
        times = [timed.time_pass() for _ in range(args.rounds)]
        figures = 1e3 * statistics.median(times), 1e3 * min(times), timed.peak / 2**30
        rows.append([f"{model}, {tokens:,} tokens", name, *(f"{figure:.2f}" for figure in figures)])
        del timed
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=RECIPES, default=["30M", "124M"])
    parser.add_argument("--rows", nargs="+", type=int, default=[4096, 8192, 16384, 32768])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args(arguments)
    where = get_environment(args.device)
    body = [row for model in args.models for row in measure(model, args, torch.device(args.device))]
    text = [
        f"# The loss of GPT-2 on {where['device']}",
        INTRODUCTION,
        ", ".join(f"{key} {value}" for key, value in where.items()),
        markdown_table(["model", "loss", "median, ms", "fastest, ms", "peak, GiB"], body),
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"loss-{args.device}.md").write_text("\n\n".join(text) + "\n")
    print("\n\n".join(text))


if __name__ == "__main__":
    main()
