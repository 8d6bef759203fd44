"""Events of a training in TensorBoard's files and in a run of Weights & Biases."""

import sys
import types

import pytest
from tiny import Tiny, TinyTask

from mvngrad_lab.training import events
from mvngrad_lab.training.events import EpochEnd, Message
from mvngrad_lab.training.train import train


@pytest.fixture
def train_with(tmp_path):
    """Train a tiny recipe with a sink."""

    def train_with(sink, recipe):
        run = train(recipe, root=tmp_path / "runs", task=TinyTask, on_event=sink)
        sink.close()
        return run

    return train_with


def test_scalars_are_finite():
    event = EpochEnd("a-0", 2, 3, 14, 21, 0.5, 100.0, 1.0, 1.0, {"test_loss": None, "test_accuracy": 3.0})
    assert events.scalars(event) == {"loss": 0.5, "epoch": 2.0, "samples_per_second": 100.0, "test_accuracy": 3.0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_tensorboard_reads_what_was_written(tmp_path, train_with):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = events.TensorBoard(tmp_path / "board", Tiny())
    sink(Message(Tiny().key, "no scalar"))
    run = train_with(sink, Tiny())
    read = EventAccumulator(str(tmp_path / "board" / Tiny().key)).Reload()
    losses = read.Scalars("test_loss")
    assert [each.step for each in losses] == [7, 14, 21]
    assert losses[-1].value == pytest.approx(run.result["test_loss"], rel=1e-6)
    again = events.TensorBoard(tmp_path / "board", Tiny())  # as if it was killed after step 7
    again(EpochEnd(Tiny().key, 2, 3, 14, 21, 9.0, 1.0, 1.0, 1.0))
    again.close()
    read = EventAccumulator(str(tmp_path / "board" / Tiny().key)).Reload()
    assert [(each.step, each.value == 9.0) for each in read.Scalars("loss")] == [(7, False), (14, True)]


def test_wandb_gets_the_recipe_and_every_epoch(monkeypatch, train_with):
    """By its interface: the arguments of `wandb.init` and of a run's `log` and `finish`."""
    calls = []

    class Run:
        def log(self, values, step):
            calls.append((step, sorted(values)))

        def finish(self):
            calls.append("finished")

    def init(**options):
        calls.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    train_with(events.WandB("digits", Tiny()), Tiny())
    key = Tiny().key
    assert calls[0] == {"project": "digits", "id": key, "name": key, "config": Tiny().settings, "resume": "allow"}
    shown = ["epoch", "loss", "samples_per_second", "test_loss"]
    assert calls[1:] == [(7, shown), (14, shown), (21, [*shown, "train_accuracy"]), "finished"]


@pytest.mark.parametrize(
    ("make", "package"), [(events.TensorBoard, "tensorboard"), (events.WandB, "wandb")], ids=["tensorboard", "wandb"]
)
def test_a_missing_package_is_named(monkeypatch, tmp_path, make, package):
    missing = "torch.utils.tensorboard" if package == "tensorboard" else package
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RuntimeError, match=f"pip install {package}"):
        make(tmp_path, Tiny())
