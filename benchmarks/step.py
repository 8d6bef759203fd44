"""One optimizer step: torch's Adam, our cells and other people's optimizers, side by side in one run.

    python -m benchmarks.step [--device cpu|cuda] [--models gpt2-124m ...] [--only REGEX] [--rounds 30]

Every round steps every candidate once, so what slows the machine slows all of them; a ratio is the median over rounds
of candidate over reference. Writes step-DEVICE.json and .md, anew after each model, so that a run cut short keeps what
it has.
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

from benchmarks.candidates import Candidate, Unavailable, candidates, shown
from benchmarks.environment import RESULTS, environment
from benchmarks.models import MODELS, Shapes
from benchmarks.report import markdown, table, write
from benchmarks.targets import Row, judged, machine
from benchmarks.timing import copy_bandwidth, graph_seconds, host_profile, launches, timed
from benchmarks.traffic import bytes_needed, bytes_touched, held, state_bytes

WARM_UP = 3
DEFAULT_MODELS = {"cuda": ["gpt2-124m", "resnet18", "tiny-2000"], "cpu": ["gpt2-30m"]}


@dataclass
class Running:
    """A candidate that has its state and is warm."""

    candidate: Candidate
    optimizer: torch.optim.Optimizer
    kept: int  # bytes that came with it, state and all else
    times: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


@dataclass
class Bench:
    """What is common to the tables of a run, and what is collected beside them."""

    device: str
    rounds: int
    bandwidth: float
    profile: Path | None = None
    model: str = ""
    notes: dict[str, list[str]] = field(default_factory=dict)  # to each note, the models it is about

    def attempt(self, what: str, measurement: Callable[[], float]) -> float | None:
        """A figure, or a note that says why there is none: one failure is not to cost the table."""
        try:
            return measurement()
        except Exception as error:  # whatever an optimizer or its compiler raises
            self.note(f"{what}: {shown(error)}")
            return None

    def note(self, text: str) -> None:
        models = self.notes.setdefault(text, [])
        if self.model not in models:
            models.append(self.model)

    def noted(self, models: list[str]) -> list[str]:
        """The notes, with the models where they are not about all of these."""
        return [text + ("" if about == models else f" ({', '.join(about)})") for text, about in self.notes.items()]

    def start(self, chosen: list[Candidate], params: list[torch.nn.Parameter], decoupled: bool) -> list[Running]:
        """Make and warm up all that can be; torch's own must be, and ours must be there."""
        running = []
        for candidate in chosen:
            before = allocated(self.device)
            try:
                optimizer = candidate.make(params, decoupled)
                for _ in range(WARM_UP):
                    optimizer.step()
            except Unavailable as error:
                if candidate.kind != "peer":
                    raise
                self.note(str(error))
                continue
            except Exception as error:
                if candidate.kind == "torch":
                    raise
                self.note(f"{candidate.name}: {shown(error)}")
                continue
            running.append(Running(candidate, optimizer, allocated(self.device) - before))
        return running

    def measure(self, model: str, decoupled: bool, chosen: list[Candidate]) -> list[Row]:
        """A row for each candidate that runs."""
        self.model, params = model, parameters(MODELS[model], self.device)
        running = self.start(chosen, params, decoupled)
        references = {one.candidate.path: one for one in running if one.candidate.kind == "torch"}
        for _ in range(self.rounds):
            for one in running:
                whole, until_return = timed(one.optimizer.step, self.device)
                one.times.append(whole)
                one.host.append(until_return)
        rows = []
        while running:
            one = running.pop(0)  # and with it its memory
            rows.append(self.row(one, params, references))
            if self.profile and one.candidate.path == "fused":
                with self.profile.open("a") as file:
                    file.write(f"{model}: {one.candidate.name}\n{host_profile(one.optimizer.step, self.device)}\n")
        return rows

    def row(self, one: Running, params: list[torch.nn.Parameter], references: dict[str, Running]) -> Row:
        candidate, step, cuda = one.candidate, one.optimizer.step, self.device == "cuda"
        name, fused, reference = candidate.name, candidate.path == "fused", references[candidate.path]
        size, model_bytes = sum(p.numel() for p in params), 2 * sum(p.nbytes for p in params)
        seconds, needed, state = statistics.median(one.times), bytes_needed(one.optimizer), state_bytes(one.optimizer)
        visible = not fused and candidate.kind != "peer"  # as operations of torch that a limit was set for
        most = None if fused and not cuda else self.attempt(f"{name}: held", partial(held, step, self.device))
        graph = None
        if cuda and candidate.capturable:
            graph = self.attempt(f"{name}: graph", partial(graph_seconds, step, self.rounds))
        return {
            "name": name,
            "path": candidate.path,
            "milliseconds": 1e3 * seconds,
            "reference": reference.candidate.name,
            **spread("ratio", over(one, reference)),
            **spread("ratio_to_fused", over(one, references["fused"])),
            "limit": 1.1 * needed / bytes_needed(reference.optimizer) if visible else None,
            "touched": bytes_touched(step) / size if visible else None,
            "needed": needed / size,
            "state_bytes": state / size,
            "held": None if most is None else most / size,
            "peak": None if most is None else (model_bytes + (one.kept if cuda else state) + most) / size,
            "of_copy": needed / seconds / self.bandwidth,
            **(spread("host_microseconds", [1e6 * t for t in one.host]) if cuda else {"host_microseconds": None}),
            "graph_milliseconds": graph and 1e3 * graph,
            "graph_of_copy": graph and needed / graph / self.bandwidth,
            "launches": None,
            "rounds": self.rounds,
        }

    def count_launches(self, model: str, decoupled: bool, chosen: list[Candidate], rows: list[Row]) -> None:
        """Add to the rows what must come after all timing, from optimizers made anew, one at a time."""
        self.model, params = model, parameters(MODELS[model], self.device)
        named = {row["name"]: row for row in rows}
        for candidate in chosen:
            if candidate.name not in named:
                continue
            for one in self.start([candidate], params, decoupled):
                count = self.attempt(f"{candidate.name}: launches", partial(launches, one.optimizer.step))
                named[candidate.name]["launches"] = count


def parameters(shapes: Shapes, device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, device=device)

    params = [torch.nn.Parameter(draw(shape, 0.02)) for shape in shapes]
    for p in params:
        p.grad = draw(tuple(p.shape), 1e-3)
    return params


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def over(one: Running, reference: Running) -> list[float]:
    """Its time over the reference's, round by round."""
    return [a / b for a, b in zip(one.times, reference.times, strict=True)]


def spread(key: str, values: list[float]) -> Row:
    """Median and quartiles."""
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
    parser.add_argument("--profile", action="store_true", help="profile the host's side of the fused candidates too")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args(arguments)

    args.out.mkdir(parents=True, exist_ok=True)
    profile = args.out / "profile-host.txt" if args.profile else None
    if profile:
        profile.write_text("")
    where, bandwidth = environment(args.device), copy_bandwidth(args.device)
    bench = Bench(args.device, args.rounds, bandwidth, profile)
    result: dict[str, Any] = {"environment": where, "copy_bytes_per_second": bandwidth}
    result |= {"targets": [], "notes": [], "models": {}}

    def save() -> None:
        result["targets"] = judged(result["models"], machine(where, args.device))
        result["notes"] = bench.noted(list(result["models"]))
        write(result, args.out / f"step-{args.device}", markdown(result))
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()

    runs = [(model, decay) for model in args.models or DEFAULT_MODELS[args.device] for decay in args.decay]
    chosen = {decay: candidates(decay == "decoupled", args.only) for decay in args.decay}
    for model, decay in runs:
        rows = bench.measure(model, decay == "decoupled", chosen[decay])
        result["models"].setdefault(model, {})[decay] = rows
        print(f"{model}, weight decay {decay}\n{table(rows)}", flush=True)
        save()
    if args.device == "cuda":
        for model, decay in runs:
            bench.count_launches(model, decay == "decoupled", chosen[decay], result["models"][model][decay])
            save()
    print(markdown(result))


if __name__ == "__main__":
    main()
