"""What tests of the lab share. What it needs is imported where it is used: not every machine has it."""

import pytest


@pytest.fixture
def no_data(monkeypatch, tmp_path):
    """Neither a cache nor a folder of data of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MVNGRAD_DATA", raising=False)


@pytest.fixture
def mirror(monkeypatch):
    """A running HTTP server to download from; see `mirror.Mirror`."""
    from mirror import serve

    from mvngrad_lab.tasks import files

    monkeypatch.setattr(files, "PAUSE", 0.0)
    monkeypatch.setattr(files, "CHUNK_BYTES", 1)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serve() as running:
        yield running


class Letters:
    """An encoding in which a token is a byte."""

    def encode_ordinary(self, document):
        return list(document.encode())


@pytest.fixture
def letters(monkeypatch):
    """Text is prepared without GPT-2's vocabulary."""
    monkeypatch.setattr("mvngrad_lab.tasks.language.data.prepare.load_encoding", lambda vocabulary: Letters())


@pytest.fixture
def toy(tmp_path):
    """A store on this disk, with one sweep of toys."""
    from sweep_toy import Bench

    bench = Bench(tmp_path)
    yield bench
    bench.close()
