"""CIFAR-100: 32x32 colour images of 100 classes.

Krizhevsky, 2009. Read from the archive as published, unpacked or not, or from plain arrays of the same images.
"""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvngrad_lab.tasks.files import FOLDER_VARIABLE, KnownFile, fetch, find, home, places, read, verify

MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
ARCHIVE = KnownFile(
    "cifar-100-python.tar.gz",
    169001437,
    "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
    packed=True,
)
UNPACKED = "cifar-100-python"
PICKLES = (
    KnownFile("train", 155249918, "735e79b04f092ca3d2e6d07f368c0a7d70d48c48d28865950cc24454cf45129b"),
    KnownFile("test", 31049707, "4b67687d9933c4db8f0831104447f15b93774f4f464bd0516f0f0f2ac83b7864"),
)
"""What the archive holds in the folder UNPACKED."""
ARRAYS = (
    KnownFile("train_images.npy", 153600128, "c55f5aeb30b7bb95c1e8aa43def5545f2bcb6ee586470a57f2f61b5cca1398e8"),
    KnownFile("train_labels.npy", 50128, "63e03749e8a66b0480c8788dfa7bd646dfe151a2d673381387f97ce4ead8fa7b"),
    KnownFile("test_images.npy", 30720128, "4c27b6752797b7b09dbc554590976bdf323da88fd89241c30bc01851fd2ee20c"),
    KnownFile("test_labels.npy", 10128, "db032c6a334833971eb8d2c53a65abbe01d8b81b0f6baf4f13ea8e05f0c91229"),
)
"""The same images as NumPy saves them, uint8 [n, 32, 32, 3] and uint8 [n], sorted by class."""
WHOLE = "CIFAR-100, all 50,000 training and 10,000 test images"
NPY_HEADER = 128
"""Bytes before the data of these files."""


@dataclass(frozen=True)
class Cifar100:
    """Images as uint8 [n, 3, 32, 32], labels as int64 [n]."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    source: str
    """What these images are and in which order, in words for a report."""


def load(folder: Path | None = None) -> Cifar100:
    """CIFAR-100 from `folder`, that of MVNGRAD_DATA, or the cache.

    `source` says whether it is in the order of the archive or sorted by class, so shuffle before training. Every file
    is verified before it is used: one that was cut short or altered is a DamagedFile error.
    """
    looked = places("cifar100", folder)
    if found := _found(looked):
        form, paths = found
        contents = [read(path, known) for path, known in zip(paths, form, strict=True)]
        if form is ARRAYS:
            return _from_arrays(*contents)
        return _from_pickles(*(contents if form is PICKLES else _members(*contents)))
    raise FileNotFoundError(
        f"CIFAR-100 is not in {', '.join(map(str, looked))}. Download it with `mvngrad data get cifar100`, or name the "
        f"folder that has {ARCHIVE.name} with --data or {FOLDER_VARIABLE}"
    )


def download(folder: Path | None = None) -> Path:
    """Download CIFAR-100 (169 MB) into `folder`/cifar100, by default that of MVNGRAD_DATA or the cache, verified; the
    folder to give to `load`. What is there, in any form, is verified and kept.
    """
    target = home(folder) / "cifar100" / ARCHIVE.name
    if found := _found([target.parent, home(folder)]):
        for known, path in zip(*found, strict=True):
            verify(path, known)
    else:
        fetch([f"{mirror}{target.name}" for mirror in MIRRORS], target, ARCHIVE)
    return home(folder)


def _found(looked: Sequence[Path]) -> tuple[tuple[KnownFile, ...], list[Path]] | None:
    """The first form of the data set that is there, and its files."""
    for place in looked:
        for form, inside in ((ARRAYS, ""), (PICKLES, UNPACKED), ((ARCHIVE,), "")):
            if paths := find("cifar100", form, place / inside):
                return form, paths
    return None


def _members(archive: bytearray) -> list[bytes]:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(archive)), mode="r:") as tar:
        files = [tar.extractfile(f"{UNPACKED}/{known.name}") for known in PICKLES]
        return [file.read() for file in files if file is not None]


class _Array:
    """Stands for the arrays and data types in a pickle and keeps what they are made of. Nothing else is ever called."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Array]:
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return _Array
        raise pickle.UnpicklingError(f"CIFAR-100 is pickled without {module}.{name}")


def _from_pickles(train: bytes | bytearray, test: bytes | bytearray) -> Cifar100:
    return Cifar100(*_unpickled(train), *_unpickled(test), f"{WHOLE} as published, sha256 verified")


def _unpickled(content: bytes | bytearray) -> tuple[Tensor, Tensor]:
    batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    *_, (count, width), _, by_columns, pixels = batch[b"data"].state
    table = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
    table = table.view(width, count).T.contiguous() if by_columns else table.view(count, width)
    return table.view(count, 3, 32, 32), torch.tensor(batch[b"fine_labels"])


def _from_arrays(*contents: bytearray) -> Cifar100:
    train_images, train_labels, test_images, test_labels = (
        torch.frombuffer(content, dtype=torch.uint8, offset=NPY_HEADER) for content in contents
    )
    train_images, test_images = (
        images.view(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous() for images in (train_images, test_images)
    )
    source = f"{WHOLE} sorted by class, sha256 verified"
    return Cifar100(train_images, train_labels.long(), test_images, test_labels.long(), source)
