"""Checkpoints of a run in one folder: written whole or not at all, checked when read, the newest few kept.

One process writes a file, a plain `torch.save` of tensors, numbers and strings. Several write a folder of
torch.distributed.checkpoint, each its part, which any number of processes can read. The name carries the step and the
beginning of the sha256 of the content, so that what was cut short or changed is known by its name alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mvngrad_lab.store import read_chunks, write_atomic
from mvngrad_lab.store.lock import Check
from mvngrad_lab.training import parallel

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.(pt|dcp)")
PARTIAL = ".partial"
"""Begins the name of what is half written; the rest is of the process that writes it."""
NOTES = "notes.json"
FOLDER = "checkpoints"
"""In the folder of a run."""
MODEL = "model."
"""Begins the names of a model's tensors in a state."""
State = Mapping[str, Tensor]


def digest(path: Path) -> str:
    """Of a file, or of all files of a folder and their names."""
    found = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if path.is_dir():
            found.update(file.name.encode())
        with file.open("rb") as opened:
            for chunk in read_chunks(opened):
                found.update(chunk)
    return found.hexdigest()[:16]


def save(folder: Path, step: int, notes: dict[str, Any], state: State, keep: int, check: Check = lambda: None) -> None:
    """Write a checkpoint and remove all but the newest `keep`, this one among them.

    Of several processes all have to ask.

    Args:
        folder: of the checkpoints.
        step: of the run.
        notes: numbers that belong to it.
        state: all tensors, whole or this process's parts.
        keep: how many are kept.
        check: asked by the first process before it begins, and again before the checkpoint gets its name: what is half
            written may be removed as soon as the folder is another's.
    """
    first = parallel.get_rank() == 0
    partial = folder / parallel.broadcast_from_rank0(f"{PARTIAL}.{platform.node()}-{os.getpid()}")
    if first:
        check()
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{PARTIAL}*"):
            _remove(left)
    if dist.is_initialized():
        from torch.distributed.checkpoint import filesystem, state_dict_saver

        parallel.barrier()
        state_dict_saver.save(dict(state), storage_writer=filesystem.FileSystemWriter(partial))
        if first:
            write_atomic(partial / NOTES, json.dumps({"step": step, **notes}))
    else:
        try:
            with partial.open("wb") as file:
                kept = {name: value.cpu() for name, value in state.items()}
                torch.save({"step": step, **notes, "state": kept}, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:
            # Where the disk is full, torch fails once more as it closes its archive, and says something about that.
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            _remove(partial)
            raise OSError(cause.errno, f"{cause.strerror}; a checkpoint could not be written", str(folder)) from error
    if first:
        check()
        path = folder / f"step-{step:08d}-{digest(partial)}.{'dcp' if partial.is_dir() else 'pt'}"
        if path.is_dir():  # the same was written before, and a folder is not replaced
            _remove(path)
        os.replace(partial, path)
        _sync(folder)
        for old in [other for other in list_checkpoints(folder) if other != path][max(keep, 1) - 1 :]:
            _remove(old)
    parallel.barrier()


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints by name, the newest first."""
    named = [(match, path) for path in folder.glob("step-*") if (match := NAME.fullmatch(path.name))]
    return [path for match, path in sorted(named, key=lambda pair: int(pair[0][1]), reverse=True)]


def find_newest(folder: Path, tell: Callable[[str], Any] = print) -> Path | None:
    """The newest checkpoint that is as it was written; `tell` is told of those that are not."""
    for path in list_checkpoints(folder):
        if path.stem.endswith(f"-{digest(path)}"):
            return path
        tell(f"{path.name} is damaged, its content is not what was written; it is not used")
    return None


def load(path: Path, state: State) -> dict[str, Any]:
    """Give the tensors of `state` what a checkpoint has for them, however many processes wrote it; its notes."""
    if path.is_dir():
        notes: dict[str, Any] = json.loads((path / NOTES).read_text(encoding="utf-8"))
        _fits(state, _stored(path))
        _fill(path, state)
        return notes
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    saved: dict[str, Tensor] = content.pop("state")
    _fits(state, {name: (value.shape, value.dtype) for name, value in saved.items()})
    copy_tensors(saved, state)
    return content


def load_weights(run: Path) -> dict[str, Tensor]:
    """The model in the newest checkpoint of a run's folder, for `load_state_dict`, however many processes wrote it."""
    path = find_newest(run / FOLDER)
    if path is None:
        raise FileNotFoundError(f"{run} has no checkpoint; name the folder of a run, as runs/NAME-HASH")
    if path.is_dir():
        shapes = {name: kind for name, kind in _stored(path).items() if name.startswith(MODEL)}
        saved = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        _fill(path, saved)
    else:
        saved = torch.load(path, map_location="cpu", weights_only=True)["state"]
    return {name.removeprefix(MODEL): value for name, value in saved.items() if name.startswith(MODEL)}


def _stored(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """What a checkpoint of several processes has, by name."""
    from torch.distributed.checkpoint import filesystem

    stored: dict[str, Any] = filesystem.FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: (value.size, value.properties.dtype) for name, value in stored.items()}


def _fill(path: Path, state: State) -> None:
    """Give tensors what such a checkpoint has for them."""
    from torch.distributed.checkpoint import filesystem, state_dict_loader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process may read it as well
        state_dict_loader.load(dict(state), storage_reader=filesystem.FileSystemReader(path))


def copy_tensors(saved: State, state: State) -> None:
    """Give tensors the values of others, whole ones."""
    with torch.no_grad():
        for name, value in state.items():
            parallel.copy_into(value, saved[name])


def _fits(state: State, saved: Mapping[str, Any]) -> None:
    """Whether names, shapes and dtypes are the same."""
    strange = sorted(state.keys() ^ saved.keys()) or [
        name for name, value in state.items() if (value.shape, value.dtype) != saved[name]
    ]
    if strange:
        raise ValueError(
            f"the checkpoint is of another version of the model or optimizer: {strange[0]} does not fit; "
            "delete the run's folder to train it anew"
        )


def _remove(path: Path) -> None:
    """A folder leaves its name first: half of one must not be taken for a checkpoint."""
    if path.is_dir():
        doomed = path if path.name.startswith(PARTIAL) else path.rename(path.with_name(f"{PARTIAL}.{path.name}"))
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make a rename last beyond a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
