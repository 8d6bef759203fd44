"""Checkpoints of a run in one folder: written atomically, verified when read, only the newest few kept.

One process writes a file with `torch.save`. Several write a folder of torch.distributed.checkpoint, each its shards,
which any number of processes can read. The name has the step and the first digits of the content's sha256, so a file
that was cut short or changed is recognized.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from mvngrad_lab.errors import InvalidInput, MissingFile
from mvngrad_lab.store import read_chunks, write_atomic
from mvngrad_lab.store.lock import Check
from mvngrad_lab.training import parallel

FOLDER = "checkpoints"
"""In the folder of a run."""
NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.(pt|dcp)")
PARTIAL = ".partial"
"""Prefix of unfinished checkpoints; the rest of the name is that of the writing process."""
NOTES = "notes.json"
READ_ERRORS = (
    *(OSError, EOFError, pickle.UnpicklingError, RuntimeError, ValueError, LookupError, TypeError),
    *(AttributeError, ArithmeticError, ImportError),
)
"""What reading a damaged file, or one that is no checkpoint, raises."""
MODEL_PREFIX = "model."
"""Prefix of the model's tensors in a state; the other names are those of `TrainingStep.state_dict`."""


def save(
    folder: Path,
    step: int,
    notes: dict[str, Any],
    state: Mapping[str, Any],
    keep: int,
    check_lock: Check = lambda: None,
) -> None:
    """Write a checkpoint and remove all but the newest `keep`, counting this one. A collective.

    `notes` are JSON values, `state` tensors, whole or sharded. Rank 0 calls `check_lock`, which raises if the folder
    belongs to another process, before it starts and again before it renames the finished checkpoint.
    """
    is_rank0 = parallel.get_rank() == 0
    partial = folder / parallel.broadcast_from_rank0(f"{PARTIAL}.{platform.node()}-{os.getpid()}")
    if is_rank0:
        check_lock()
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(f"{PARTIAL}*"):
            _remove(unfinished)
    if dist.is_initialized():
        from torch.distributed.checkpoint import filesystem, state_dict_saver

        parallel.barrier()
        with _raise_first_failure():
            state_dict_saver.save(dict(state), storage_writer=filesystem.FileSystemWriter(partial))
        if is_rank0:
            write_atomic(partial / NOTES, json.dumps({"step": step, **notes}))
    else:
        on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
        _save_file(partial, {"step": step, **notes, "state": on_cpu})
    if is_rank0:
        check_lock()
        path = folder / f"step-{step:08d}-{_digest(partial)}.{'dcp' if partial.is_dir() else 'pt'}"
        if path.is_dir():  # the same checkpoint was written before, and os.replace does not replace a folder
            _remove(path)
        os.replace(partial, path)
        _sync(folder)
        for old in [other for other in list_checkpoints(folder) if other != path][max(keep, 1) - 1 :]:
            _remove(old)
    parallel.barrier()


def _save_file(path: Path, content: dict[str, Any]) -> None:
    try:
        with path.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        # On a full disk torch raises a second error when it closes its archive.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        _remove(path)
        raise OSError(cause.errno, f"{cause.strerror}; a checkpoint could not be written", str(path.parent)) from error


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, the newest first."""
    named = [(match, path) for path in folder.glob("step-*") if (match := NAME.fullmatch(path.name))]
    return [path for match, path in sorted(named, key=lambda pair: int(pair[0][1]), reverse=True)]


def find_newest(folder: Path, on_message: Callable[[str], Any] = print) -> Path | None:
    """The newest undamaged checkpoint. `on_message` is called for each damaged one."""
    for path in list_checkpoints(folder):
        if path.stem.endswith(f"-{_digest(path)}") and (any(path.iterdir()) if path.is_dir() else path.stat().st_size):
            return path
        on_message(f"{path.name} is damaged, its content is not what was written; it is not used")
    return None


def load(path: Path, template: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """The state and the notes of a checkpoint, however many processes wrote it; of a folder, names with the prefix.

    A tensor is read into that of the same name, shape and dtype in `template` if that one is sharded, and is whole
    otherwise. A collective if several processes read a checkpoint of several. Raises InvalidInput if the file is
    something else, or would run code.
    """
    try:
        if path.is_dir():
            return _read_folder(path, template, prefix), json.loads((path / NOTES).read_text(encoding="utf-8"))
        notes: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        state: dict[str, Any] = notes.pop("state")
    except READ_ERRORS as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if reason.startswith("Weights only"):  # torch goes on to recommend loading it all the same
            reason = "it has more than tensors and plain values"
        raise InvalidInput(f"{path} is not a checkpoint of a run ({reason}); delete it to use an older one") from error
    return state, notes


def load_weights(run: Path) -> dict[str, Tensor]:
    """The model in the newest checkpoint of a run's folder, for `load_state_dict`."""
    path = find_newest(run / FOLDER)
    if path is None:
        raise MissingFile(f"{run} has no checkpoint; name the folder of a run, as runs/NAME-HASH")
    state = load(path, {}, MODEL_PREFIX)[0]
    return {name.removeprefix(MODEL_PREFIX): value for name, value in state.items() if name.startswith(MODEL_PREFIX)}


class _MetadataUnpickler(pickle.Unpickler):
    """Refuses everything that the index of a distributed checkpoint does not consist of, so that it runs no code."""

    OTHERS: ClassVar = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.OTHERS or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"its index names {module}.{name}")


def _read_folder(path: Path, template: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    from torch.distributed.checkpoint import filesystem, state_dict_loader

    with (path / ".metadata").open("rb") as file:
        try:
            _MetadataUnpickler(file).load()
        except MemoryError as error:  # a length in it was damaged
            raise pickle.UnpicklingError("its index is damaged") from error
    reader = filesystem.FileSystemReader(path)
    state: dict[str, Any] = {}
    metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
    for name, stored in metadata.items():
        if name.startswith(prefix):
            own, size, dtype = template.get(name), stored.size, stored.properties.dtype
            same = own is not None and parallel.is_sharded(own) and (own.shape, own.dtype) == (size, dtype)
            state[name] = own if same else torch.empty(size, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads it too
        with _raise_first_failure():
            state_dict_loader.load(state, storage_reader=reader)
    return state


@contextmanager
def _raise_first_failure() -> Iterator[None]:
    """Raise the error of the first rank that failed, which torch wraps in a BaseException with a traceback as text."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def _digest(path: Path) -> str:
    """The beginning of the sha256 of a file, or of all files in a folder and their names."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if path.is_dir():
            digest.update(file.name.encode())
        with file.open("rb") as stream:
            for chunk in read_chunks(stream):
                digest.update(chunk)
    return digest.hexdigest()[:16]


def _remove(path: Path) -> None:
    """Delete a checkpoint. A folder is renamed first: half of one must not be taken for a checkpoint."""
    if path.is_dir():
        partial = path if path.name.startswith(PARTIAL) else path.rename(path.with_name(f"{PARTIAL}.{path.name}"))
        shutil.rmtree(partial)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make a rename survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
