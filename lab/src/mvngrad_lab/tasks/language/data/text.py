"""Text: where it comes from, and the documents in its files.

WikiText-103: Merity et al., 2016; CC BY-SA. Used as published, with its <unk> and split words. OpenWebText: Gokaslan
and Cohen, 2019; CC0 for the packaging, the pages belong to their authors. Files are read by their suffix:

- .txt: documents separated by a line <|endoftext|>, or one document;
- .tokens and .raw, WikiText's: an article begins with a heading of the first level, " = Title = ", after a blank line;
- .tar, OpenWebText's: a plain archive of compressed archives (.xz) with one file for each document.
"""

from __future__ import annotations

import io
import lzma
import mmap
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import IO

from mvngrad_lab.errors import InvalidInput, MissingFile
from mvngrad_lab.store import read_chunks
from mvngrad_lab.tasks import files
from mvngrad_lab.tasks.files import DamagedFile, KnownFile, OnProgress

TEXTS = ("wikitext103", "wikitext103-validation", "openwebtext", "wikipedia_en")
ARCHIVES = {
    "wikitext103": KnownFile(
        "wikitext-103-v1.zip", 190229076, "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"
    ),
    "openwebtext": KnownFile(
        "openwebtext.tar.xz", 12880027468, "9fe39d154c5bc67da8c359415372b79510eb1e2edb0d035fe4f7fc3a732b9336"
    ),
}
MIRRORS = {
    "wikitext103": (
        "https://wikitext.smerity.com/wikitext-103-v1.zip",
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip",
    ),
    "openwebtext": ("https://zenodo.org/record/3834942/files/openwebtext.tar.xz",),
}
"""WikiText-103's first is its author's; the second, the first publisher's, was reported gone."""
WIKITEXT103_TRAIN = "wiki.train.tokens"
WIKITEXT103_VALIDATION = KnownFile(
    "wiki.valid.tokens", 1142309, "9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b"
)
VALIDATION_FILE = "validation.txt"
"""The file of a user's folder that is used for validation instead of training."""
VALIDATION_SHARE = 0.005
VERIFIED = "sha256 verified"
"""How a `source` ends if the text was compared with what was published."""


@dataclass(frozen=True)
class Corpus:
    """Text to tokenize."""

    source: str
    """Description for a report."""
    files: tuple[Path, ...]
    """In the order their tokens shall have."""
    share: float = VALIDATION_SHARE
    """The share of documents used for validation, in place of files of their own."""
    validation: tuple[Path, ...] = ()


# Where text comes from


def find_corpus(name: str, folder: Path | None = None) -> Corpus:
    """One of TEXTS in `folder`, that of MVNGRAD_DATA, or the cache.

    wikitext103-validation is the official validation text of wikitext103 alone. `source` says whether the training text
    could be verified: no checksum of it is published, only that of its archive.
    """
    if name not in TEXTS:
        raise InvalidInput(f"name={name!r} is no known text; there are {', '.join(TEXTS)}, or name a folder")
    dataset = name.removesuffix("-validation")
    folders = files.search_folders(dataset, folder)
    for place in folders:
        if place.is_dir() and (corpus := _corpus_in(place, name)) is not None:
            if name not in ARCHIVES:
                return corpus
            verified = _matches_archive(name, corpus.files[0], folders)
            status = f"as published, {VERIFIED}" if verified else "not verified"
            return replace(corpus, source=f"{corpus.source}, training text {status}")
    remedy = f"`mvngrad data get {dataset}` downloads it" if dataset in ARCHIVES else "name a folder that has it"
    raise MissingFile(f"{name} is not in {', '.join(map(str, folders))}; {remedy}")


def _corpus_in(folder: Path, name: str) -> Corpus | None:
    if name == "openwebtext":
        whole = folder / "openwebtext.tar"
        paths = (whole,) if whole.is_file() else tuple(sorted(folder.glob("urlsf_subset*.tar")))
        source = "OpenWebText" if whole.is_file() else f"OpenWebText, {len(paths)} of its 21 subsets"
        return Corpus(source, paths, 0.0005) if paths else None  # the share is nanoGPT's, which the paper follows
    if name == "wikipedia_en":
        paths = tuple(sorted(folder.glob("wikipedia_en.*.txt")))
        source = "Wikipedia of 2014, a stand-in: its numbers are not comparable with the paper's"
        return Corpus(source, paths) if paths else None
    train, validation = folder / WIKITEXT103_TRAIN, folder / WIKITEXT103_VALIDATION.name
    alone = name == "wikitext103-validation"
    if not validation.is_file() or not (alone or train.is_file()):
        return None
    files.verify(validation, WIKITEXT103_VALIDATION)
    if alone:
        return Corpus("WikiText-103, its official validation text alone", (validation,), 1.0)
    return Corpus("WikiText-103, official validation text", (train,), 0.0, (validation,))


def folder_corpus(folder: Path) -> Corpus:
    """All .txt files of a folder and its subfolders, sorted by name; its validation.txt is used for validation."""
    if not folder.is_dir():
        raise MissingFile(f"folder={str(folder)!r} is not a folder; name one that has .txt files")
    validation = folder / VALIDATION_FILE
    paths = [path for path in folder.rglob("*.txt") if path.is_file() and path != validation]
    if not paths:
        raise MissingFile(f"{folder} has no .txt files to train on")
    held_out = (0.0, (validation,)) if validation.is_file() else (VALIDATION_SHARE,)
    files = tuple(sorted(paths, key=lambda path: path.parts))
    return Corpus(f"text of the folder {folder.resolve().name}", files, *held_out)


def download_text(name: str, folder: Path | None = None, on_progress: OnProgress | None = None) -> Path:
    """Download wikitext103 (190 MB) or openwebtext (12.9 GB) into `folder`/`name`, by default that of MVNGRAD_DATA or
    the cache, and unpack it there, which takes 0.5 and 12.9 GB more; returns the folder to give to `find_corpus`. An
    existing archive, there or in `folder` itself, is verified, kept and unpacked where it is.
    """
    if name not in ARCHIVES:
        raise InvalidInput(f"name={name!r} cannot be downloaded; there are {', '.join(ARCHIVES)}")
    archive = ARCHIVES[name]
    target = files.download_folder(name, [archive.name], folder) / archive.name
    files.download(MIRRORS[name], target, archive, on_progress)
    for member, content in _open_members(target):
        if not (path := target.with_name(member)).exists():
            partial = path.with_name(f"{member}.part")
            with files.name_full_disk(partial), partial.open("wb") as out:
                shutil.copyfileobj(content, out, 1 << 20)
            partial.replace(path)
    return files.data_folder(folder)


def _open_members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and content of each text in an archive: WikiText-103's files, or OpenWebText as one plain .tar."""
    if archive.suffix == ".xz":
        with lzma.open(archive) as content:
            yield archive.stem, content
        return
    with zipfile.ZipFile(archive) as members:
        for name in members.namelist():
            if name.endswith(".tokens"):
                with members.open(name) as content:
                    yield Path(name).name, content


def _matches_archive(name: str, path: Path, folders: Sequence[Path]) -> bool:
    """Whether the archive of a text is in one of the `folders` and holds exactly the content of `path`.

    Raises DamagedFile if the archive holds other content or is damaged itself.
    """
    paths = (folder / ARCHIVES[name].name for folder in folders)
    if (archive := next(filter(Path.is_file, paths), None)) is None:
        return False
    files.verify(archive, ARCHIVES[name])
    for member, content in _open_members(archive):
        if member == path.name:
            with path.open("rb") as file:
                if any(published != local for published, local in zip_longest(read_chunks(content), read_chunks(file))):
                    raise DamagedFile(f"{path} is not what {archive} holds; delete it and its tokens, and get it again")
            return True
    return False


# The documents in a file

PIECE_BYTES = 4 << 20
"""A piece ends with the first document that ends after so many bytes."""
BOUNDARIES = {
    ".txt": re.compile(rb"(?m)\n?^<\|endoftext\|>\r?$\n?"),
    ".tokens": (heading := re.compile(rb"(?m)(?<=\n \n)(?= = [^=\n](?:[^\n]*[^=\n])? = $)")),
    ".raw": heading,
}


@dataclass(frozen=True)
class Piece:
    """The bytes from `start` to `stop` of a file: whole documents, for one worker."""

    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def split_file(path: Path) -> list[Piece]:
    """The pieces of a file, which do not depend on the number of workers."""
    if path.suffix not in (*BOUNDARIES, ".tar"):
        raise InvalidInput(f"{path} is no text by its name; it ends in {', '.join(BOUNDARIES)} or .tar")
    if path.suffix == ".tar":
        return _split_tar(path)
    cuts, size = [0], path.stat().st_size
    if not size:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        while boundary := BOUNDARIES[path.suffix].search(content, cuts[-1] + PIECE_BYTES):
            cuts.append(boundary.end())
    stops = [*cuts[1:], size]
    return [Piece(path, start, stop) for start, stop in zip(cuts, stops, strict=True) if start < stop]


def _split_tar(path: Path) -> list[Piece]:
    try:
        with tarfile.open(path, "r:") as tar:
            members = [member for member in tar if member.isfile() and member.name.endswith(".xz")]
    except tarfile.ReadError as error:
        raise InvalidInput(
            f"{path} is not a plain tar archive ({error}); if it is compressed, unpack it first"
        ) from error
    return [Piece(path, member.offset_data, member.offset_data + member.size) for member in members]


def read_documents(*paths: Path) -> Iterator[str]:
    """All documents of some files, in order; blank ones are left out."""
    return (document for path in paths for piece in split_file(path) for document in read_piece(piece))


def read_piece(piece: Piece) -> Iterator[str]:
    """The documents of a piece, in order; blank ones are left out."""
    with piece.path.open("rb") as file:
        file.seek(piece.start)
        content = file.read(piece.size)
    is_tar = piece.path.suffix == ".tar"
    for document in _unpack(content) if is_tar else BOUNDARIES[piece.path.suffix].split(content):
        try:
            text = document.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{piece.path}, in bytes {piece.start} to {piece.stop}: not UTF-8: {error}") from error
        if is_tar:  # as OpenWebText is usually prepared: at most one blank line in a row
            text = re.sub(r"\n{3,}", "\n\n", text).strip()
        if text.strip():
            yield text


def _unpack(content: bytes) -> Iterator[bytes]:
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(content)), mode="r:") as tar:
        for member in tar:
            if (file := tar.extractfile(member)) is not None:
                yield file.read()
