"""Text as token numbers in a file, and which of them a training step sees.

A folder holds train.bin and validation.bin, little-endian uint16 from end to end, and manifest.json, written last: a
folder without it is not finished. `mvngrad_lab.tasks.language.data.text` makes such folders; to read them needs
torch alone.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from mvngrad_lab.store import write_atomic
from mvngrad_lab.tasks.files import DamagedFile, search_folders, sha256

END_OF_TEXT = 50256
"""The token after every document."""
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
_AGAIN = "Delete its folder and prepare the text again"


@dataclass(frozen=True)
class Part:
    """One file of tokens."""

    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a folder of tokens holds, and what it was made of."""

    source: str
    """What the text is, in words for a report."""
    tokenizer: str
    split: str
    """The rule by which documents went to train or validation."""
    files: tuple[tuple[str, int, str], ...]
    """Name, bytes and sha256 of every file of text, in order."""
    train: Part
    validation: Part

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder; an error that says what to do if it has none."""
        path = folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no {MANIFEST}: its text is not prepared, or not to the end")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            parts = {split: Part(**found.pop(split)) for split in SPLITS}
            files = tuple((name, size, digest) for name, size, digest in found.pop("files"))
            return cls(files=files, train=parts["train"], validation=parts["validation"], **found)
        except (ValueError, TypeError, KeyError) as error:
            raise DamagedFile(f"{path} cannot be read ({error}). {_AGAIN}") from error

    def write(self, folder: Path) -> None:
        write_atomic(folder / MANIFEST, json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True)
class Tokens:
    """The tokens of one split, read from the disk when they are asked for."""

    manifest: Manifest
    data: Tensor
    """All of them, int16 as they lie in the file; `windows` makes them token numbers."""

    @classmethod
    def open(cls, folder: Path, split: str = "train", *, checksum: bool = False) -> Tokens:
        """The tokens of `folder`; a DamagedFile error unless the file has the size, and if asked for the sha256, of
        the manifest.
        """
        if split not in SPLITS:
            raise ValueError(f"split={split!r} is not one of {', '.join(SPLITS)}")
        if sys.byteorder != "little":
            raise RuntimeError("token files are little-endian, and this machine is not")
        manifest = Manifest.read(folder)
        part: Part = getattr(manifest, split)
        path = folder / f"{split}.bin"
        size = path.stat().st_size if path.is_file() else 0
        if size != 2 * part.tokens or not path.is_file():
            raise DamagedFile(f"{path} has {size} bytes and not {2 * part.tokens} as {MANIFEST} says. {_AGAIN}")
        if checksum and (actual := sha256(path)) != part.sha256:
            raise DamagedFile(f"{path} has sha256 {actual} and not {part.sha256}. {_AGAIN}")
        if not size:
            return cls(manifest, torch.empty(0, dtype=torch.int16))
        # Mapped to be read only: a private mapping, as torch.from_file makes, is refused where memory is smaller.
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return cls(manifest, torch.frombuffer(mapped, dtype=torch.int16))

    def __len__(self) -> int:
        return len(self.data)


def found(text: str, folder: Path | None = None) -> Path | None:
    """Where the tokens of a text are: tokens/`text` in `folder`, in that of MVNGRAD_DATA, or in the cache."""
    return next((place for place in _looked(text, folder) if (place / MANIFEST).is_file()), None)


def located(text: str, folder: Path | None = None) -> Path:
    """As `found`, with an error that says what to do if they are nowhere."""
    if (place := found(text, folder)) is not None:
        return place
    from mvngrad_lab.tasks.language.data.text_corpora import TEXTS

    remedy = (
        f"`mvngrad data get {text}` prepares it"
        if text in TEXTS
        else "`mvngrad data prepare FOLDER` prepares any text and prints the name to use here"
    )
    raise FileNotFoundError(
        f"no tokens of text={text!r} are in {', '.join(map(str, _looked(text, folder)))}; {remedy}. "
        f"Prepared are: {', '.join(texts(folder)) or 'none'}"
    )


def texts(folder: Path | None = None) -> dict[str, Path]:
    """All texts whose tokens are prepared, by name, and where."""
    homes = [place for place in search_folders("tokens", folder) if place.name == "tokens" and place.is_dir()]
    there = (place for home in reversed(homes) for place in sorted(home.iterdir()) if is_name(place.name))
    return {place.name: place for place in there if found(place.name, folder)}


def is_name(text: str) -> bool:
    """Whether it can be the name of a text, and of a folder in tokens/."""
    return re.fullmatch(r"\w[\w.-]*", text, re.ASCII) is not None


def _looked(text: str, folder: Path | None) -> list[Path]:
    if not is_name(text):
        raise ValueError(
            f"text={text!r} is not the name of a text; for a folder of your own it is the one that "
            "`mvngrad data prepare FOLDER` prints"
        )
    return [place / text for place in search_folders("tokens", folder)]


def windows(data: Tensor, starts: Tensor, length: int) -> Tensor:
    """The tokens from each of `starts` on, int64 [len(starts), length]; on the device of `data`, nothing read back."""
    return numbers(packed(data, starts, length))


def packed(data: Tensor, starts: Tensor, length: int) -> Tensor:
    """`windows` as they lie in the file, int16: a quarter of the memory for what waits to be trained on."""
    return data.unfold(0, length, 1).index_select(0, starts)


def numbers(data: Tensor) -> Tensor:
    """What int16 stands for: most of torch, on a GPU even more of it, knows no uint16."""
    return data.long() & 0xFFFF


def offsets(seed: int, step: int, batch: int, context: int, tokens: int) -> Tensor:
    """Where the windows of a step begin, int64 [batch], drawn evenly and with repetition; each has context + 1 tokens.

    It depends on its arguments alone, not on a random generator, a version of torch, the steps before or the number of
    ranks: rank r takes `share(r, ranks, batch)` of it.

    >>> offsets(seed=0, step=7, batch=4, context=8, tokens=1000).tolist()
    [464, 712, 326, 617]
    """
    if tokens <= context:
        raise ValueError(f"tokens={tokens} are too few for one window of context={context} + 1")
    drawn = hashlib.shake_256(f"mvngrad offsets {seed} {step}".encode()).digest(8 * batch)
    return (torch.frombuffer(bytearray(drawn), dtype=torch.int64) & (2**63 - 1)) % (tokens - context)


def share(rank: int, ranks: int, batch: int) -> slice:
    """The part of a batch that one of several ranks takes; parts differ by one at most.

    >>> [share(rank, 3, 8) for rank in range(3)]
    [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)]
    """
    return slice(batch * rank // ranks, batch * (rank + 1) // ranks)
