"""The texts of the paper and where they come from, and any other text in a folder.

WikiText-103: Merity et al., 2016; CC BY-SA. Used as published, with its <unk> and split words. OpenWebText: Gokaslan
and Cohen, 2019; CC0 for the packaging, the pages belong to their authors.
"""

from __future__ import annotations

import lzma
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import IO

from mvngrad_lab.store import read_chunks
from mvngrad_lab.tasks.files import (
    DamagedFile,
    KnownFile,
    OnProgress,
    data_folder,
    download as download_file,
    download_folder,
    name_full_disk,
    read_verified,
    search_folders,
    verify,
)
from mvngrad_lab.tasks.language.data.text import VALIDATION_SHARE, VERIFIED

WIKITEXT103 = KnownFile(
    "wikitext-103-v1.zip",
    190229076,
    "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    packed=True,
)
WIKITEXT103_TRAIN = "wiki.train.tokens"
WIKITEXT103_VALIDATION = KnownFile(
    "wiki.valid.tokens", 1142309, "9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b"
)
OPENWEBTEXT = KnownFile(
    "openwebtext.tar.xz",
    12880027468,
    "9fe39d154c5bc67da8c359415372b79510eb1e2edb0d035fe4f7fc3a732b9336",
    packed=True,
)
MIRRORS = {
    "wikitext103": (
        "https://wikitext.smerity.com/wikitext-103-v1.zip",
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip",
    ),
    "openwebtext": ("https://zenodo.org/record/3834942/files/openwebtext.tar.xz",),
}
"""WikiText-103's first is its author's; the second, the first publisher's, was reported gone."""
ARCHIVES = {"wikitext103": WIKITEXT103, "openwebtext": OPENWEBTEXT}
HELD_OUT = "validation.txt"
"""The file of somebody's folder that is not trained on, if there is one."""


@dataclass(frozen=True)
class Corpus:
    """What `text.prepare` needs to know of a text."""

    source: str
    files: tuple[Path, ...]
    validation: float | tuple[Path, ...]


def download(name: str, folder: Path | None = None, on_progress: OnProgress | None = None) -> Path:
    """Download wikitext103 (190 MB) or openwebtext (12.9 GB) into `folder`/`name`, by default that of MVNGRAD_DATA or
    the cache, verified, and unpack it there, which takes 0.5 and 12.9 GB more; the folder to give to `corpus`. An
    archive that is there, or in `folder` itself, is verified, kept and unpacked where it is.
    """
    if name not in ARCHIVES:
        raise ValueError(f"name={name!r} cannot be downloaded; there are {', '.join(ARCHIVES)}")
    known = ARCHIVES[name]
    target = download_folder(name, [known.name], folder) / known.name
    download_file(MIRRORS[name], target, known, on_progress)
    for member, content in _contents(target):
        _put(content, target.with_name(member))
    return data_folder(folder)


def corpus(name: str, folder: Path | None = None) -> Corpus:
    """A text by its name, from `folder`, that of MVNGRAD_DATA, or the cache: wikitext103, openwebtext, wikipedia_en.

    Its official validation text alone, which is part of wikitext103, is wikitext103-validation. `source` says whether
    the training text could be verified: no checksum of it is published, but one of the archive that it comes from.
    """
    if name not in TEXTS:
        raise ValueError(f"name={name!r} is no known text; there are {', '.join(TEXTS)}, or name a folder")
    whole = name.removesuffix("-validation")
    looked = search_folders(whole, folder)
    for place in looked:
        if place.is_dir() and (found := TEXTS[name](place)) is not None:
            if name not in ARCHIVES:
                return found
            known = f"as published, {VERIFIED}" if _as_published(name, found.files[0], looked) else "not verified"
            return replace(found, source=f"{found.source}, training text {known}")
    remedy = f"`mvngrad data get {whole}` downloads it" if whole in ARCHIVES else "name a folder that has it"
    raise FileNotFoundError(f"{name} is not in {', '.join(map(str, looked))}; {remedy}")


def in_folder(folder: Path) -> Corpus:
    """All text of a folder and of the folders in it, in the order of their names; its validation.txt is held out."""
    if not folder.is_dir():
        raise FileNotFoundError(f"folder={str(folder)!r} is not a folder; name one that has .txt files")
    held = folder / HELD_OUT
    there = (path for path in folder.rglob("*.txt") if path.is_file() and path != held)
    files = tuple(sorted(there, key=lambda path: path.parts))
    if not files:
        raise FileNotFoundError(f"{folder} has no .txt files to train on")
    return Corpus(f"text of the folder {folder.resolve().name}", files, (held,) if held.is_file() else VALIDATION_SHARE)


def _contents(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """What an archive holds, by name: WikiText-103's texts, or OpenWebText's archives as one plain .tar."""
    if archive.suffix == ".xz":
        with lzma.open(archive) as content:
            yield archive.stem, content
        return
    with zipfile.ZipFile(archive) as opened:
        for member in opened.namelist():
            if member.endswith(".tokens"):
                with opened.open(member) as content:
                    yield Path(member).name, content


def _as_published(name: str, path: Path, looked: Sequence[Path]) -> bool:
    """Whether an archive is there and has the very text; an error if it has another, or is damaged."""
    archive = next((found for place in looked if (found := place / ARCHIVES[name].name).is_file()), None)
    if archive is None:
        return False
    verify(archive, ARCHIVES[name])
    for member, content in _contents(archive):
        if member == path.name:
            with path.open("rb") as file:
                if any(published != there for published, there in zip_longest(read_chunks(content), read_chunks(file))):
                    raise DamagedFile(f"{path} is not what {archive} holds; delete it and its tokens, and get it again")
            return True
    return False


def _put(content: IO[bytes], target: Path) -> None:
    if not target.exists():
        partial = target.with_name(f"{target.name}.part")
        with name_full_disk(partial), partial.open("wb") as out:
            shutil.copyfileobj(content, out, 1 << 20)
        partial.replace(target)


def _wikitext103(place: Path) -> Corpus | None:
    train, validation = place / WIKITEXT103_TRAIN, place / WIKITEXT103_VALIDATION.name
    if not train.is_file() or not validation.is_file():
        return None
    read_verified(validation, WIKITEXT103_VALIDATION)
    return Corpus("WikiText-103, official validation text", (train,), (validation,))


def _wikitext103_validation(place: Path) -> Corpus | None:
    path = place / WIKITEXT103_VALIDATION.name
    if not path.is_file():
        return None
    read_verified(path, WIKITEXT103_VALIDATION)
    return Corpus("WikiText-103, its official validation text alone", (path,), 1.0)


def _openwebtext(place: Path) -> Corpus | None:
    whole = place / "openwebtext.tar"
    files = (whole,) if whole.is_file() else tuple(sorted(place.glob("urlsf_subset*.tar")))
    # The share is nanoGPT's, whose settings the paper follows.
    source = "OpenWebText" if whole.is_file() else f"OpenWebText, {len(files)} of its 21 subsets"
    return Corpus(source, files, 0.0005) if files else None


def _wikipedia(place: Path) -> Corpus | None:
    files = tuple(sorted(place.glob("wikipedia_en.*.txt")))
    what = "Wikipedia of 2014, a stand-in: its numbers are not comparable with the paper's"
    return Corpus(what, files, VALIDATION_SHARE) if files else None


TEXTS: dict[str, Callable[[Path], Corpus | None]] = {
    "wikitext103": _wikitext103,
    "wikitext103-validation": _wikitext103_validation,
    "openwebtext": _openwebtext,
    "wikipedia_en": _wikipedia,
}
