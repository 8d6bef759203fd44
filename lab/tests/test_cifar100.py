"""CIFAR-100 is read from the archive as published, unpacked or not, and from arrays; a wrong file is never used."""

import io
import pickle
import struct
import tarfile

import pytest
import torch
from mirror import known_file
from real import unpacked

from mvngrad_lab.tasks import files
from mvngrad_lab.tasks.cifar100 import data as cifar100
from mvngrad_lab.tasks.files import DamagedFile

COUNTS = {"train": 30, "test": 10}
COARSE = [0] * 30


def pixels(split):
    """Bytes of [count, 3, 32, 32] images."""
    return bytes((torch.arange(COUNTS[split] * 3072) * 37 % 251).tolist())


def labels(split):
    return [(7 * index + len(split)) % 100 for index in range(COUNTS[split])]


def string(content):
    return b"T" + struct.pack("<i", len(content)) + content


def number(value):
    return b"J" + struct.pack("<i", value)


def array(split, by_columns):
    """A uint8 array [count, 3072] as NumPy under Python 2 pickled it."""
    count, data = COUNTS[split], pixels(split)
    if by_columns:
        data = bytes(torch.tensor(list(data)).view(count, 3072).T.flatten().tolist())
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + string(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + string(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + string(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    shape = number(count) + number(3072) + b"\x86"
    return empty + b"(" + number(1) + shape + dtype + (b"\x88" if by_columns else b"\x89") + string(data) + b"tb"


def batch(split, by_columns=False):
    """The dictionary of a split as Python 2 pickled it."""
    fine, coarse = (b"](" + b"".join(map(number, values)) + b"e" for values in (labels(split), COARSE))
    items = {b"data": array(split, by_columns), b"fine_labels": fine, b"coarse_labels": coarse}
    return b"\x80\x02}(" + b"".join(string(key) + value for key, value in items.items()) + b"u."


def packed(pickles):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in {**pickles, "meta": b"not read"}.items():
            member = tarfile.TarInfo(f"cifar-100-python/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def npy(content, shape):
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00v\x00" + head.ljust(117).encode() + b"\n" + content


def arrays():
    made = {}
    for split, count in COUNTS.items():
        images = torch.tensor(list(pixels(split))).view(count, 3, 32, 32).permute(0, 2, 3, 1)
        made[f"{split}_images.npy"] = npy(bytes(images.flatten().tolist()), (count, 32, 32, 3))
        made[f"{split}_labels.npy"] = npy(bytes(labels(split)), (count,))
    return made


PICKLES = {split: batch(split) for split in COUNTS}
ARCHIVE = packed(PICKLES)
ARRAYS = arrays()
NAME = "cifar-100-python.tar.gz"


@pytest.fixture(autouse=True)
def small(monkeypatch, no_data):
    """A small CIFAR-100 of known content."""
    monkeypatch.setattr(cifar100, "ARCHIVE", known_file(NAME, ARCHIVE))
    monkeypatch.setattr(cifar100, "PICKLES", tuple(known_file(*item) for item in PICKLES.items()))
    monkeypatch.setattr(cifar100, "ARRAYS", tuple(known_file(*item) for item in ARRAYS.items()))


FORMS = {
    "archive": {NAME: ARCHIVE},
    "unpacked": {f"cifar-100-python/{name}": data for name, data in PICKLES.items()},
    "arrays": ARRAYS,
}


def write(folder, form):
    for name, content in FORMS[form].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def check(data):
    for split in COUNTS:
        images, classes = getattr(data, f"{split}_images"), getattr(data, f"{split}_labels")
        assert images.dtype == torch.uint8
        assert images.shape == (COUNTS[split], 3, 32, 32)
        assert images.is_contiguous()
        assert images.flatten().tolist() == list(pixels(split))
        assert classes.dtype == torch.int64
        assert classes.tolist() == labels(split)


@pytest.mark.parametrize("subfolder", ["cifar100", ""])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_yields_the_same_images(tmp_path, form, subfolder):
    write(tmp_path / "here" / subfolder, form)
    data = cifar100.load(tmp_path / "here")
    check(data)
    assert "sha256 verified" in data.source
    assert ("sorted by class" in data.source) == (form == "arrays")


def test_array_pickled_by_columns(tmp_path, monkeypatch):
    pickles = {split: batch(split, by_columns=True) for split in COUNTS}
    monkeypatch.setattr(cifar100, "PICKLES", tuple(known_file(*item) for item in pickles.items()))
    (tmp_path / "cifar-100-python").mkdir()
    for name, data in pickles.items():
        (tmp_path / "cifar-100-python" / name).write_bytes(data)
    check(cifar100.load(tmp_path))


def test_missing_data_set_is_an_error_with_the_remedy(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (None, tmp_path / "empty"):
        with pytest.raises(FileNotFoundError, match=r"`mvngrad data get cifar100`.* --data or MVNGRAD_DATA"):
            cifar100.load(folder)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        cifar100.load(tmp_path / "typo")


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:-9] + b"x" + data[-8:]])
@pytest.mark.parametrize("form", FORMS)
def test_damaged_file_is_refused_before_it_is_parsed(tmp_path, monkeypatch, form, damage):
    write(tmp_path, form)
    name = list(FORMS[form])[-1]
    (tmp_path / name).write_bytes(damage(FORMS[form][name]))
    monkeypatch.setattr(cifar100, "_Unpickler", None)
    monkeypatch.setattr(cifar100.tarfile, "open", None)
    with pytest.raises(DamagedFile, match="Delete it and download it again"):
        cifar100.load(tmp_path)


def test_pickle_calls_nothing_but_arrays():
    """Even one whose checksum is right."""
    harmful = b"\x80\x02cos\nsystem\nU\x04true\x85R."
    with pytest.raises(pickle.UnpicklingError, match=r"without os\.system"):
        cifar100._unpickle(harmful)


@pytest.fixture
def server(mirror, monkeypatch):
    mirror.files[f"/{NAME}"] = ARCHIVE
    monkeypatch.setattr(cifar100, "MIRRORS", (f"{mirror.url}/",))
    monkeypatch.setattr(files, "CHUNK_BYTES", 1 << 16)
    return mirror


def test_download_puts_the_archive_where_load_looks(tmp_path, monkeypatch, server):
    check(cifar100.load(cifar100.download(tmp_path / "here")))
    cifar100.download()
    check(cifar100.load())
    monkeypatch.setenv("MVNGRAD_DATA", str(tmp_path / "variable"))
    assert cifar100.download() == tmp_path / "variable"
    check(cifar100.load())
    assert len(server.requests) == 3
    cifar100.download()
    assert len(server.requests) == 3


@pytest.mark.parametrize("subfolder", ["cifar100", ""])
@pytest.mark.parametrize("form", FORMS)
def test_existing_files_of_any_form_are_verified_and_not_downloaded(tmp_path, server, form, subfolder):
    write(tmp_path / subfolder, form)
    check(cifar100.load(cifar100.download(tmp_path)))
    path = tmp_path / subfolder / next(iter(FORMS[form]))
    path.write_bytes(b"damaged")
    with pytest.raises(DamagedFile, match=f"{path.name} is not .*Delete it and download it again"):
        cifar100.download(tmp_path)
    assert server.requests == []


@pytest.mark.slow
def test_all_of_cifar100(monkeypatch, tmp_path):
    """On the real files, where they are."""
    monkeypatch.undo()
    try:
        data = cifar100.load(unpacked("cifar100", tmp_path))
    except FileNotFoundError:
        pytest.skip("needs CIFAR-100 in MVNGRAD_DATA or the cache")
    assert data.train_labels.bincount().tolist() == [500] * 100
    assert data.test_labels.bincount().tolist() == [100] * 100
    assert (data.train_images.float().mean((0, 2, 3)) / 255).tolist() == pytest.approx(
        [0.5071, 0.4865, 0.4409], abs=1e-4
    )
