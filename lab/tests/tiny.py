"""A recipe of the training loop that takes a second, and ways to interrupt its training."""

import dataclasses
import multiprocessing
import os
import signal
import sys
import time
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mvngrad_lab.recipe import TrainingRecipe
from mvngrad_lab.store import read_rows
from mvngrad_lab.training import checkpoint
from mvngrad_lab.training.events import EpochEnd
from mvngrad_lab.training.task import Task, make_generators
from mvngrad_lab.training.train import Interrupted, train

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before any test's first product on a GPU

each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
PATIENCE = 1200
"""Seconds after which a process that did not end is thought to hang, however slow the machine is."""
SERVER = multiprocessing.get_context("forkserver")
"""Imports what its processes need once, so that they start at once."""
SERVER.set_forkserver_preload(
    [
        "mvngrad_lab.training.train",
        "mvngrad_lab.tasks.language.task",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch._inductor",  # with torch._dynamo, which the first optimizer of a process imports: a second
    ]
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiny(TrainingRecipe):
    name: ClassVar[str] = "tiny"
    optimizer: str = "mvngrad"
    batch_size: int = 16
    lr: float = 1e-2
    beta1: float | None = 0.9
    beta2: float | None = 0.99
    eps_s: float | None = 1e-8
    epochs: int = 3
    precision: str = "float32"
    images: int = 100
    break_at: int | None = None
    """A step after which the weights are not finite."""

    def learning_rate(self, step, steps_per_epoch):
        return float("nan") if step == self.break_at else self.lr / (1 + step)


class TinyTask(Task):
    """Random images, a network with batch normalization."""

    source = "random images"

    def __init__(self, recipe, folder, device):
        self.device = device
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(recipe.images, 3, 8, 8, generator=generator).to(device)
        self.labels = torch.randint(4, (recipe.images,), generator=generator).to(device)
        self.last_batch_size = recipe.images % recipe.batch_size
        self.steps_per_epoch = recipe.images // recipe.batch_size + (self.last_batch_size > 0)

    def build_model(self):
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
        )
        return model.to(memory_format=torch.channels_last)

    def plan_epoch(self, recipe, epoch):
        _, generator = make_generators(recipe.seed, epoch)
        order = torch.randperm(recipe.images, generator=generator)
        padded = torch.zeros(self.steps_per_epoch * recipe.batch_size, dtype=torch.int64)
        padded[: len(order)] = order
        scale = torch.rand(self.steps_per_epoch, generator=generator)
        return {"order": padded.view(self.steps_per_epoch, -1), "scale": 1 + scale}

    def make_batch(self, row):
        return self.images[row["order"]] * row["scale"], self.labels[row["order"]]

    def loss(self, model, batch):
        return cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, final):
        scores = model(self.images)
        loss = {"test_loss": cross_entropy(scores, self.labels).item()}
        return {**loss, "train_accuracy": (scores.argmax(1) == self.labels).float().mean().item()} if final else loss


@contextmanager
def killed_after(step):
    """Training in this process ends after the checkpoint of this step, as if it was killed."""
    save = checkpoint.save

    def save_and_raise(folder, at, *rest):
        save(folder, at, *rest)
        if at == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", save_and_raise)
        with pytest.raises(KeyboardInterrupt):
            yield


def start_training(log, *recipes, variables=None, hold=None, **options):
    """A process that trains recipes, with `variables` in its environment. After the checkpoint of step `hold` it waits
    until there is a file `go` in the folder of `log`.

    Its output is appended to the file `log`.
    """
    process = SERVER.Process(target=_train, args=(log, recipes, variables or {}, hold, options), daemon=True)
    process.start()
    return process


def _train(log, recipes, variables, hold, options):
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.update(variables)
    torch.set_num_threads(1)
    save = checkpoint.save

    def save_and_hold(folder, at, *rest):
        save(folder, at, *rest)
        while at == hold and not log.with_name("go").exists():
            time.sleep(0.01)

    checkpoint.save = save_and_hold
    try:
        for recipe in recipes:
            train(recipe, **options)
    except Interrupted as stopped:
        print(stopped)
        sys.exit(128 + stopped.signal_number)


def exit_code(process, log):
    """Wait for a process; returns its exit code."""
    process.join(PATIENCE)
    assert process.exitcode is not None, log.read_text()
    return process.exitcode


def wait_for_checkpoint(is_alive, log, checkpoints, steps):
    """Wait until a process has written a checkpoint of at least so many steps."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if (paths := checkpoint.list_checkpoints(checkpoints)) and int(paths[0].name[5:13]) >= steps:
            return
        assert is_alive(), log.read_text()
        time.sleep(0.01)
    raise AssertionError(f"no checkpoint of step {steps} in {PATIENCE} s")


def interrupt(after):
    """An `on_event` that sends this process a signal at the end of an epoch."""

    def on_event(event):
        if isinstance(event, EpochEnd) and event.epoch == after:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_event


def folder(tmp_path, recipe, root="runs"):
    return tmp_path / root / recipe.key


def read_checkpoint(checkpoints):
    """The content of the newest checkpoint."""
    return torch.load(checkpoint.find_newest(checkpoints), weights_only=True)


def check_rows(tmp_path, recipe, root, other="runs"):
    """Check that two runs have the same metrics; returns them."""
    table = rows(folder(tmp_path, recipe, root))
    assert table == rows(folder(tmp_path, recipe, other))
    return table


def rows(folder):
    """The metrics of a run, without clocks."""
    table = read_rows(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name != "seconds"} for row in table]
