"""Text as token numbers in a file, and the windows of it that a training step sees.

A folder holds train.bin and validation.bin, little-endian uint16 without a header, and manifest.json, written last: a
folder without it is not finished. `prepare` makes such folders; reading them needs torch alone.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import sys
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from mvngrad.diagnostics.records import add_checksum, pop_checksum
from mvngrad_lab.errors import InvalidInput, MissingFile, NotPossible
from mvngrad_lab.store import write_atomic
from mvngrad_lab.tasks.files import DamagedFile, search_folders, sha256
from mvngrad_lab.tasks.language.data.text import TEXTS

END_OF_TEXT = 50256
"""The token after every document."""
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
REMEDY = "Delete its folder and prepare the text again"


@dataclass(frozen=True)
class Part:
    """One file of tokens."""

    tokens: int
    documents: int
    sha256: str

    def __post_init__(self) -> None:
        if not (isinstance(self.tokens, int) and isinstance(self.documents, int) and isinstance(self.sha256, str)):
            raise ValueError(f"it has {self}")


@dataclass(frozen=True)
class Manifest:
    """What a folder of tokens holds, and from which text it was made."""

    source: str
    """Description of the text for a report."""
    tokenizer: str
    split: str
    """The rule that assigned documents to train or validation."""
    files: tuple[tuple[str, int, str], ...]
    """Name, bytes and sha256 of every file of text, in order."""
    train: Part
    validation: Part

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder; raises MissingFile or DamagedFile with the remedy."""
        path = folder / MANIFEST
        if not path.is_file():
            raise MissingFile(f"{folder} has no {MANIFEST}: its text is not prepared, or not to the end")
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if not pop_checksum(fields):
                raise ValueError("its content is not what was written")
            parts = {split: Part(**fields.pop(split)) for split in SPLITS}
            files = tuple((name, size, digest) for name, size, digest in fields.pop("files"))
            return cls(files=files, train=parts["train"], validation=parts["validation"], **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedFile(f"{path} cannot be read ({error}). {REMEDY}") from error

    def write(self, folder: Path) -> None:
        write_atomic(folder / MANIFEST, json.dumps(add_checksum(asdict(self)), indent=1) + "\n")


@dataclass(frozen=True)
class Tokens:
    """The tokens of one split, read from the disk when they are used."""

    manifest: Manifest
    data: Tensor
    """All of them, as int16; `token_ids` makes token numbers of them."""

    @classmethod
    def open(cls, folder: Path, split: str = "train", *, checksum: bool = False) -> Tokens:
        """The tokens of `folder`; raises DamagedFile unless the file has the size and the sha256 of the manifest.

        The sha256 is computed once and again when size or time of change of the file differ; always with `checksum`.
        """
        if sys.byteorder != "little":
            raise NotPossible("token files are little-endian, and this machine is not")
        manifest = Manifest.read(folder)
        part: Part = getattr(manifest, split)
        path = folder / f"{split}.bin"
        size = path.stat().st_size if path.is_file() else 0
        if size != 2 * part.tokens or not path.is_file():
            raise DamagedFile(f"{path} has {size} bytes and not {2 * part.tokens} as {MANIFEST} says. {REMEDY}")
        _verify(path, part.sha256, checksum)
        if not size:
            return cls(manifest, torch.empty(0, dtype=torch.int16))
        # A read-only mapping: a private one, as torch.from_file makes, is refused if the file is larger than memory.
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return cls(manifest, torch.frombuffer(mapped, dtype=torch.int16))

    def __len__(self) -> int:
        return len(self.data)


def _verify(path: Path, expected: str, always: bool) -> None:
    """Raise DamagedFile unless the file has the `expected` sha256, or had it when it was last changed.

    What was verified is noted next to the file: its sha256, size and times of change. The second time, which the system
    sets, differs also if a tool that edits the file restores the first.
    """
    note, status = path.with_suffix(".verified"), path.stat()
    state = f"{expected} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n"
    if not always:
        with suppress(OSError, ValueError):
            if note.read_text() == state:
                return
    if (actual := sha256(path)) != expected:
        raise DamagedFile(f"{path} has sha256 {actual} and not {expected}. {REMEDY}")
    with suppress(OSError):  # a folder that cannot be written to is verified each time
        write_atomic(note, state)


def find_tokens(text: str, folder: Path | None = None) -> Path | None:
    """The folder tokens/`text` in `folder`, in that of MVNGRAD_DATA, or in the cache; None if there is none."""
    return next((place for place in _token_folders(text, folder) if (place / MANIFEST).is_file()), None)


def require_tokens(text: str, folder: Path | None = None) -> Path:
    """As `find_tokens`, but raises MissingFile with the remedy if there are none."""
    if (place := find_tokens(text, folder)) is not None:
        return place
    remedy = (
        f"`mvngrad data get {text}` prepares it"
        if text in TEXTS
        else "`mvngrad data prepare FOLDER` prepares any text and prints the name to use here"
    )
    raise MissingFile(
        f"no tokens of text={text!r} are in {', '.join(map(str, _token_folders(text, folder)))}; {remedy}. "
        f"Prepared are: {', '.join(list_texts(folder)) or 'none'}"
    )


def list_texts(folder: Path | None = None) -> dict[str, Path]:
    """The folders of all prepared texts by name."""
    parents = [place for place in reversed(search_folders("tokens", folder)) if place.name == "tokens"]
    folders = {path.parent.name: path.parent for parent in parents for path in parent.glob(f"*/{MANIFEST}")}
    return dict(sorted(folders.items()))


def is_text_name(text: str) -> bool:
    """Whether it can be the name of a text, and of a folder in tokens/."""
    return re.fullmatch(r"\w[\w.-]*", text, re.ASCII) is not None


def _token_folders(text: str, folder: Path | None) -> list[Path]:
    if not is_text_name(text):
        raise InvalidInput(
            f"text={text!r} is not the name of a text; for a folder of your own it is the one that "
            "`mvngrad data prepare FOLDER` prints"
        )
    return [place / text for place in search_folders("tokens", folder)]


def read_windows(data: Tensor, starts: Tensor, length: int) -> Tensor:
    """The tokens from each of `starts` on, int16 [len(starts), length], on the device of `data` without a copy back."""
    return data.unfold(0, length, 1).index_select(0, starts)


def token_ids(data: Tensor) -> Tensor:
    """Token numbers as int64, from int16: few operations of torch support uint16, on a GPU even fewer."""
    return data.long() & 0xFFFF


def window_starts(seed: int, step: int, batch: int, context: int, tokens: int) -> Tensor:
    """Where the windows of a step begin, int64 [batch]: uniform, with repetition; each has context + 1 tokens.

    A function of its arguments alone: no random generator, version of torch, earlier step or number of ranks matters.
    Rank r takes `rank_slice(r, ranks, batch)` of it.

    >>> window_starts(seed=0, step=7, batch=4, context=8, tokens=1000).tolist()
    [464, 712, 326, 617]
    """
    drawn = hashlib.shake_256(f"mvngrad offsets {seed} {step}".encode()).digest(8 * batch)
    return (torch.frombuffer(bytearray(drawn), dtype=torch.int64) & (2**63 - 1)) % (tokens - context)


def rank_slice(rank: int, ranks: int, batch: int) -> slice:
    """The part of a batch that one of several ranks takes; sizes differ by at most one.

    >>> [rank_slice(rank, 3, 8) for rank in range(3)]
    [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)]
    """
    return slice(batch * rank // ranks, batch * (rank + 1) // ranks)
