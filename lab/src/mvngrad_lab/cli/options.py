"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

PLACES = "that of MVNGRAD_DATA, else the cache"
Data = Annotated[
    Path | None,
    arg(metavar="FOLDER", help="folder with data sets", help_behavior_hint=f"(default: {PLACES})"),
]
DataOrSample = Annotated[
    Path | None,
    arg(
        metavar="FOLDER",
        help="folder with data sets",
        help_behavior_hint=f"(default: {PLACES}; of MNIST, else a small sample)",
    ),
]
Runs = Annotated[Path, arg(metavar="FOLDER", help="folder of results")]
