"""Can state be stored in 4 bits? A simulation on the paper's MNIST network, against float32.

    python -m benchmarks.four_bits [--out results] [--data FOLDER] [--stop-after SECONDS]

The state stays in float32 and is rounded after every step to what 4 bits can hold; nothing of this is in the library.
Settings, runs and the store are those of `benchmarks.quality`, the seeds are new. Writes results/four-bits-mnist.json
and .md, or four-bits-mnist5k if only the sample of 5,000 digits is available.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks import quality
from benchmarks.paired import MARGINS, compare_with_margin, worst_verdict
from benchmarks.quality import DECAYED, METRICS, PAPER_128, PAPER_1024, Job, Runs
from benchmarks.report import RESULTS, get_environment, markdown_table, write
from mvngrad.optim.formats import SQUARES
from mvngrad_lab.pool import count_cores, run_jobs
from mvngrad_lab.store import timestamp
from mvngrad_lab.tasks.mnist import data as mnist, task as network

# Rules

FIRST_SEED = 200
SEEDS, MORE_SEEDS, SEEDS_ALONE = 6, 6, 4
PAIRS = [
    (PAPER_128, "MVNGrad"),
    (PAPER_1024, "MVNGrad"),
    (PAPER_1024, "Adam"),
    (DECAYED, "MVNGrad"),
    (DECAYED, "Adam"),
]
"""Settings and optimizers; Adam fails at `PAPER_128` in float32 too."""
WIDE_MARGINS = {"test_accuracy": 0.5, "test_loss": 0.03}
"""At `PAPER_128`."""
CONFIDENCE = 1 - 0.05 / 4
RULES = """\
A difference is taken between two runs with the same seed, which have the same initial weights and see the same batches
in the same order. The seeds are new. There are four candidates: two codes, each rounded to the nearest or at random.

**A candidate with one optimizer in one setting**, for test accuracy and test loss each: *not inferior* if the upper
one-sided 98.75% confidence bound (5% over four candidates) of its mean deterioration against float32 is below the
margin; *inferior* if the lower bound is above it, or if it fails where float32 does not; else *undecided*. The worse of
the two verdicts counts. The margins are 0.3 points and 0.01 nats, as for lean; at the paper's batch 128 they are 0.5
points and 0.03 nats, because seeds of float32 differ there by 0.22 points and 0.013 nats, and int8 is worse than
float32 by 0.21 points and 0.013 nats (n = 10, results/quality-mnist.md at c08b9ad).

**Seeds**: 6 everywhere. A candidate that is inferior nowhere gets 6 more at the paper's batch 128 and is judged there
with all 12; stopping only candidates that are inferior cannot make one pass. Power if a candidate equals float32, from
the deviations of the differences of int8 and lean to float32 in results/quality-mnist.json at c08b9ad: at the paper's
batch 128 (0.38 points, 0.019 nats) 0.96 and 0.99 with 12 seeds; elsewhere (at most 0.10 points, 0.002 nats) 1.00 with
6.

**4 bits survive** if one candidate is not inferior with both optimizers in all settings. Else they are not shipped.

**Which state does the harm**: the candidate that loses the least test accuracy, averaged over settings and optimizers,
with one state at a time in 4 bits and the others in float32, 4 of the seeds. Stated by the same margins, not judged."""


# Codes

BLOCK = 128
"""Coordinates that share a scale."""
SMALLEST = 4096
"""Tensors with fewer coordinates stay in float32, as in other libraries: they take no memory to speak of."""
DYNAMIC = (
    -0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055, 0.0,
    0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0,
)  # fmt: skip
"""The dynamic exponent code of Li et al. 2023 (arXiv 2309.01507) for signed averages, as in torchao."""
LINEAR = tuple((index + 1) / 16 for index in range(16))
"""Their code for averages of squares: equal steps without a zero, so that nothing is divided by zero."""
NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0,
)  # fmt: skip
"""The quantiles of a normal distribution (Dettmers et al. 2023, arXiv 2305.14314)."""
LOG = ()
"""Ours for averages of squares, as in int8: a zero, and 15 codes with equal ratios from a block's smallest positive
value to its largest."""


def find_neighbours(blocks: Tensor, code: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The two values of a code that are next to each value; both are at the end of the code for values beyond it."""
    if code:
        scale = blocks.abs().amax(-1, keepdim=True)
        part = blocks / scale
        first, second = torch.full_like(part, code[0]), torch.full_like(part, code[1])
        for value, after in pairwise(code[1:]):  # compiles to faster code than a search
            first = torch.where(part >= value, value, first)
            second = torch.where(part >= value, after, second)
        return first * scale, second * scale
    high = blocks.amax(-1, keepdim=True)
    low = torch.where(blocks > 0, blocks, high).amin(-1, keepdim=True)
    ratio = (high / low).log() / 14
    below = ((blocks / low).log() / ratio).nan_to_num(0.0).floor().clamp(0, 13)
    return low * (below * ratio).exp(), low * ((below + 1) * ratio).exp()


def round_to_code(value: Tensor, draws: Tensor | float, code: Sequence[float]) -> Tensor:
    """The values of a code: the nearest if `draws` is 0.5; at random and without bias if they are uniform in [0, 1)."""
    blocks = torch.nn.functional.pad(value.flatten(), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
    first, second = find_neighbours(blocks, code)
    # In a block of one value the share is NaN, and the first is taken.
    rounded = torch.where((blocks - first) / (second - first) > draws, second, first)
    empty = (blocks == 0) if not code else blocks.abs().amax(-1, keepdim=True) == 0
    return torch.where(empty, 0.0, rounded).view(-1)[: value.numel()].view_as(value)


def make_draws(value: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform random numbers for the blocks of a tensor."""
    return torch.rand(-(-value.numel() // BLOCK), BLOCK, generator=generator)


@cache
def _compile_rounding() -> Any:
    return torch.compile(round_to_code, dynamic=False)


# Runs


@dataclass(frozen=True)
class Candidate:
    """How state is stored in 4 bits."""

    signed: Sequence[float]
    squares: Sequence[float]
    at_random: bool


CANDIDATES = {
    "dynamic and linear, to nearest": Candidate(DYNAMIC, LINEAR, False),
    "dynamic and linear, at random": Candidate(DYNAMIC, LINEAR, True),
    "NF4 and log, to nearest": Candidate(NF4, LOG, False),
    "NF4 and log, at random": Candidate(NF4, LOG, True),
}
ALONE = ", only "
"""Between the name of a candidate and that of the one state which it rounds."""
STATE_NAMES = {"MVNGrad": "msu", "Adam": "mv"}


@dataclass(frozen=True)
class FourBitJob(Job):
    """A training run whose state is float32, or rounded to a candidate's codes after every step."""

    def make_optimizer(self, params: Any, fused: bool | None) -> torch.optim.Optimizer:
        optimizer = Job(self.setting, self.cell, "float32", self.lean, self.seed).make_optimizer(params, fused)
        if self.state == "float32":
            return optimizer
        name, _, alone = self.state.partition(ALONE)
        candidate, generator = CANDIDATES[name], torch.Generator().manual_seed(self.seed)
        round_state = _compile_rounding()

        def round_all(stepped: torch.optim.Optimizer, *_: Any) -> None:
            for param, state in stepped.state.items():
                for key in (alone or STATE_NAMES[self.cell]) if param.numel() >= SMALLEST else ():
                    value, code = state[key], candidate.squares if key in SQUARES else candidate.signed
                    draws = make_draws(value, generator) if candidate.at_random else 0.5
                    value.copy_(round_state(value, draws, code))

        optimizer.register_step_post_hook(round_all)
        return optimizer


def judge_arm(runs: Runs, setting: str, cell: str, state: str) -> list[dict[str, Any]]:
    """The comparison with float32 in each metric."""
    margins = WIDE_MARGINS if setting == PAPER_128 else MARGINS
    judge = partial(compare_with_margin, margins=margins, confidence=CONFIDENCE)
    arms = (setting, cell, "float32", False), (setting, cell, state, False)
    return [quality.compare(judge, runs, metric, *arms) for metric in MARGINS]


def judge_pair(runs: Runs, setting: str, cell: str, state: str) -> str:
    return worst_verdict([line["text"] for line in judge_arm(runs, setting, cell, state)])


def find_best(runs: Runs) -> str:
    """The candidate with the least mean loss of test accuracy over the first seeds of all pairs; a failed run has 0."""

    def mean_accuracy(state: str) -> float:
        return fmean(
            runs[setting, cell, state, False][seed]["test_accuracy"] or 0.0
            for setting, cell in PAIRS
            for seed in range(FIRST_SEED, FIRST_SEED + SEEDS)
        )

    return max(CANDIDATES, key=mean_accuracy)


def make_jobs(runs: Runs) -> list[FourBitJob]:
    """All runs that the rules ask for, as far as the results of earlier ones tell: first seeds, more seeds, alone."""
    first, more = range(FIRST_SEED, FIRST_SEED + SEEDS), range(FIRST_SEED + SEEDS, FIRST_SEED + SEEDS + MORE_SEEDS)
    jobs = [
        FourBitJob(*pair, state, False, seed) for seed in first for pair in PAIRS for state in ("float32", *CANDIDATES)
    ]
    if any(job.seed not in runs.get((job.setting, job.cell, job.state, False), {}) for job in jobs):
        return jobs
    left = [
        state
        for state in CANDIDATES
        if all(judge_pair(_keep(runs, first), *pair, state) != "inferior" for pair in PAIRS)
    ]
    if left:
        jobs += [FourBitJob(*PAIRS[0], state, False, seed) for seed in more for state in ("float32", *left)]
    best = find_best(runs)
    jobs += [
        FourBitJob(*pair, f"{best}{ALONE}{name}", False, seed)
        for seed in first[:SEEDS_ALONE]
        for pair in PAIRS
        for name in STATE_NAMES[pair[1]]
    ]
    return jobs


def _keep(runs: Runs, seeds: Sequence[int]) -> Runs:
    return {arm: {seed: run for seed, run in rows.items() if seed in seeds} for arm, rows in runs.items()}


def code_hash() -> str:
    """A hash of the code that trains, so that results of other versions are not reused."""
    sources = (find_neighbours, round_to_code, make_draws, FourBitJob)
    texts = [quality.code_hash(), repr(CANDIDATES), *map(inspect.getsource, sources)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


# Reporting


def make_result(runs: Runs) -> dict[str, Any]:
    """All comparisons, and whether 4 bits survive."""
    lines = [
        {**line, "margins": "wide" if arm[0] == PAPER_128 else "as for lean"}
        for arm in runs
        if arm[2] != "float32"
        for line in judge_arm(runs, *arm[:3])
    ]
    verdicts = {state: [judge_pair(runs, *pair, state) for pair in PAIRS] for state in CANDIDATES}
    survivors = [state for state, texts in verdicts.items() if set(texts) == {"not inferior"}]
    return {"comparisons": lines, "verdicts": verdicts, "survivors": survivors, "best": find_best(runs)}


def make_markdown(result: Mapping[str, Any]) -> str:
    page = ["# State in 4 bits, simulated on MNIST", "Measured by `python -m benchmarks.four_bits`."]
    page.append(f"{result['data']}.\n784-{network.HIDDEN}-10 MLP with ReLU, constant learning rate.")
    page.append(", ".join(f"{name} {value}" for name, value in result["environment"].items()))
    page += ["## Rules, fixed before the runs", RULES, "## Verdicts"]
    head = ["candidate", *(f"{cell}, {setting}" for setting, cell in PAIRS)]
    page.append(markdown_table(head, [[state, *texts] for state, texts in result["verdicts"].items()]))
    survivors = ", ".join(result["survivors"])
    page.append(f"4 bits survive: {survivors}." if survivors else "4 bits do not survive: they are not shipped.")
    head = ["setting", "optimizer", "state", "seeds", "metric", "float32", "arm", "deterioration", "margin", "verdict"]
    for title, alone in (("All state in 4 bits", False), ("One state in 4 bits, the others in float32", True)):
        rows = [
            [
                a["setting"],
                a["cell"],
                a["state"],
                str(a["seeds"]),
                METRICS[a["metric"]][0],
                *quality.format_comparison(a),
            ]
            for a in result["comparisons"]
            if (ALONE in a["state"]) == alone
        ]
        page += [f"## {title}", markdown_table(head, rows)]
    return "\n\n".join(page) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, help="processes with one thread each (default: the number of cores)")
    parser.add_argument("--data", type=Path, help="folder with MNIST's files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--store", type=Path, default=Path("runs/four-bits-mnist.jsonl"), help="file of finished runs")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds; the same command then continues")
    args = parser.parse_args(arguments)
    data, deadline = mnist.load(args.data), time.monotonic() + args.stop_after
    workers = args.workers or count_cores()
    fused = True if shutil.which("g++") or shutil.which("clang++") else None
    context = {"device": "cpu", "fused": fused, "data": data.source, "hidden": network.HIDDEN, "code": code_hash()}
    work = partial(quality._train_job, device="cpu", fused=fused)
    done = quality.load_runs(args.store)
    runs: Runs = {}
    while todo := _collect(make_jobs(runs), done, context, runs):
        for job, metrics in run_jobs(work, todo, workers, quality._load_data, args.data):
            key = quality.run_key(job, **context)
            done[key] = {"key": key, **asdict(job), **metrics, "ended": timestamp()}
            quality.append_run(args.store, done[key])
            print(f"{job.setting}, {job.cell}, {job.state}, {job.seed}: {metrics}", flush=True)
            if time.monotonic() > deadline:
                print("stopped before the end; the same command continues", flush=True)
                return
    result = {
        "environment": get_environment("cpu")
        | {"threads": 1, "processes": workers, "path": "fused" if fused else "default"},
        "data": data.source,
        "rules": RULES,
        "settings": {name: asdict(quality.SETTINGS[name]) for name, _ in PAIRS},
        **make_result(runs),
        "runs": [run for arm in runs.values() for run in arm.values()],
    }
    write(result, args.out / ("four-bits-mnist" if data.complete else "four-bits-mnist5k"), make_markdown(result))
    print(make_markdown(result))


def _collect(
    jobs: Sequence[FourBitJob], done: Mapping[str, dict[str, Any]], context: Mapping[str, Any], runs: Runs
) -> list[FourBitJob]:
    """Put the finished among these jobs into `runs`; returns the others, or with none left those that follow."""
    while True:
        keys = {quality.run_key(job, **context): job for job in jobs}
        for key, job in keys.items():
            if key in done:
                runs.setdefault((job.setting, job.cell, job.state, job.lean), {})[job.seed] = done[key]
        todo = [job for key, job in keys.items() if key not in done]
        if todo or len(following := make_jobs(runs)) == len(jobs):
            return todo
        jobs = following


if __name__ == "__main__":
    main()
