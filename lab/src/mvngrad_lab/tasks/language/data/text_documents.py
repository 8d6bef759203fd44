"""Files of text, cut into pieces that workers take, and the documents of a piece.

Three kinds of files, told apart by their names:

- .txt: documents with a line <|endoftext|> between them, or one document;
- .tokens and .raw, WikiText's: an article begins with a heading of the first rank, " = Title = ", after a blank line;
- .tar, OpenWebText's: a plain archive of compressed archives (.xz) of one file for each document.
"""

from __future__ import annotations

import io
import lzma
import mmap
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 4 << 20
"""A piece of text ends with the first document that ends after so many."""
BOUNDARIES = {
    ".txt": re.compile(rb"(?m)\n?^<\|endoftext\|>\r?$\n?"),
    ".tokens": (heading := re.compile(rb"(?m)(?<=\n \n)(?= = [^=\n](?:[^\n]*[^=\n])? = $)")),
    ".raw": heading,
}


@dataclass(frozen=True)
class Piece:
    """The bytes from `start` to `stop` of a file, which are whole documents."""

    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def pieces(path: Path) -> list[Piece]:
    """A file as pieces, the same however many workers there will be."""
    if path.suffix not in (*BOUNDARIES, ".tar"):
        raise ValueError(f"{path} is no text by its name; it ends in {', '.join(BOUNDARIES)} or .tar")
    if path.suffix == ".tar":
        return _members(path)
    cuts, size = [0], path.stat().st_size
    if not size:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        while found := BOUNDARIES[path.suffix].search(content, cuts[-1] + PIECE_BYTES):
            cuts.append(found.end())
    stops = [*cuts[1:], size]
    return [Piece(path, start, stop) for start, stop in zip(cuts, stops, strict=True) if start < stop]


def documents(piece: Piece) -> Iterator[str]:
    """The documents of a piece, in order; blank ones are left out."""
    with piece.path.open("rb") as file:
        file.seek(piece.start)
        content = file.read(piece.size)
    archive = piece.path.suffix == ".tar"
    for document in _unpacked(content) if archive else BOUNDARIES[piece.path.suffix].split(content):
        try:
            text = document.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{piece.path}, in bytes {piece.start} to {piece.stop}: not UTF-8: {error}") from error
        if archive:  # as the data set of that name is usually prepared: no more than one blank line at a time
            text = re.sub(r"\n{3,}", "\n\n", text).strip()
        if text.strip():
            yield text


def _members(path: Path) -> list[Piece]:
    try:
        with tarfile.open(path, "r:") as tar:
            return [
                Piece(path, member.offset_data, member.offset_data + member.size)
                for member in tar
                if member.isfile() and member.name.endswith(".xz")
            ]
    except tarfile.ReadError as error:
        raise ValueError(
            f"{path} is not a plain tar archive ({error}); if it is compressed, unpack it first"
        ) from error


def _unpacked(content: bytes) -> Iterator[bytes]:
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(content)), mode="r:") as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                yield file.read()
