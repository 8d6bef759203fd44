"""CIFAR-100: 32x32 colour images of 100 classes.

Krizhevsky, 2009. Read from the archive as published, packed or unpacked, or from NumPy arrays of the same images.
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

from mvngrad_lab.errors import MissingFile
from mvngrad_lab.tasks import files
from mvngrad_lab.tasks.files import KnownFile, OnProgress

MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
ARCHIVE = KnownFile(
    "cifar-100-python.tar.gz", 169001437, "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"
)
UNPACKED = "cifar-100-python"
"""The folder in the archive that has PICKLES."""
PICKLES = (
    KnownFile("train", 155249918, "735e79b04f092ca3d2e6d07f368c0a7d70d48c48d28865950cc24454cf45129b"),
    KnownFile("test", 31049707, "4b67687d9933c4db8f0831104447f15b93774f4f464bd0516f0f0f2ac83b7864"),
)
ARRAYS = (
    KnownFile("train_images.npy", 153600128, "c55f5aeb30b7bb95c1e8aa43def5545f2bcb6ee586470a57f2f61b5cca1398e8"),
    KnownFile("train_labels.npy", 50128, "63e03749e8a66b0480c8788dfa7bd646dfe151a2d673381387f97ce4ead8fa7b"),
    KnownFile("test_images.npy", 30720128, "4c27b6752797b7b09dbc554590976bdf323da88fd89241c30bc01851fd2ee20c"),
    KnownFile("test_labels.npy", 10128, "db032c6a334833971eb8d2c53a65abbe01d8b81b0f6baf4f13ea8e05f0c91229"),
)
"""The same images as NumPy saves them, uint8 [n, 32, 32, 3] and uint8 [n], sorted by class."""
NPY_HEADER = 128
"""Bytes before the data of ARRAYS."""
ALL_IMAGES = "CIFAR-100, all 50,000 training and 10,000 test images"


@dataclass(frozen=True)
class Cifar100:
    """Images as uint8 [n, 3, 32, 32], labels as int64 [n]."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    source: str
    """Description of these images and their order for a report."""


def load(folder: Path | None = None) -> Cifar100:
    """CIFAR-100 from `folder`, that of MVNGRAD_DATA, or the cache.

    The images have the order of the archive or are sorted by class, as `source` says: shuffle them before training.
    Every file is verified before it is parsed; DamagedFile is raised if one was cut short or altered.
    """
    folders = files.search_folders("cifar100", folder)
    if (located := _find(folders)) is None:
        raise MissingFile(
            f"CIFAR-100 is not in {', '.join(map(str, folders))}. Download it with `mvngrad data get cifar100`, or "
            f"name the folder that has {ARCHIVE.name} with --data or {files.FOLDER_VARIABLE}"
        )
    form, paths = located
    contents = [files.read_verified(path, known) for path, known in zip(paths, form, strict=True)]
    if form is ARRAYS:
        return _from_arrays(*contents)
    train, test = contents if form is PICKLES else _unpack(*contents)
    return Cifar100(*_unpickle(train), *_unpickle(test), f"{ALL_IMAGES} as published, sha256 verified")


def download(folder: Path | None = None, on_progress: OnProgress | None = None) -> Path:
    """Download CIFAR-100 (169 MB) into `folder`/cifar100, by default that of MVNGRAD_DATA or the cache; returns the
    folder to give to `load`. Existing files, in any form, are verified and kept.
    """
    parent = files.data_folder(folder)
    target = parent / "cifar100" / ARCHIVE.name
    if located := _find([target.parent, parent]):
        for known, path in zip(*located, strict=True):
            files.verify(path, known)
    else:
        files.download([f"{mirror}{target.name}" for mirror in MIRRORS], target, ARCHIVE, on_progress)
    return parent


def _find(folders: Sequence[Path]) -> tuple[tuple[KnownFile, ...], list[Path]] | None:
    """The first form of the data set that exists, and the paths of its files."""
    for folder in folders:
        for form, subfolder in ((ARRAYS, ""), (PICKLES, UNPACKED), ((ARCHIVE,), "")):
            if paths := files.find_in_folder("cifar100", form, folder / subfolder):
                return form, paths
    return None


def _unpack(archive: bytearray) -> list[bytes]:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(archive)), mode="r:") as tar:
        members = [tar.extractfile(f"{UNPACKED}/{known.name}") for known in PICKLES]
        return [member.read() for member in members if member is not None]


class _Array:
    """Takes the place of arrays and dtypes in a pickle and keeps their state."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Calls nothing but `_Array`, whatever the pickle asks for."""

    def find_class(self, module: str, name: str) -> type[_Array]:
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return _Array
        raise pickle.UnpicklingError(f"CIFAR-100 is pickled without {module}.{name}")


def _unpickle(content: bytes | bytearray) -> tuple[Tensor, Tensor]:
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
    source = f"{ALL_IMAGES} sorted by class, sha256 verified"
    return Cifar100(train_images, train_labels.long(), test_images, test_labels.long(), source)
