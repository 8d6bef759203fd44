"""One optimizer step: torch's Adam, our cells and other implementations, compared in one run.

    python -m benchmarks.step [--device cpu|cuda] [--models gpt2-124m ...] [--only REGEX] [--rounds 30]

Every round steps every candidate once, so that whatever slows the machine slows all of them; a ratio is the median over
rounds of candidate over reference. Rewrites step-DEVICE.json and .md after each model, so that an interrupted run keeps
what it has.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.candidates import Candidate, Unavailable, describe_error, get_candidates
from benchmarks.models import MODELS, Shapes
from benchmarks.report import RESULTS, get_environment, markdown, table, write
from benchmarks.targets import Row, find_machine, judge_targets
from benchmarks.timing import copy_bandwidth, count_launches, graph_seconds, profile_host, time_step
from benchmarks.traffic import bytes_needed, bytes_touched, held_bytes, state_bytes

WARM_UP = 3
DEFAULT_MODELS = {"cuda": ["gpt2-124m", "resnet18", "tiny-2000"], "cpu": ["gpt2-30m"]}


@dataclass
class TimedCandidate:
    """A candidate that has its state and is warmed up."""

    candidate: Candidate
    optimizer: torch.optim.Optimizer
    memory: int  # bytes allocated for it, state and everything else
    times: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


@dataclass
class StepBenchmark:
    """The settings that the tables of a run share, and the notes about them."""

    device: str
    rounds: int
    bandwidth: float
    profile: Path | None = None
    model: str = ""
    notes: dict[str, list[str]] = field(default_factory=dict)  # the models of each note

    def attempt(self, what: str, measurement: Callable[[], float]) -> float | None:
        """A figure, or None and a note with the reason: one failure must not cost the table."""
        try:
            return measurement()
        except Exception as error:  # an optimizer or its compiler can raise anything
            self.add_note(f"{what}: {describe_error(error)}")
            return None

    def add_note(self, text: str) -> None:
        models = self.notes.setdefault(text, [])
        if self.model not in models:
            models.append(self.model)

    def format_notes(self, models: list[str]) -> list[str]:
        """The notes, each with its models unless it is about all of these."""
        return [text + ("" if about == models else f" ({', '.join(about)})") for text, about in self.notes.items()]

    def start(self, chosen: list[Candidate], params: list[torch.nn.Parameter], decoupled: bool) -> list[TimedCandidate]:
        """Make and warm up the candidates. Failures of peers are notes, as are those of ours except for imports."""
        running = []
        for candidate in chosen:
            before = allocated_bytes(self.device)
            try:
                optimizer = candidate.make(params, decoupled)
                for _ in range(WARM_UP):
                    optimizer.step()
            except Unavailable as error:
                if candidate.origin != "peer":
                    raise
                self.add_note(str(error))
                continue
            except Exception as error:
                if candidate.origin == "torch":
                    raise
                self.add_note(f"{candidate.name}: {describe_error(error)}")
                continue
            running.append(TimedCandidate(candidate, optimizer, allocated_bytes(self.device) - before))
        return running

    def measure(self, model: str, decoupled: bool, chosen: list[Candidate]) -> list[Row]:
        """A table row for each candidate that runs."""
        self.model, params = model, make_parameters(MODELS[model], self.device)
        running = self.start(chosen, params, decoupled)
        references = {timed.candidate.path: timed for timed in running if timed.candidate.origin == "torch"}
        for _ in range(self.rounds):
            for timed in running:
                whole, until_return = time_step(timed.optimizer.step, self.device)
                timed.times.append(whole)
                timed.host.append(until_return)
        rows = []
        while running:
            timed = running.pop(0)  # frees its memory
            rows.append(self.make_row(timed, params, references))
            if self.profile and timed.candidate.path == "fused":
                with self.profile.open("a") as file:
                    file.write(f"{model}: {timed.candidate.name}\n{profile_host(timed.optimizer.step, self.device)}\n")
        return rows

    def make_row(
        self, timed: TimedCandidate, params: list[torch.nn.Parameter], references: dict[str, TimedCandidate]
    ) -> Row:
        candidate, step, cuda = timed.candidate, timed.optimizer.step, self.device == "cuda"
        name, fused, reference = candidate.name, candidate.path == "fused", references[candidate.path]
        size, model_bytes = sum(p.numel() for p in params), 2 * sum(p.nbytes for p in params)
        needed, state = bytes_needed(timed.optimizer), state_bytes(timed.optimizer)
        seconds = statistics.median(timed.times)
        visible = not fused and candidate.origin != "peer"  # its torch operations can be counted
        most = None if fused and not cuda else self.attempt(f"{name}: held", partial(held_bytes, step, self.device))
        graph = None
        if cuda and candidate.capturable:
            graph = self.attempt(f"{name}: graph", partial(graph_seconds, step, self.rounds))
        return {
            "name": name,
            "path": candidate.path,
            "milliseconds": 1e3 * seconds,
            "reference": reference.candidate.name,
            **with_quartiles("ratio", time_ratios(timed, reference)),
            **with_quartiles("ratio_to_fused", time_ratios(timed, references["fused"])),
            "limit": 1.1 * needed / bytes_needed(reference.optimizer) if visible else None,
            "touched": bytes_touched(step) / size if visible else None,
            "needed": needed / size,
            "state_bytes": state / size,
            "held": None if most is None else most / size,
            "peak": None if most is None else (model_bytes + (timed.memory if cuda else state) + most) / size,
            "of_copy": needed / seconds / self.bandwidth,
            **(
                with_quartiles("host_microseconds", [1e6 * t for t in timed.host])
                if cuda
                else {"host_microseconds": None}
            ),
            "graph_milliseconds": graph and 1e3 * graph,
            "graph_of_copy": graph and needed / graph / self.bandwidth,
            "launches": None,
            "rounds": self.rounds,
        }

    def count_launches(self, model: str, decoupled: bool, chosen: list[Candidate], rows: list[Row]) -> None:
        """Add the launches to the rows. They must be counted after all timing, with one new optimizer at a time."""
        self.model, params = model, make_parameters(MODELS[model], self.device)
        named = {row["name"]: row for row in rows}
        for candidate in chosen:
            if candidate.name not in named:
                continue
            for timed in self.start([candidate], params, decoupled):
                count = self.attempt(f"{candidate.name}: launches", partial(count_launches, timed.optimizer.step))
                named[candidate.name]["launches"] = count


def make_parameters(shapes: Shapes, device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, device=device)

    params = [torch.nn.Parameter(draw(shape, 0.02)) for shape in shapes]
    for p in params:
        p.grad = draw(tuple(p.shape), 1e-3)
    return params


def allocated_bytes(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def time_ratios(timed: TimedCandidate, reference: TimedCandidate) -> list[float]:
    """The time over that of the reference, for each round."""
    return [a / b for a, b in zip(timed.times, reference.times, strict=True)]


def with_quartiles(key: str, values: list[float]) -> Row:
    """The median of values and their quartiles, as two entries."""
    return {
        key: statistics.median(values),
        f"{key}_quartiles": statistics.quantiles(values, n=4, method="inclusive")[::2],
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: those of the device's targets")
    parser.add_argument("--decay", nargs="+", choices=["none", "decoupled"], default=["decoupled"], help="weight decay")
    parser.add_argument("--only", default="", metavar="REGEX", help="candidates by name; references are always timed")
    parser.add_argument("--rounds", type=int, default=30, help="at least 2")
    parser.add_argument("--profile", action="store_true", help="also profile the host time of the fused candidates")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args(arguments)

    args.out.mkdir(parents=True, exist_ok=True)
    profile = args.out / "profile-host.txt" if args.profile else None
    if profile:
        profile.write_text("")
    where, bandwidth = get_environment(args.device), copy_bandwidth(args.device)
    benchmark = StepBenchmark(args.device, args.rounds, bandwidth, profile)
    result: dict[str, Any] = {"environment": where, "copy_bytes_per_second": bandwidth}
    result |= {"targets": [], "notes": [], "models": {}}

    def save() -> None:
        result["targets"] = judge_targets(result["models"], find_machine(where, args.device))
        result["notes"] = benchmark.format_notes(list(result["models"]))
        write(result, args.out / f"step-{args.device}", markdown(result))
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()

    runs = [(model, decay) for model in args.models or DEFAULT_MODELS[args.device] for decay in args.decay]
    chosen = {decay: get_candidates(decay == "decoupled", args.only) for decay in args.decay}
    for model, decay in runs:
        rows = benchmark.measure(model, decay == "decoupled", chosen[decay])
        result["models"].setdefault(model, {})[decay] = rows
        print(f"{model}, weight decay {decay}\n{table(rows)}", flush=True)
        save()
    if args.device == "cuda":
        for model, decay in runs:
            benchmark.count_launches(model, decay == "decoupled", chosen[decay], result["models"][model][decay])
            save()
    print(markdown(result))


if __name__ == "__main__":
    main()
