"""What tests of the lab share. What it needs is imported where it is used: not every machine has it."""

import json
import sys

import pytest


@pytest.fixture(autouse=True)
def _empty_cache():
    """No test gets the compiled models of another."""
    yield
    if step := sys.modules.get("mvngrad_lab.training.step"):
        step.clear_cache()


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


@pytest.fixture
def run(tmp_path):
    """Train a tiny recipe in a store of its own."""
    from tiny import TinyTask

    from mvngrad_lab.training.train import train

    def run(recipe, root="runs", **options):
        return train(recipe, root=tmp_path / root, **{"task": TinyTask, **options})

    return run


@pytest.fixture
def small_images(monkeypatch):
    """40 random images and a small network in place of CIFAR-100 and its ResNet."""
    import torch
    from torch import nn

    from mvngrad_lab.tasks.cifar100 import task

    def load(folder):
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 255, (50, 3, 32, 32), dtype=torch.uint8, generator=generator)
        labels = torch.arange(50) % 4
        return task.data.Cifar100(images[:40], labels[:40], images[40:], labels[40:], source="random")

    def network(classes):
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))

    monkeypatch.setattr(task.data, "load", load)
    monkeypatch.setattr(task, "resnet18", network)
    task._load.cache_clear()
    yield
    task._load.cache_clear()


@pytest.fixture
def read_export(tmp_path):
    """A function that writes the export of a sweep to a file and reads it."""
    from mvngrad_lab.experiments.sweeps.records import load_exports

    def read(whole, name="sweep-some.json"):
        (tmp_path / name).write_text(json.dumps(whole))
        (run,) = (run for run in load_exports(tmp_path, warn=pytest.fail) if run.sweep == whole["sweep"])
        return run

    return read
