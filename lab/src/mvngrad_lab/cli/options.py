"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from mvngrad_lab.errors import InvalidInput

PLACES = "$MVNGRAD_DATA, else the cache"
Data = Annotated[
    Path | None,
    arg(metavar="FOLDER", help="folder with data sets", help_behavior_hint=f"(default: {PLACES})"),
]
DataOrSample = Annotated[
    Path | None,
    arg(
        metavar="FOLDER",
        help="folder with data sets",
        help_behavior_hint=f"(default: {PLACES}; without MNIST there, 5,000 digits of the package)",
    ),
]
Runs = Annotated[Path, arg(metavar="FOLDER", help="folder of results")]


def make_runs_folder(runs: Path) -> None:
    """Create the folder of --runs if it is missing; raise InvalidInput if that is not possible."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"--runs {runs} is not a folder and cannot be made ({error.strerror}); name another"
        ) from error


def check_page(page: Path, example: str) -> None:
    """Raise InvalidInput if --out is a folder, or a file that is not named as an HTML page and would be lost."""
    if page.is_dir():
        raise InvalidInput(f"--out {page} is a folder; name the page, such as {page / example}")
    if page.exists() and page.suffix.lower() not in (".html", ".htm"):
        raise InvalidInput(
            f"--out {page} exists and is not an HTML page; name another file, such as {page.with_suffix('.html')}"
        )
