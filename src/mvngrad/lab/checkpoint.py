"""Checkpoints of a run in one folder: written whole or not at all, checked when read, the newest few kept.

A file is a plain `torch.save` of tensors, numbers and strings. Its name carries the step and the beginning of its
sha256, so that a file which was cut short or changed is known by its name alone.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt")
PARTIAL = ".partial"


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            found.update(piece)
    return found.hexdigest()[:16]


def save(folder: Path, step: int, content: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint and remove all but the newest `keep`, this one among them."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / PARTIAL
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    path = folder / f"step-{step:08d}-{digest(partial)}.pt"
    os.replace(partial, path)
    _sync(folder)
    for old in [other for other in found(folder) if other != path][max(keep, 1) - 1 :]:
        old.unlink()
    return path


def found(folder: Path) -> list[Path]:
    """All checkpoints by name, the newest first."""
    named = [(match, path) for path in folder.glob("step-*.pt") if (match := NAME.fullmatch(path.name))]
    return [path for match, path in sorted(named, key=lambda pair: int(pair[0][1]), reverse=True)]


def newest(folder: Path, tell: Callable[[str], Any] = print) -> dict[str, Any] | None:
    """The content of the newest checkpoint that can be read, on the CPU; `tell` is told of those that cannot."""
    for path in found(folder):
        if path.name.endswith(f"-{digest(path)}.pt"):
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            return content
        tell(f"{path.name} is damaged, its content is not what was written; the checkpoint before it is used")
    return None


def _sync(folder: Path) -> None:
    """Make a rename last beyond a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
