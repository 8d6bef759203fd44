"""The command `mvngrad`: the only place that parses arguments. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, ClassVar, Union

import tyro
from tyro.conf import Positional, arg, subcommand

from mvngrad import __version__
from mvngrad_lab import store
from mvngrad_lab.cli.data import DataSets
from mvngrad_lab.cli.options import DataOrSample, Runs, check_page, make_runs_folder
from mvngrad_lab.cli.sweep import Sweeps, hide_passwords
from mvngrad_lab.discovery import Experiment, find_experiments
from mvngrad_lab.errors import InvalidInput, MissingFile, NotPossible, UserError
from mvngrad_lab.store.lock import Check, Locked, lock_folder

CONFIG = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff)
REPORT = "report.html"
Open = Annotated[bool, arg(help="show the report in a browser", help_behavior_hint="")]
MOST_NAMES = 8
"""Files that an error lists."""


def list_experiments() -> str:
    """A line for each experiment: its name, how long it takes and where, and what it shows."""
    lines = ["experiments, with their time on one CPU core or one H200 GPU:"]
    for name, each in find_experiments().items():
        seconds = each.seconds[0]
        time = f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.0f} min"
        lines.append(f"  {name:<16} {time:>8}  {'GPU' if each.gpu else 'CPU'}  {each.summary}")
    return "\n".join(lines)


@dataclass
class Reproduce:
    """Run the paper's theorems and figures on this machine and write a report. Finished results are reused."""

    examples: ClassVar[tuple[str, ...]] = ("mvngrad reproduce --quick", "mvngrad reproduce spike separation")
    epilog: ClassVar[str] = list_experiments()
    experiments: Annotated[
        Positional[tuple[str, ...]],
        arg(
            metavar="[EXPERIMENT ...]",
            help="names from the list above",
            help_behavior_hint="(default: all that need no GPU and under 10 minutes)",
        ),
    ] = ()
    quick: Annotated[bool, arg(help="small sizes, under two minutes", help_behavior_hint="")] = False
    data: DataOrSample = None
    runs: Runs = store.ROOT
    open: Open = False

    def __call__(self) -> int:
        from mvngrad_lab.experiments import select_experiments

        selected = select_experiments(self.experiments)
        _check_gpu(selected)
        make_runs_folder(self.runs)
        with ExitStack() as stack:
            try:
                check_lock = stack.enter_context(lock_folder(self.runs))
            except Locked as error:
                raise Locked(f"{error}; or name another folder with --runs") from error
            return self._run(selected, check_lock)

    def _run(self, selected: list[Experiment], check_lock: Check) -> int:
        from rich.console import Console

        from mvngrad_lab.cli.progress import Bars
        from mvngrad_lab.experiments import reproduce

        console = Console()
        display = Bars(console)
        try:
            with display:
                outcomes = reproduce(
                    selected, display, root=self.runs, quick=self.quick, data=self.data, check=check_lock
                )
        except KeyboardInterrupt:
            console.print("Interrupted. Finished results are stored; run the same command to continue.")
            return 130
        check_lock()
        Report(runs=self.runs, open=self.open).write(self.experiments)
        return 1 if any(outcome.status == "failed" for outcome in outcomes) else 0


def _check_gpu(experiments: Sequence[Experiment]) -> None:
    """Raise NotPossible if an experiment needs a GPU and there is none."""
    need_gpu = [each for each in experiments if each.gpu]
    if not need_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        names = ", ".join(each.name for each in need_gpu)
        small = " ".join(dict.fromkeys(each.cpu_form for each in need_gpu if each.cpu_form))
        instead = f"`mvngrad reproduce {small}`, which asks the same on MNIST, or " if small else ""
        raise NotPossible(
            f"{names}: a CUDA device is needed, and torch sees none; use a machine with one, or {instead}`mvngrad "
            "reproduce` without names, which runs what needs none; `mvngrad report` in the clone shows the stored runs"
        )


@dataclass
class Report:
    """Write the report from the stored results: one HTML file that needs no other."""

    examples: ClassVar[tuple[str, ...]] = ("mvngrad report", "mvngrad report --runs runs --out page.html")
    runs: Runs = store.ROOT
    out: Annotated[
        Path | None,
        arg(metavar="FILE", help="the page", help_behavior_hint=f"(default: {REPORT} in the folder of results)"),
    ] = None
    keep: Annotated[
        Path | None,
        arg(
            metavar="FILE",
            help="first add the finished runs of tables and of GPU experiments to this file, a line each, to keep them "
            f"without their folders; every report also reads {store.RESULTS / store.BUNDLE}",
            help_behavior_hint="",
        ),
    ] = None

    open: Open = False

    def __call__(self) -> int:
        return self.write()

    def write(self, experiments: Sequence[str] = ()) -> int:
        """Write the page, and print a summary: of these experiments first, if there are some."""
        import webbrowser

        from mvngrad_lab.report import build, keep_runs

        page = self.out or self.runs / REPORT
        check_page(page, REPORT)
        if not self.runs.is_dir() and self.runs != store.ROOT:
            raise MissingFile(f"--runs {self.runs} is not a folder; name the one that has your results")
        if self.keep is not None:
            print(f"added {keep_runs(self.runs, self.keep)} runs from the folder {self.runs} to {self.keep}")
        has_own = bool(store.load_runs(self.runs)) or any(self.runs.glob("*.json"))
        if not has_own and (self.runs != store.ROOT or not store.RESULTS.is_dir()):
            store.print_warning(f"there is no result in {self.runs}; name a folder that has some with --runs")
        if not store.RESULTS.is_dir():
            print(
                f"no {store.RESULTS}/ in this folder: the runs stored with the repository are not included; run this "
                "in the clone to include them"
            )
        print("writing the report", flush=True)
        path = build(self.runs, store.RESULTS, out=page, say=_print_wrapped, experiments=experiments).resolve()
        print(f"report: {path}")
        if self.open and not webbrowser.open(path.as_uri()):
            store.print_warning("no browser could be started; open the file above by hand")
        return 0


@dataclass
class Diagnose:
    """Tell from a Monitor's file whether noise, signal or epsilon dominates a training; write an HTML page."""

    examples: ClassVar[tuple[str, ...]] = ("mvngrad diagnose runs/mnist-HASH", "mvngrad diagnose monitor.jsonl")
    records: Annotated[
        Positional[tuple[Path, ...]],
        arg(metavar="RUN", help="a JSONL file of a Monitor, or a folder with one", help_behavior_hint="(required)"),
    ]
    out: Annotated[
        Path | None, arg(metavar="FILE", help="the page", help_behavior_hint="(default: next to the record)")
    ] = None

    def __call__(self) -> int:
        from mvngrad.diagnostics import diagnose, read_records
        from mvngrad_lab.report.page import render_diagnosis

        if len(self.records) != 1:
            raise InvalidInput("diagnose takes one file, or one folder with a monitor.jsonl")
        path = find_monitor(self.records[0])
        page = self.out or path.with_suffix(".html")
        if page.exists() and page.samefile(path):
            another = path.with_suffix(".html") if path.suffix != ".html" else "diagnosis.html"
            raise InvalidInput(f"--out {page} is the monitor file itself; name another file, such as {another}")
        check_page(page, "diagnosis.html")
        try:
            records = read_records(path, store.print_warning)
        except ValueError as error:
            raise InvalidInput(str(error)) from error
        diagnosis = diagnose(records)
        print(diagnosis)
        store.write_atomic(page, render_diagnosis(records, diagnosis, source=path.name))
        print(page.resolve())
        return 0


def find_monitor(record: Path) -> Path:
    """The file of a Monitor, or that in a folder; raises MissingFile if there is none."""
    path = record / store.MONITOR if record.is_dir() else record
    if path.is_file():
        return path
    files = [each for each in record.glob("*.jsonl") if each.name not in ("metrics.jsonl", store.BUNDLE)]
    if names := sorted(map(str, [*files, *record.glob(f"*/{store.MONITOR}")])):
        shown = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
        raise MissingFile(f"no {store.MONITOR} in {record}; it has {shown}: name one of them")
    raise MissingFile(
        f"{path} does not exist; train with --monitored, or attach a Monitor, whose first record is written after "
        "`every` steps or by record()"
    )


@dataclass
class Train:
    """Train a network; an interrupted run is resumed, a finished one is not repeated."""

    # Only its help: the command itself is `cli.train.Train`, which needs the presets of all tasks.
    examples: ClassVar[tuple[str, ...]] = (
        "mvngrad train mnist",
        "mvngrad train mnist --optimizer torch:SGD,momentum=0.9 --lr 0.1",
        "mvngrad train mnist --optimizer package.module:CLASS,option=1",
        "mvngrad train package.module:function --lr 3e-3",
    )


@dataclass
class Mvngrad:
    """MVN-Grad and three related optimizers: reproduce the paper, train, sweep, diagnose a training.

    `mvngrad --version` prints the version.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "mvngrad train mnist",
        "mvngrad train mnist --optimizer adamw --monitored",
        "mvngrad sweep init mnist-5k && mvngrad sweep work mnist-5k && mvngrad sweep select mnist-5k",
        "mvngrad reproduce --quick",
    )
    commands: ClassVar[dict[str, Any]] = {
        "reproduce": Reproduce,
        "report": Report,
        "diagnose": Diagnose,
        "train": Train,
        "sweep": Sweeps,
        "data": DataSets,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for an error that the user can fix, 130 for Ctrl-C.

    Such an error is one line on stderr, or a traceback with MVNGRAD_DEBUG in the environment. Any other one is raised.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what the terminal's encoding lacks is printed as an escape
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            words = sys.argv[1:] if arguments is None else arguments
            return _run_command(hide_passwords([_expand_home(word) for word in words]))
        finally:
            _flush()
    except (UserError, OSError) as error:
        from mvngrad_lab.pool import STDOUT, is_stdout_closed

        if isinstance(error, BrokenPipeError) and is_stdout_closed():  # as by `head`: not an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
            return 141  # as if ended by SIGPIPE
        if os.environ.get("MVNGRAD_DEBUG"):
            raise
        print("mvngrad:", *str(error).splitlines(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return 130


def _expand_home(word: str) -> str:
    """--option=~/path with the home folder: shells expand ~ only at the start of a word, and it would be made here."""
    option, equals, value = word.partition("=")
    is_option = option.startswith("--") and value.startswith("~")
    return f"{option}{equals}{os.path.expanduser(value)}" if is_option else word


def _run_command(arguments: list[str]) -> int:
    if arguments in (["--version"], ["-V"]):
        print(f"mvngrad {__version__}")
        return 0
    command: Callable[[], int] = parse_command(Mvngrad, "mvngrad", arguments)
    return command()


def parse_command(kind: Any, prog: str, arguments: list[str]) -> Any:
    """The command that the arguments name, ready to be called; `kind` is a command, or has `commands` by name."""
    if kind is Train:
        from mvngrad_lab.cli import train

        return train.parse_training(arguments, _describe(Train), CONFIG)
    commands = getattr(kind, "commands", {})
    if arguments and arguments[0] in commands:
        return parse_command(commands[arguments[0]], f"{prog} {arguments[0]}", arguments[1:])
    if commands:  # --help, or a name that is unknown
        arguments = arguments or ["--help"]
        kinds = tuple(Annotated[command, subcommand(name)] for name, command in commands.items())
        kind, description = Union[kinds], _describe(kind)  # noqa: UP007 (made at run time)
    else:
        description = _describe(kind)
    return tyro.cli(kind, prog=prog, description=description, args=arguments, config=CONFIG)


def _describe(kind: Any) -> str:
    """A command's docstring, examples and epilog, for its --help."""
    examples = "".join(f"\n  {example}" for example in kind.examples)
    parts = inspect.cleandoc(kind.__doc__), f"examples:{examples}", getattr(kind, "epilog", "")
    return "\n\n".join(filter(None, parts))


def _print_wrapped(line: str) -> None:
    """Print a line, wrapped at words on a terminal."""
    width = min(100, shutil.get_terminal_size().columns) if sys.stdout and sys.stdout.isatty() else sys.maxsize
    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print(wrapper.fill(line))  # paths stay in one piece


def _flush() -> None:
    if sys.stdout is not None:  # as with `>&-`
        sys.stdout.flush()
