"""Does state in fewer bits train as well as float32, and lean as well as MVN-Grad? The paper's MNIST network.

    python -m benchmarks.quality [--seeds N] [--out results] [--device cpu|cuda] [--data FOLDER]

Arms are compared seed by seed, by the rules of `benchmarks.paired`. A finished run is appended to a file under a hash
of everything that determines it, and is not run again, so that an interrupted benchmark resumes. Writes
results/quality-mnist.json and .md, or quality-mnist5k if only the sample of 5,000 digits is available.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import mvngrad
from benchmarks.paired import (
    FAILED_BELOW,
    MARGINS,
    RULES,
    Verdict,
    compare_with_margin,
    compare_with_noise,
    deviation as deviation_of,
    worst_verdict,
)
from benchmarks.report import RESULTS, get_environment, markdown_table, write
from mvngrad import rule
from mvngrad_lab.pool import count_cores, run_jobs
from mvngrad_lab.store import timestamp
from mvngrad_lab.tasks.mnist import data as mnist, task as network

FIRST_SEED = 100
"""Seeds 0 to 5 were used to choose the settings, and are not used again."""
CLASS_NAMES = ("MVNGrad", "LaProp", "AdaBelief", "Adam")
STATES: dict[str, Any] = {"float32": None, "bfloat16": torch.bfloat16, "int8": "int8"}
FEWER_BITS = """\
Means ± deviations over seeds; the difference is paired, with its two-sided 95% confidence interval. At batch
128 Adam and AdaBelief are left out: they fail in float32, as the last table shows."""
LEAN = "The deterioration is positive where lean is worse, with both one-sided 95% confidence bounds."
PEAK = "largest loss of a batch after the first tenth"
METRICS = {"test_accuracy": ("test accuracy", 2), "train_loss": ("train loss", 4), "test_loss": ("test loss", 4)}


@dataclass(frozen=True)
class Setting:
    """The settings that all optimizers of one experiment share; the learning rate is constant."""

    lr: float
    betas: tuple[float, float]
    eps: float
    batch: int
    epochs: int
    eps_s: float = 1e-16
    """The paper gives no value for MNIST."""
    weight_decay: float = 0.0
    """Coupled."""


PAPER_128, PAPER_1024 = "paper, batch 128", "paper, batch 1024"
STRESSED, DECAYED = "stressed", "coupled weight decay"
SETTINGS = {
    PAPER_128: Setting(5e-3, (0.999, 0.7), 1e-8, batch=128, epochs=3),
    PAPER_1024: Setting(1e-4, (0.95, 0.999), 1e-8, batch=1024, epochs=10),
    # Adam overflows and AdaBelief spikes; lean assumes a slow normalizer, and this beta2 makes it fast.
    STRESSED: Setting(5e-3, (0.99, 0.5), 1e-12, batch=128, epochs=3),
    DECAYED: Setting(1e-3, (0.9, 0.999), 1e-8, batch=128, epochs=3, weight_decay=1e-4),
}
ROUNDED = {PAPER_128: ("MVNGrad", "LaProp"), PAPER_1024: CLASS_NAMES}
"""Cells that are also run with smaller state. At batch 128, Adam and AdaBelief fail even in float32."""
UNSTABLE = (PAPER_128, STRESSED)
"""Settings in which all four cells run in float32, to show which fail."""


@dataclass(frozen=True)
class Job:
    """One training run."""

    setting: str
    cell: str
    state: str
    lean: bool
    seed: int

    def make_optimizer(self, params: Any, fused: bool | None) -> torch.optim.Optimizer:
        setting = SETTINGS[self.setting]
        options: dict[str, Any] = {"rounding_seed": self.seed, "fused": fused}
        if self.cell in ("MVNGrad", "AdaBelief"):
            options["eps_s"] = setting.eps_s
        if self.lean:
            options["lean"] = True
        shared = {"lr": setting.lr, "betas": setting.betas, "eps": setting.eps, "weight_decay": setting.weight_decay}
        made: torch.optim.Optimizer = getattr(mvngrad, self.cell)(
            params, **shared, state_dtype=STATES[self.state], **options
        )
        return made


def make_jobs(seeds: int) -> list[Job]:
    """All runs, seed by seed. Cells other than MVN-Grad get half of the seeds, but at least three."""
    made: dict[Job, None] = {}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        compared = CLASS_NAMES if seed - FIRST_SEED < max(3, seeds // 2) else CLASS_NAMES[:1]
        arms = [(name, "MVNGrad", "float32", lean) for name in SETTINGS for lean in (False, True)]
        arms += [(name, cell, "float32", False) for name in UNSTABLE for cell in compared]
        for name, cells in ROUNDED.items():
            arms += [(name, cell, state, False) for cell in cells if cell in compared for state in STATES]
        made |= {Job(*arm, seed): None for arm in arms}
    return list(made)


def train(job: Job, data: mnist.Mnist, device: str, fused: bool | None) -> dict[str, Any]:
    """Train one network; metrics that are not finite are None."""
    start, setting = time.perf_counter(), SETTINGS[job.setting]
    torch.manual_seed(job.seed)
    model = network.mlp(network.HIDDEN).to(device)
    optimizer = job.make_optimizer(model.parameters(), fused)
    order = torch.Generator().manual_seed(job.seed)
    images, labels = data.train_images.to(device), data.train_labels.to(device)
    losses = []
    for _ in range(setting.epochs):
        shuffled = torch.randperm(len(labels), generator=order).to(device)
        for chosen in shuffled.split(setting.batch)[: len(labels) // setting.batch]:
            optimizer.zero_grad()
            loss = cross_entropy(model(mnist.normalize(images[chosen])), labels[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

    def evaluate(images: Tensor, labels: Tensor) -> tuple[float, float]:
        with torch.no_grad():
            scores = torch.cat([model(mnist.normalize(part)) for part in images.to(device).split(10_000)])
        labels = labels.to(device)
        return cross_entropy(scores, labels).item(), 100 * (scores.argmax(1) == labels).float().mean().item()

    test_loss, test_accuracy = evaluate(data.test_images, data.test_labels)
    metrics = {
        "test_accuracy": test_accuracy,
        "test_loss": test_loss,
        "train_loss": evaluate(images, labels)[0],
        "peak_loss": torch.stack(losses[len(losses) // 10 :]).max().item(),  # of a batch, after the first tenth
    }
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return {**finite, "seconds": round(time.perf_counter() - start, 2)}


# Running


def code_hash() -> str:
    """A hash of the code that trains, so that results of other versions are not reused."""
    optim = Path(rule.__file__).parent / "optim"
    kernels = (*optim.rglob("*.py"), *optim.rglob("*.cpp"))
    files = [Path(rule.__file__), *sorted(kernels), Path(network.__file__)]
    sources = (Job, mnist.normalize, train)
    texts = [path.read_text() for path in files] + [inspect.getsource(source) for source in sources]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def run_key(job: Job, **context: Any) -> str:
    settings = {**asdict(job), **asdict(SETTINGS[job.setting]), **context}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def load_runs(path: Path) -> dict[str, dict[str, Any]]:
    """The finished runs by their keys, without lines that an interruption left incomplete."""
    rows = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["key"]] = row
    return rows


def append_run(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # after an incomplete line
                file.write(b"\n")
        file.write(json.dumps(row).encode() + b"\n")


_data: list[mnist.Mnist] = []
"""The data, loaded once per worker process."""


def _load_data(folder: Path | None) -> None:
    _data[:] = [mnist.load(folder)]


def _train_job(job: Job, device: str, fused: bool | None) -> dict[str, Any]:
    return train(job, _data[0], device, fused)


# Reporting

Runs = dict[tuple[str, str, str, bool], dict[int, dict[str, Any]]]
"""(setting, cell, state, lean) -> seed -> metrics."""


def has_failed(run: dict[str, Any]) -> bool:
    return any(run[name] is None for name in METRICS) or run["test_accuracy"] < FAILED_BELOW


def get_values(runs: dict[int, dict[str, Any]], metric: str, seeds: Sequence[int]) -> list[float]:
    """A metric over seeds, NaN if the run failed."""
    return [math.nan if has_failed(runs[seed]) else runs[seed][metric] for seed in seeds]


def compare(
    judge: Callable[..., Verdict], runs: Runs, metric: str, reference: tuple[Any, ...], arm: tuple[Any, ...]
) -> dict[str, Any]:
    """A table row: the two arms over their common seeds, and the verdict."""
    seeds = sorted(runs[reference].keys() & runs[arm].keys())
    pair = [get_values(runs[side], metric, seeds) for side in (reference, arm)]
    setting, cell, state, lean = arm
    verdict = asdict(judge(metric, *pair))
    verdict |= {name: None for name, value in verdict.items() if isinstance(value, float) and not math.isfinite(value)}
    line = {"setting": setting, "cell": cell, "state": state, "lean": lean, "metric": metric, "seeds": len(seeds)}
    return {**line, **verdict, "reference": summarize(pair[0]), "arm": summarize(pair[1])}


def summarize(numbers: Sequence[float]) -> dict[str, Any]:
    """Mean and deviation over the runs that did not fail."""
    finite = [number for number in numbers if math.isfinite(number)]
    mean, deviation = fmean(finite) if finite else None, deviation_of(finite) if len(finite) > 1 else None
    return {"mean": mean, "deviation": deviation, "failed": len(numbers) - len(finite)}


def judge_runs(runs: Runs) -> dict[str, list[dict[str, Any]]]:
    """All comparisons of smaller state and of lean, and the runs of the unstable settings."""
    state = [
        compare(compare_with_noise, runs, metric, (setting, cell, "float32", False), (setting, cell, state, False))
        for setting, cells in ROUNDED.items()
        for cell in cells
        for state in list(STATES)[1:]
        for metric in ("test_accuracy", "train_loss")
    ]
    lean = [
        compare(
            compare_with_margin, runs, metric, (name, "MVNGrad", "float32", False), (name, "MVNGrad", "float32", True)
        )
        for name in SETTINGS
        for metric in MARGINS
    ]
    unstable = [
        {
            "setting": setting,
            "cell": cell + ", lean" * lean,
            "seeds": len(arm),
            "failed": sum(map(has_failed, arm.values())),
            "accuracies": sorted(round(run["test_accuracy"], 2) for run in arm.values()),
            "peaks": [run["peak_loss"] for run in arm.values()],
        }
        for (setting, cell, state, lean), arm in sorted(runs.items())
        if setting in UNSTABLE and state == "float32"
    ]
    return {"state": state, "lean": lean, "unstable": unstable}


def format_number(number: float | None, digits: int, sign: str = "") -> str:
    return "-" if number is None else f"{number:{sign}.{digits}f}"


def format_comparison(line: dict[str, Any]) -> list[str]:
    """The table cells of a comparison: both arms, the difference with its interval, the bound, the verdict."""
    digits = METRICS[line["metric"]][1]

    def arm(side: dict[str, Any]) -> str:
        failures = f" ({side['failed']} failed)" if side["failed"] else ""
        return f"{format_number(side['mean'], digits)} ± {format_number(side['deviation'], digits)}{failures}"

    bounds = f"{format_number(line['low'], digits, '+')} to {format_number(line['high'], digits, '+')}"
    difference = f"{format_number(line['mean'], digits, '+')} ({bounds})"
    return [
        arm(line["reference"]),
        arm(line["arm"]),
        difference,
        format_number(line["yardstick"], digits),
        line["text"],
    ]


def markdown(result: dict[str, Any]) -> str:
    page = ["# Quality of training on MNIST", "Measured by `python -m benchmarks.quality`."]
    page.append(f"{result['data']}.\n784-{network.HIDDEN}-10 MLP with ReLU, constant learning rate.")
    page.append(", ".join(f"{name} {value}" for name, value in result["environment"].items()))
    page += ["## Rules, fixed before the runs", RULES]
    head = ["setting", *next(iter(result["settings"].values()))]
    rows = [[name, *map(str, setting.values())] for name, setting in result["settings"].items()]
    page += ["## Settings", markdown_table(head, rows)]
    head = ["setting", "optimizer", "state", "seeds", "metric", "float32", "arm", "difference", "noise", "verdict"]
    rows = [
        [a["setting"], a["cell"], a["state"], str(a["seeds"]), METRICS[a["metric"]][0], *format_comparison(a)]
        for a in result["verdicts"]["state"]
    ]
    page += ["## State in fewer bits, against float32", FEWER_BITS, markdown_table(head, rows)]
    head = ["setting", "seeds", "metric", "MVN-Grad", "lean", "deterioration", "margin", "verdict"]
    compared = result["verdicts"]["lean"]
    rows = [[a["setting"], str(a["seeds"]), METRICS[a["metric"]][0], *format_comparison(a)] for a in compared]
    overall = [f"{name}: *{worst_verdict([a['text'] for a in compared if a['setting'] == name])}*" for name in SETTINGS]
    page += ["## Lean, against MVN-Grad", LEAN, markdown_table(head, rows), "; ".join(overall) + "."]
    head = ["setting", "optimizer", "seeds", "failed", "test accuracies", PEAK]
    rows = []
    for a in result["verdicts"]["unstable"]:
        peak = "not finite" if None in a["peaks"] else f"{max(a['peaks']):.3g}"
        accuracies = ", ".join(map(str, a["accuracies"]))
        rows.append([a["setting"], a["cell"], str(a["seeds"]), str(a["failed"]), accuracies, peak])
    page += ["## Where Adam and AdaBelief fail or spike", markdown_table(head, rows)]
    return "\n\n".join(page) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="runs of each arm of MVN-Grad, at least 3 (default 10)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--workers", type=int, help="processes with one thread each (default: the number of cores; 1 on cuda)"
    )
    parser.add_argument(
        "--data", type=Path, help="folder with MNIST's files (default: see mvngrad_lab.tasks.mnist.data)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--store", type=Path, default=Path("runs/quality-mnist.jsonl"), help="file of finished runs")
    args = parser.parse_args(arguments)
    if args.seeds < 3:
        parser.error(f"--seeds {args.seeds}: at least 3 are needed for a deviation over seeds")

    data = mnist.load(args.data)
    workers = args.workers or (1 if args.device == "cuda" else count_cores())
    # Without a C++ compiler the same steps run eagerly, which is several times slower with smaller state.
    fused = True if args.device == "cpu" and (shutil.which("g++") or shutil.which("clang++")) else None
    context = {
        "device": args.device,
        "fused": fused,
        "data": data.source,
        "hidden": network.HIDDEN,
        "code": code_hash(),
    }
    keys = {run_key(job, **context): job for job in make_jobs(args.seeds)}
    done = load_runs(args.store)
    todo = [job for name, job in keys.items() if name not in done]
    print(f"{data.source}\n{len(keys)} runs, {len(keys) - len(todo)} already done", flush=True)
    names = {job: name for name, job in keys.items()}
    work = partial(_train_job, device=args.device, fused=fused)
    for count, (job, metrics) in enumerate(run_jobs(work, todo, workers, _load_data, args.data), start=1):
        done[names[job]] = {"key": names[job], **asdict(job), **metrics, "ended": timestamp()}
        append_run(args.store, done[names[job]])
        print(f"{count}/{len(todo)} {job.setting}, {job.cell}{' lean' * job.lean}, {job.state}, {metrics}", flush=True)

    runs: Runs = {}
    for name, job in keys.items():
        runs.setdefault((job.setting, job.cell, job.state, job.lean), {})[job.seed] = done[name]
    made_on = get_environment(args.device) | {
        "threads": 1,
        "processes": workers,
        "path": "fused" if fused else "default",
    }
    result = {
        "environment": made_on,
        "data": data.source,
        "rules": RULES,
        "settings": {name: asdict(setting) for name, setting in SETTINGS.items()},
        "verdicts": judge_runs(runs),
        "runs": [done[name] for name in keys],
    }
    write(result, args.out / ("quality-mnist" if data.complete else "quality-mnist5k"), markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
