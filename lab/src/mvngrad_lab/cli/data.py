"""`mvngrad data`: get data sets, prepare text, see what is here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg, subcommand

from mvngrad_lab.cli.options import DataOrSample

IMAGES = ("mnist", "cifar100")
QUIET = 30.0
"""Seconds between lines where there is no bar."""
Told = Callable[[int, int | None], Any]
"""Is told how many bytes are done, and of how many."""
DATA_SETS = (*IMAGES, "wikitext103", "openwebtext", "wikipedia_en", "wikitext103-validation")
Home = Annotated[
    Path | None,
    arg(metavar="FOLDER", help="where it is, or is put", help_behavior_hint="(default: MVNGRAD_DATA's, or the cache)"),
]


@dataclass
class Get:
    """Download a data set, with checksums, and make tokens of a text. What is there is verified and kept.

    wikipedia_en, our stand-in for the texts of the paper, and wikitext103-validation are not downloaded: FOLDER has
    the text.
    """

    name: Annotated[Positional[str], arg(metavar="NAME", help=", ".join(DATA_SETS))]
    data: Home = None

    def __call__(self) -> int:
        from mvngrad_lab.tasks.language.data.prepared import prepared

        if self.name not in DATA_SETS:
            raise ValueError(f"NAME={self.name!r} is no data set; there are {', '.join(DATA_SETS)}")
        with progress() as bar:
            if self.name in IMAGES:
                module = import_module(f"mvngrad_lab.tasks.{self.name}.data")
                folder = module.download(self.data, bar("download"))
                told = f"{folder / self.name}: {module.load(folder).source}"
            else:
                told = described(prepared(self.name, self.data, on_progress=bar("tokens"), on_download=bar("download")))
        print(told)
        return 0


@dataclass
class Prepare:
    """Make tokens of the .txt files of a folder, and print the name by which `train --text` knows them."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="a folder with text, and with others in it")]
    data: Home = None

    def __call__(self) -> int:
        from mvngrad_lab.tasks.language.data.prepared import prepare_folder

        with progress() as bar:
            name, place = prepare_folder(self.folder, self.data, on_progress=bar("tokens"))
        print(f"{described(place)}\n{name}")
        return 0


@dataclass
class List:
    """Say which data sets are here, and which digits a reproduction would use."""

    data: DataOrSample = None

    def __call__(self) -> int:
        from mvngrad_lab.tasks.language.data import tokens

        for name in IMAGES:
            try:
                found = import_module(f"mvngrad_lab.tasks.{name}.data").load(self.data).source
            except (FileNotFoundError, ValueError) as error:
                found = str(error)
            print(f"{name}: {found}")
        try:
            texts = tokens.texts(self.data)
        except FileNotFoundError:
            return 0  # as was said of every data set
        for name, place in texts.items():
            print(f"{name}: {described(place)}")
        return 0


@dataclass
class DataSets:
    """Get data sets, make tokens of text, and see what is here."""

    command: (
        Annotated[Get, subcommand("get")]
        | Annotated[Prepare, subcommand("prepare")]
        | Annotated[List, subcommand("list")]
    )

    def __call__(self) -> int:
        return self.command()


def described(folder: Path) -> str:
    """Tokens in words."""
    from mvngrad_lab.tasks.language.data.tokens import Manifest

    found = Manifest.read(folder)
    return (
        f"{folder}: {found.source}; {found.train.tokens:,} tokens to train on, {found.validation.tokens:,} to validate"
    )


@contextmanager
def progress() -> Iterator[Callable[[str], Told]]:
    """Bars on a terminal, each from the first time that it is told something; elsewhere a line now and then. They are
    on stderr: what a command prints is what it made.
    """
    from rich.console import Console
    from rich.filesize import decimal
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)

    def lines(name: str) -> Told:
        last = time.monotonic()

        def told(done: int, total: int | None) -> None:
            nonlocal last
            if time.monotonic() - last >= QUIET:
                last = time.monotonic()
                share = f" of {decimal(total)}, {done / total:.0%}" if total else ""
                console.print(f"{name}: {decimal(done)}{share}", highlight=False, soft_wrap=True)

        return told

    if not console.is_terminal:
        yield lines
        return
    with Progress(*columns, console=console, transient=True) as bars:

        def bar(name: str) -> Told:
            task = bars.add_task(name, total=None, visible=False)
            return lambda done, total: bars.update(task, completed=done, total=total, visible=True)

        yield bar
