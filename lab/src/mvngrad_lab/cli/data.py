"""`mvngrad data`: get data sets, prepare text, list what is here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, arg

from mvngrad_lab import tasks
from mvngrad_lab.cli.options import PLACES, DataOrSample
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.tasks.files import OnProgress
from mvngrad_lab.tasks.language.data.text import ARCHIVES, TEXTS

IMAGES = tuple(sorted({path.parent.name for folder in tasks.__path__ for path in Path(folder).glob("*/data.py")}))
"""Tasks whose data.py has `download(folder, on_progress)` and `load(folder)`."""
DATA_SETS = (*IMAGES, *TEXTS)
REPORT_EVERY = 30.0
"""Seconds between lines of progress where there is no terminal."""
TargetFolder = Annotated[
    Path | None,
    arg(metavar="FOLDER", help="where it is, or is put", help_behavior_hint=f"(default: {PLACES})"),
]


@dataclass
class Get:
    """Download a data set, verify it by checksums, and tokenize text. Existing files are verified and kept.

    wikipedia_en, our stand-in for the texts of the paper, and wikitext103-validation are not downloaded: FOLDER has
    the text.
    """

    examples: ClassVar[tuple[str, ...]] = ("mvngrad data get mnist", "mvngrad data get wikitext103 --data FOLDER")
    name: Annotated[Positional[str], arg(metavar="NAME", help=", ".join(DATA_SETS))]
    data: TargetFolder = None

    def __call__(self) -> int:
        from mvngrad_lab.tasks.language.data.prepare import prepare_tokens

        if self.name not in DATA_SETS:
            raise InvalidInput(f"NAME={self.name!r} is no data set; there are {', '.join(DATA_SETS)}")
        with progress() as bar:
            if self.name in IMAGES:
                folder = _data_module(self.name).download(self.data, bar("download"))
                description = f"{folder / self.name}: {_describe_images(self.name, folder)}"
            else:
                tokens = prepare_tokens(self.name, self.data, on_progress=bar("tokens"), on_download=bar("download"))
                description = describe_tokens(tokens)
        print(description)
        return 0


@dataclass
class Prepare:
    """Tokenize the .txt files of a folder, and print the name to give to `train --text`."""

    examples: ClassVar[tuple[str, ...]] = ("mvngrad data prepare my-texts",)

    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="a folder with text, also in subfolders")]
    data: TargetFolder = None

    def __call__(self) -> int:
        from mvngrad_lab.tasks.language.data.prepare import prepare_folder_tokens

        with progress() as bar:
            name, tokens = prepare_folder_tokens(self.folder, self.data, on_progress=bar("tokens"))
        print(f"{describe_tokens(tokens)}\n{name}")
        return 0


@dataclass
class List:
    """List the data sets and whether they are here, prepared texts, and which digits a reproduction would use."""

    examples: ClassVar[tuple[str, ...]] = ("mvngrad data list", "mvngrad data list --data FOLDER")

    data: DataOrSample = None

    def __call__(self) -> int:
        from mvngrad_lab.tasks.language.data.tokens import list_texts

        for name in IMAGES:
            print(f"{name}: {_describe_or_explain(_describe_images, name, self.data)}")
        try:
            folders = list_texts(self.data)
        except FileNotFoundError:
            return 0  # --data is not a folder, as was printed for every data set
        for name, folder in folders.items():
            print(f"{name}: {_describe_or_explain(describe_tokens, folder)}")
        for name in TEXTS:
            if name not in folders:
                source = "" if name in ARCHIVES else " --data FOLDER"
                print(f"{name}: not here; get it with `mvngrad data get {name}{source}`")
        return 0


@dataclass
class DataSets:
    """Get data sets, tokenize text, and list what is here."""

    examples: ClassVar[tuple[str, ...]] = ("mvngrad data list", "mvngrad data get mnist")
    commands: ClassVar[dict[str, Any]] = {"get": Get, "prepare": Prepare, "list": List}


def _data_module(task: str) -> Any:
    return import_module(f"{tasks.__name__}.{task}.data")


def _describe_images(name: str, folder: Path | None) -> str:
    return str(_data_module(name).load(folder).source)


def _describe_or_explain(describe: Callable[..., str], *arguments: Any) -> str:
    """What `describe` returns, or the message of its error: the data is missing or damaged."""
    try:
        return describe(*arguments)
    except (FileNotFoundError, ValueError) as error:
        return str(error)


def describe_tokens(folder: Path) -> str:
    """A folder of tokens, its text and its size, in one line; raises MissingFile or DamagedFile."""
    from mvngrad_lab.tasks.language.data.tokens import Manifest

    manifest = Manifest.read(folder)
    train, validation = manifest.train.tokens, manifest.validation.tokens
    return f"{folder}: {manifest.source}; {train:,} tokens to train on, {validation:,} to validate"


@contextmanager
def progress() -> Iterator[Callable[[str], OnProgress]]:
    """Make progress bars by name, each shown from its first report; without a terminal, lines every REPORT_EVERY
    seconds. They go to stderr: what a command prints to stdout is its result.
    """
    from rich.console import Console
    from rich.filesize import decimal
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)

    def make_lines(name: str) -> OnProgress:
        last = time.monotonic()

        def report(done: int, total: int | None) -> None:
            nonlocal last
            if time.monotonic() - last >= REPORT_EVERY:
                last = time.monotonic()
                share = f" of {decimal(total)}, {done / total:.0%}" if total else ""
                console.print(f"{name}: {decimal(done)}{share}", highlight=False, soft_wrap=True)

        return report

    if not console.is_terminal:
        yield make_lines
        return
    with Progress(*columns, console=console, transient=True) as bars:

        def make_bar(name: str) -> OnProgress:
            bar = bars.add_task(name, total=None, visible=False)
            return lambda done, total: bars.update(bar, completed=done, total=total, visible=True)

        yield make_bar
