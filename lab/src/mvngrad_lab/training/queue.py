"""Train a list of recipes, each once, and stop before a deadline; keep what is worth keeping of each run.

`finished.jsonl` in the store has a line for each run as it ends; `make_exported_row` selects what a repository keeps.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mvngrad_lab import store
from mvngrad_lab.errors import InvalidInput, UserError
from mvngrad_lab.recipe import TrainingRecipe
from mvngrad_lab.store import read_rows
from mvngrad_lab.store.lock import Locked
from mvngrad_lab.training.events import Event
from mvngrad_lab.training.loop import Observer
from mvngrad_lab.training.step import TrainingStep
from mvngrad_lab.training.train import make_file_observer, train

FINISHED = "finished.jsonl"
"""In the store: recipe, environment, result, time and curve of each run, a line each."""
GRADIENTS = "gradients.jsonl"
"""In the folder of a run: the root mean square of the last gradient of each epoch."""


class Queues(NamedTuple):
    """The queues of an experiment: lists of recipes, some of which depend on the results of others."""

    names: Sequence[str]
    """In the order in which they can run."""
    read_runs: Callable[..., Mapping[str, Any]]
    """Called with folders, returns the finished runs in them by key."""
    make: Callable[[str, Mapping[str, Any]], Sequence[TrainingRecipe]]
    """Called with the name of a queue and the finished runs, returns its recipes in their order."""
    get_options: Callable[[str], dict[str, Any]] = lambda name: {}
    """Called with the name of a queue, returns more options of `train_queue`."""


def train_queue(
    queue: Sequence[TrainingRecipe],
    root: Path,
    *,
    finished: Mapping[str, Any],
    stop_after: float,
    run_seconds: float,
    every_step: bool = False,
    on_event: Callable[[Event], Any] = lambda event: None,
    **options: Any,
) -> int:
    """Train what is not `finished`, until no run of `run_seconds` fits before `stop_after` seconds; returns how many
    runs are left.

    Several processes may call this for one store. A run that another process trains comes last here, and is waited for:
    that process may end before the run does. With `every_step`, curves have the loss of every step, of recipes that
    record it. `options` are those of `train`.
    """
    deadline = time.monotonic() + stop_after
    written = read_finished(root / FINISHED)
    for recipe in queue:  # a process that died after a run may not have written its line
        if recipe.key not in written and (run := store.RunFolder(recipe, root).run) is not None:
            _add_line(root, run, every_step)

    def is_left(recipe: TrainingRecipe) -> bool:
        return recipe.key not in finished and store.RunFolder(recipe, root).run is None

    waiting, locked = list(filter(is_left, queue)), set[str]()
    while waiting and time.monotonic() + run_seconds <= deadline:
        recipe = waiting.pop(0)
        if not is_left(recipe):  # another process has trained it
            continue
        observe = make_gradient_observer(root / recipe.key)
        try:
            run = train(recipe, root=root, keep_last=False, on_event=on_event, observe=observe, **options)
        except Locked as error:  # perhaps by a process of another machine that has ended, which only a user can tell
            if recipe.key not in locked:
                print(store.timestamp(), "left for later:", error, flush=True)
            locked.add(recipe.key)
            waiting.append(recipe)
            time.sleep(1)
            continue
        _add_line(root, run, every_step)
        print(store.timestamp(), len(waiting), "left", recipe.key, _describe(run), flush=True)
    return sum(map(is_left, waiting))


def train_queues(
    queues: Queues,
    root: Path,
    data: Path | None,
    tick: Callable[[float], None],
    on_event: Callable[[Event], Any],
    again: bool = False,
) -> None:
    """Train all queues on the GPU, each after those whose results it needs.

    With `again` also runs that results/ has.
    """
    for number, name in enumerate(queues.names, start=1):
        runs = queues.read_runs(root, store.RESULTS)
        train_queue(
            queues.make(name, runs), root, finished=queues.read_runs(root) if again else runs, stop_after=math.inf,
            run_seconds=0, on_event=on_event, data=data, device="cuda", compile=True, **queues.get_options(name),
        )  # fmt: skip
        tick(number / len(queues.names))


def _add_line(root: Path, run: store.FinishedRun, every_step: bool) -> None:
    """Add a run to finished.jsonl, on a line of its own. Raises OSError if the disk is too full for all of it."""
    sizes = {row["epoch"]: row["gradient_rms"] for row in read_rows(root / run.key / GRADIENTS)}
    curve = [
        {name: value for name, value in row.items() if every_step or not isinstance(value, list)}
        | {"gradient_rms": sizes.get(row["epoch"])}
        for row in read_rows(root / run.key / "metrics.jsonl")
    ]
    path = root / FINISHED
    before = path.read_bytes() if path.exists() else b""
    text = json.dumps({**vars(run), "ended": store.timestamp(), "curve": curve})
    start = "\n" if before and not before.endswith(b"\n") else ""  # after a line that was cut
    line = f"{start}{text}\n".encode()
    with path.open("ab", buffering=0) as file:  # one write: other processes add lines to the same file
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, "No space left on device; the line of a run was cut", str(path))


def make_gradient_observer(folder: Path) -> Observer:
    """The `observe` of `train` that writes gradients.jsonl in the run's folder, a row after each epoch."""

    def write(file: store.MetricsFile, epoch: int, training_step: TrainingStep) -> None:
        step = epoch * training_step.task.steps_per_epoch
        file.add({"step": step, "epoch": epoch, "gradient_rms": measure_gradient(training_step)})

    return make_file_observer(folder / GRADIENTS, write)


def measure_gradient(training_step: TrainingStep) -> float | None:
    """The root mean square of the last step's gradient, without weight decay; None if it is not finite, or missing."""
    gradients = [p.grad for p in training_step.model.parameters() if p.grad is not None]
    if not gradients:
        return None
    total = torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().item()
    size = math.sqrt(total / sum(gradient.numel() for gradient in gradients))
    return size if math.isfinite(size) else None


def _describe(run: store.FinishedRun) -> str:
    names = (
        "optimizer", "beta1", "beta2", "lr", "eps", "eps_s", "weight_decay", "beta_mean", "z_clip", "lean",
        "state_dtype", "clip", "injection", "seed",
    )  # fmt: skip
    settings = [f"{name}={run.recipe[name]}" for name in names if run.recipe.get(name) is not None]
    value = run.result.get("test_accuracy", run.result.get("validation_loss"))
    return " ".join([*settings, run.result["status"], f"{value}, {run.result['seconds']:.1f} s"])


# Keeping runs in a repository


def read_finished(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of a finished.jsonl, by key; one that was cut when a process died is left out with a warning."""
    lines = {}
    content = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for number, text in enumerate(content.splitlines(), start=1):
        if not text:  # the line before seemed cut, because another process was still writing it
            continue
        try:
            line = json.loads(text)
            lines[line["key"]] = line
        except (ValueError, LookupError, TypeError):
            print(f"{path}, line {number} was cut and is left out", file=sys.stderr)
    return lines


def make_exported_row(line: dict[str, Any]) -> dict[str, Any]:
    """What a repository keeps of a finished run: its evaluations, and of each epoch, or step, the loss."""
    curve = line["curve"]
    left_out = {"status"} | ({"curve"} if any("losses" in row for row in curve) else set())
    return {
        "key": line["key"],
        "status": line["result"]["status"],
        "settings": line["recipe"],
        "metrics": {name: value for name, value in line["result"].items() if name not in left_out},
        "curve": [
            {name: value for name, value in row.items() if not isinstance(value, list)}
            for row in curve
            if any(name.endswith("_loss") for name in row)
        ],
        "losses": [_round(loss) for row in curve for loss in row.get("losses", [row["loss"]])],
        "gradient_rms": [row.get("gradient_rms") for row in curve],
        "ended": line["ended"],
        **line["environment"],
    }


def _round(loss: float | None) -> float | None:
    return None if loss is None else round(loss, 3)


def add_rows(path: Path, head: Mapping[str, Any], new: Mapping[str, Any], order: Iterable[str]) -> int:
    """Add rows to a JSON file, one line each, sorted by their place in `order`; returns how many it has then.

    Raises InvalidInput if the file is damaged; then it is not changed.
    """
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
        rows = {row["key"]: row for row in before} | dict(new)
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidInput(f"{path} is damaged ({error}), so that no run was added; restore it first") from error
    ordered = [rows[key] for key in dict.fromkeys((*order, *rows)) if key in rows]
    start = json.dumps({**head, "made": store.timestamp()}, indent=1).removesuffix("\n}")
    body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in ordered)
    store.write_atomic(path, f'{start},\n "runs": [\n{body}\n]\n}}\n')
    return len(ordered)


class ExportSummary(NamedTuple):
    """What an export wrote, and what it left out."""

    counts: dict[str, int]
    """How many runs each file has now."""
    left_out: list[str]
    """The keys of runs that belong to no queue of the experiment, or to one that depends on runs that are missing."""


def export_queues(
    lines: Mapping[str, dict[str, Any]],
    results: Path,
    experiment: str,
    queues: Iterable[str],
    find_keys: Callable[[str], Sequence[str]],
) -> ExportSummary:
    """Add the runs of a finished.jsonl to the files of their queues in `results`.

    `find_keys(name)` returns the keys of a queue in their order. A run of several queues is in the file of the first.
    """
    waiting, counts = dict(lines), dict[str, int]()
    for name in queues:
        try:
            keys = find_keys(name)
        except InvalidInput:  # it depends on runs that are missing
            continue
        if new := {key: make_exported_row(waiting.pop(key)) for key in keys if key in waiting}:
            path = results / store.get_queue_file(experiment, name)
            counts[path.name] = add_rows(path, {"experiment": experiment, "queue": name}, new, keys)
    return ExportSummary(counts, list(waiting))


# The command of an experiment that trains queues


def run_command(description: str | None, queues: Queues, export: Callable[[Path, Path], ExportSummary]) -> None:
    """Train the queues that the command line names, in this order, or with `export` write what is finished to results/.

    One process compiles once for all of them. If too little time is left for a run of one queue, the next may have
    shorter ones. A queue that needs results of runs that are left is skipped. The same command in several processes
    shares the runs among them.

    `export(finished, results)` adds the runs of a finished.jsonl to files in `results`.
    """
    parser = _make_parser(description, queues.names)
    args = parser.parse_args()
    if len(args.run_seconds) not in (1, len(args.queue)):
        parser.error(f"{len(args.run_seconds)} --run-seconds for {len(args.queue)} queues; give one, or one for each")
    if "export" in args.queue and (args.queue != ["export"] or args.again):
        parser.error("export is a command of its own, without --again; run it after the queues")
    try:
        if args.queue == ["export"]:
            _print_exported(export(args.runs / FINISHED, args.results), args.results)
            return
        _train_named_queues(args, queues)
    except UserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def _make_parser(description: str | None, queues: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queue", nargs="+", choices=(*queues, "export"), metavar="queue", help=", ".join(queues))
    parser.add_argument("--runs", type=Path, default=store.ROOT, help="the store")
    parser.add_argument("--results", type=Path, default=store.RESULTS, help="results of earlier runs")
    parser.add_argument(
        "--again", action="store_true", help="also train runs that results/ has; not those in the store"
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds")
    parser.add_argument(
        "--run-seconds", type=float, nargs="+", default=[20.0],
        help="how long one run takes at most; one number for all queues, or one for each",
    )  # fmt: skip
    return parser


def _print_exported(summary: ExportSummary, results: Path) -> None:
    for name, count in summary.counts.items():
        print(count, "runs in", results / name)
    if left_out := summary.left_out:
        print(f"{len(left_out)} runs are of no queue here, or of one that needs more runs; the first: {left_out[0]}")


def _train_named_queues(args: argparse.Namespace, queues: Queues) -> None:
    deadline = time.monotonic() + args.stop_after
    for name, seconds in zip(args.queue, args.run_seconds * (len(args.queue) // len(args.run_seconds)), strict=True):
        runs = queues.read_runs(args.runs, args.results)
        try:
            queue = queues.make(name, runs)
        except InvalidInput as error:
            if name == args.queue[0]:
                raise
            print(f"{name}: {error}", flush=True)
            continue
        left = train_queue(
            queue, args.runs, finished=queues.read_runs(args.runs) if args.again else runs,
            stop_after=deadline - time.monotonic(), run_seconds=seconds, data=args.data, device=args.device,
            compile=args.device != "cpu", **queues.get_options(name),
        )  # fmt: skip
        print(left, "runs of", name, "are left", flush=True)
