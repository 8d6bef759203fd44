"""The command `mvngrad`: the only place that parses arguments. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

try:
    import tyro
    from tyro.conf import Positional, arg, subcommand
except ModuleNotFoundError:
    sys.exit("mvngrad: the command needs packages that the optimizers do not: pip install 'mvngrad[lab]'")

from mvngrad import __version__
from mvngrad.lab import store
from mvngrad.lab.recipes.cifar100 import Cifar100, paper
from mvngrad.lab.recipes.training import CELLS
from mvngrad.lab.targets import TARGETS

DESCRIPTION = "MVN-Grad and the optimizers beside it: reproduce the paper, diagnose a training."
DATA = ("mnist", "cifar100")
CONFIG = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff)
REPORT = "report.html"
Data = Annotated[
    Path | None,
    arg(
        metavar="FOLDER",
        help="folder with data sets",
        help_behavior_hint="(default: that of MVNGRAD_DATA, else the cache, else a small sample)",
    ),
]
Runs = Annotated[Path, arg(metavar="FOLDER", help="folder of results")]


@dataclass
class Reproduce:
    """Run the paper's theorems and figures on this machine and write a report. What is done is not done again."""

    targets: Annotated[
        Positional[tuple[str, ...]],
        arg(metavar="[TARGET ...]", help=", ".join(TARGETS), help_behavior_hint="(default: all that need no GPU)"),
    ] = ()
    quick: Annotated[bool, arg(help="small sizes, under two minutes", help_behavior_hint="")] = False
    data: Data = None
    runs: Runs = store.ROOT

    def __call__(self) -> int:
        from rich.console import Console

        from mvngrad.lab.progress import Bars
        from mvngrad.lab.reproduce import chosen, reproduce

        targets, console = chosen(self.targets), Console()
        display = Bars(console)
        try:
            with display:
                outcomes = reproduce(targets, display, root=self.runs, quick=self.quick, data=self.data)
        except KeyboardInterrupt:
            console.print("Interrupted. What is done is kept; run the same command to go on.")
            return 130
        Report(runs=self.runs)()
        return 1 if any(outcome.status == "failed" for outcome in outcomes) else 0


@dataclass
class Report:
    """Write the report from the results there are: one HTML file that needs nothing else."""

    runs: Runs = store.ROOT
    out: Annotated[
        Path | None,
        arg(metavar="FILE", help="the page", help_behavior_hint=f"(default: {REPORT} in the folder of results)"),
    ] = None
    keep: Annotated[
        Path | None,
        arg(
            metavar="FILE",
            help=f"first put the trainings behind the tables there, as {store.KEPT / store.BUNDLE}",
            help_behavior_hint="",
        ),
    ] = None

    def __call__(self) -> int:
        from mvngrad.lab.report.gather import gathered, worth_keeping
        from mvngrad.lab.report.page import render
        from mvngrad.lab.report.verdicts import judge
        from mvngrad.lab.store import now

        if self.keep is not None:
            found = worth_keeping(store.runs(self.runs))
            store.bundle(self.keep, found)
            print(f"{len(found)} runs of {self.runs} are in {self.keep}")
        runs, path = gathered(store.runs(self.runs, store.KEPT)), self.out or self.runs / REPORT
        store.write(path, render(judge(runs), runs, version=__version__, made=now()))
        print(path.resolve())
        return 0


@dataclass
class Diagnose:
    """Say which regime a training is in, from the record of a Monitor, and write a page about it."""

    record: Annotated[Positional[Path], arg(metavar="RUN", help="a JSONL file of a Monitor, or a folder with one")]
    out: Annotated[
        Path | None, arg(metavar="FILE", help="the page", help_behavior_hint="(default: beside the record)")
    ] = None

    def __call__(self) -> int:
        from mvngrad.diagnostics import diagnose, read_records
        from mvngrad.lab.report.diagnosis import render

        path = self.record / "monitor.jsonl" if self.record.is_dir() else self.record
        records = read_records(path)
        found = diagnose(records)
        print(found)
        page = self.out or path.with_suffix(".html")
        store.write(page, render(records, found, source=path.name))
        print(page.resolve())
        return 0


@dataclass
class Get:
    """Download a data set, with checksums. What is there already is verified and kept."""

    name: Annotated[Positional[Literal["mnist", "cifar100"]], arg(metavar="NAME", help=", ".join(DATA))]
    data: Annotated[
        Path | None, arg(metavar="FOLDER", help="where to put it", help_behavior_hint="(default: the cache)")
    ] = None

    def __call__(self) -> int:
        module = import_module(f"mvngrad.lab.data.{self.name}")
        folder = module.download(self.data)
        print(f"{folder / self.name}: {module.load(folder).source}")
        return 0


@dataclass
class List:
    """Say which data sets are here, and which digits a reproduction would use."""

    data: Data = None

    def __call__(self) -> int:
        for name in DATA:
            try:
                found = import_module(f"mvngrad.lab.data.{name}").load(self.data).source
            except (FileNotFoundError, ValueError) as error:
                found = str(error)
            print(f"{name}: {found}")
        return 0


@dataclass
class DataSets:
    """Get data sets, and see which are here."""

    command: Annotated[Get, subcommand("get")] | Annotated[List, subcommand("list")]

    def __call__(self) -> int:
        return self.command()


@dataclass
class Train:
    """Train a network by a recipe of the paper, or with settings of your own. An interrupted run goes on."""

    name: Annotated[Positional[Literal["cifar100"]], arg(metavar="NAME", help="cifar100")]
    recipe: Annotated[Cifar100, arg(name="")]
    data: Data = None
    runs: Runs = store.ROOT
    device: Annotated[Literal["auto", "cpu", "cuda"], arg(help="where to train")] = "auto"
    compile: Annotated[bool, arg(help="compile the model first: a minute that long runs earn back")] = False
    checkpoint_every: Annotated[float, arg(metavar="SECONDS", help="between checkpoints")] = 60.0
    tensorboard: Annotated[
        Path | None, arg(metavar="FOLDER", help="also write TensorBoard's files there", help_behavior_hint="")
    ] = None
    wandb: Annotated[str | None, arg(metavar="PROJECT", help="also log to Weights & Biases", help_behavior_hint="")] = (
        None
    )

    def __call__(self) -> int:
        import torch
        from rich.console import Console

        from mvngrad.lab import sinks
        from mvngrad.lab.progress import Training
        from mvngrad.lab.train import Interrupted, train

        device = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        with ExitStack() as stack:
            listeners: list[Any] = []
            if self.tensorboard is not None:
                listeners.append(stack.enter_context(closing(sinks.TensorBoard(self.tensorboard, self.recipe))))
            if self.wandb is not None:
                listeners.append(stack.enter_context(closing(sinks.WandB(self.wandb, self.recipe))))
            listeners.append(stack.enter_context(Training(Console())))
            try:
                run = train(
                    self.recipe,
                    root=self.runs,
                    data=self.data,
                    device=device,
                    compile=self.compile,
                    checkpoint_every=self.checkpoint_every,
                    on_event=lambda event: [listen(event) for listen in listeners],
                )
            except Interrupted as stop:
                print(f"mvngrad: {stop}", file=sys.stderr)
                return 128 + stop.signal_number
        for name, value in run.result.items():
            print(f"{name}: {value}")
        print(self.runs / run.key)
        return 0


def paper_settings(given: Sequence[str]) -> Cifar100:
    """The defaults of all other options: what the paper selected for this optimizer at the nearer batch size.

    A name that no recipe has is left for the parser proper to refuse.
    """
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--optimizer", default="mvngrad")
    first.add_argument("--batch-size", default="128")
    known, _ = first.parse_known_args([part.replace("_", "-") if part.startswith("--") else part for part in given])
    cell = known.optimizer.removesuffix("w")
    size = int(known.batch_size) if known.batch_size.isdecimal() else 128
    nearer = paper(cell if cell in CELLS else "mvngrad", 128 if size < 362 else 1024)
    return replace(nearer, optimizer=known.optimizer) if cell in CELLS else nearer


Command = (
    Annotated[Reproduce, subcommand("reproduce")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Diagnose, subcommand("diagnose")]
    | Annotated[Train, subcommand("train")]
    | Annotated[DataSets, subcommand("data")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; errors that a person can mend are one line on stderr, and exit code 2."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given in (["--version"], ["-V"]):
        print(f"mvngrad {__version__}")
        return 0
    try:
        if given[:1] == ["train"]:
            train = Train(name=tyro.MISSING, recipe=paper_settings(given))
            return tyro.cli(Train, prog="mvngrad train", default=train, args=given[1:], config=CONFIG)()
        return tyro.cli(Command, prog="mvngrad", description=DESCRIPTION, args=given, config=CONFIG)()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"mvngrad: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
