"""The largest GPT-2 that one GPU can train, with torch's AdamW and with small weights and state.

    python -m benchmarks.largest [--only NAME ...] [--out results]

Width 4096, one sequence of 512 tokens, two training steps; the search is over the number of layers. Every size is tried
in a process of its own, because torch may keep tensors after running out of memory in backward
(https://github.com/pytorch/pytorch/issues/82218). Writes results/largest-cuda.json and .md after every optimizer,
and keeps what the file says of the others.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import ARMS, LEAN, RELEASE, TORCH, draw_tokens, start_training
from benchmarks.report import RESULTS, get_environment, markdown_table, write
from mvngrad_lab.tasks.language.model import GPT2, Shape

NAMES = (TORCH, LEAN, RELEASE)
FEW, MORE = 4, 8
"""Layers of the two models by which the largest is predicted."""


def make_shape(layers: int) -> Shape:
    return Shape(layers, 4096, 32, 512)


def measure_reserved(name: str, layers: int) -> float:
    """The bytes that two training steps reserve; infinite if they run out of memory."""
    (arm,) = (arm for arm in ARMS if arm.name == name)
    try:
        train = start_training(arm, make_shape(layers), "cuda")
        tokens = draw_tokens(make_shape(1), 1, 512, "cuda")
        for _ in range(2):
            train(tokens, {})
        torch.cuda.synchronize()
    except RuntimeError as error:
        if re.search("out of memory|ALLOC_FAILED", str(error)):  # of torch, of the driver, of cuBLAS
            return math.inf
        raise
    return torch.cuda.max_memory_reserved()


def measure_free() -> int:
    return torch.cuda.mem_get_info()[0]


def run_in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own; raises if the process dies."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def find_largest(measure: Callable[[int], float], free: int) -> int:
    """The most layers that fit, where `measure` gives the bytes that a number of layers needs, or infinity.

    Each layer needs about the same, so the next size to try is predicted from the largest that fits.
    """
    measure = cache(measure)
    needs = {layers: measure(layers) for layers in (FEW, MORE)}
    if needs[MORE] == math.inf:
        return next((layers for layers in range(MORE - 1, 0, -1) if measure(layers) < math.inf), 0)
    fails = math.inf
    while True:
        best = max(layers for layers, need in needs.items() if need < math.inf)
        if best + 1 == fails:
            return best
        per_layer = (needs[best] - needs[FEW]) / (best - FEW)
        layers = best + max(1, int((free - needs[best]) / per_layer))
        if layers >= fails:  # a prediction is too high by some percent at most
            layers = int(fails - max(1, (fails - best) // 8))
        needs[layers] = measure(layers)
        if needs[layers] == math.inf:
            fails = layers


def make_markdown(results: dict[str, Any]) -> str:
    rows = [
        [row["name"], str(row["layers"]), f"{row['parameters'] / 1e9:.1f}"]
        + [row["environment"][key] for key in ("device", "torch", "commit")]
        for row in results["largest"]
    ]
    table = markdown_table(["optimizer", "layers", "billion parameters", "device", "torch", "commit"], rows)
    return "\n\n".join(["# The largest GPT-2", (__doc__ or "").partition("\n\n")[0], table]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=f"of: {'; '.join(NAMES)}"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it measures the memory of a GPU, and there is none here")
    path = args.out / "largest-cuda"
    stored = json.loads(path.with_suffix(".json").read_text())["largest"] if path.with_suffix(".json").exists() else []
    rows = {row["name"]: row for row in stored}
    where = run_in_process(get_environment, "cuda")
    free = run_in_process(measure_free)
    for name in args.only:
        layers = find_largest(partial(run_in_process, measure_reserved, name), free)
        with torch.device("meta"):
            count = sum(param.numel() for param in GPT2(make_shape(layers)).parameters())
        rows[name] = {"name": name, "layers": layers, "parameters": count, "environment": where}
        results = {"largest": [rows[each] for each in NAMES if each in rows]}
        write(results, path, make_markdown(results))
    print(make_markdown(results))


if __name__ == "__main__":
    main()
