"""What the command shows while it works: bars, lines without a terminal, and how long it will take."""

import dataclasses
import io
import os

import pytest

pytest.importorskip("tyro")
pytest.importorskip("rich")
from rich.console import Console
from test_reproduce import EXPERIMENTS, MEMORY, SPIKE, Recorder

from mvngrad_lab import experiments, store
from mvngrad_lab.cli import progress
from mvngrad_lab.cli.progress import Bars, TrainingBar
from mvngrad_lab.tasks.mnist import data as mnist
from mvngrad_lab.training import events


def test_bars_estimate_the_remaining_time(monkeypatch):
    monkeypatch.setattr(progress, "measure_slowness", lambda: 1.0)
    console = Console(force_terminal=True, width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with Bars(console) as bars:
        bars.plan([(SPIKE, 10), (MEMORY, 30)])
        tick = bars.begin(SPIKE, True)
        tick(0.5)
        (everything, current) = bars.tasks
        assert everything.completed == 5.0
        assert everything.total == 40.0
        assert "left" in everything.fields["left"]
        assert current.completed == 0.5
        bars.end(experiments.Outcome(SPIKE, "ran", 3.0))
        assert everything.completed == 10.0
        bars.begin(MEMORY, False)
        bars.end(experiments.Outcome(MEMORY, "failed", error="[/] broke"))
    text = console.export_text()
    assert "did not finish" in text
    assert "[/] broke" in text, "an error is text and not markup"
    console.file.close()


def make_event(epoch, key="cifar100-0", **metrics):
    return events.EpochEnd(key, epoch, 200, 48 * epoch, 9600, 3.25, 41000.0, 60.0, 125.0, metrics)


def terminal():
    return Console(force_terminal=True, width=120, file=io.StringIO())


def test_a_terminal_shows_the_progress_of_a_training(capsys):
    with TrainingBar(terminal()) as live:
        live(make_event(3, test_accuracy=40.5, test_loss=2.0))
        live(make_event(4))
        (bar,) = live.tasks
        assert (bar.completed, bar.total) == (48 * 4, 9600)
        assert bar.fields["now"] == "epoch 4/200  loss 3.2500  test_accuracy 40.50%  41,000 samples/s, 2:05 left"
        live(events.Message("cifar100-0", "resumes [after] step 4"))
    assert "resumes [after] step 4" in live.console.file.getvalue() + capsys.readouterr().out


def test_without_a_terminal_each_evaluation_is_a_line(capsys):
    with TrainingBar(Console(file=io.StringIO())) as live:
        live(make_event(3))
        live(make_event(4, test_accuracy=40.5))
    assert capsys.readouterr().out == (
        "cifar100-0  epoch 4/200  loss 3.2500  test_accuracy 40.50%  41,000 samples/s, 1:00 elapsed, 2:05 left\n"
    )
    assert live.console.file.getvalue().strip() == ""


def test_progress_is_shown_within_a_long_epoch(capsys):
    """On a terminal always, elsewhere after a long time without a line."""
    report = events.StepProgress("cifar100-0", 40, 9600, 100.0)
    with TrainingBar(terminal()) as live:
        live(report)
        (bar,) = live.tasks
        assert (bar.completed, bar.total, bar.fields["now"]) == (40, 9600, "step 40/9600  1:40 left")
    with TrainingBar(Console(file=io.StringIO())) as live:
        live(report)
        assert capsys.readouterr().out == ""
        live.last -= progress.QUIET
        live(report)
        live(report)
        assert capsys.readouterr().out == "cifar100-0  step 40/9600  1:40 left\n"
        live.last -= progress.QUIET / 2
        live(make_event(3))  # not shown, so it does not count as a line
        live.last -= progress.QUIET / 2
        live(make_event(4))
    last = "cifar100-0  epoch 4/200  loss 3.2500  41,000 samples/s, 1:00 elapsed, 2:05 left\n"
    assert capsys.readouterr().out == last


def test_an_experiment_of_many_trainings_shows_the_one_that_runs(tmp_path, monkeypatch):
    class Module:
        __file__ = __file__

        @staticmethod
        def train_all(root, data, tick, on_event):
            on_event(make_event(10, test_accuracy=60.0))
            seen.append(bars.tasks[-1].fields["left"])
            on_event(make_event(1, key="cifar100-1"))
            seen.append(bars.tasks[-1].fields["left"])
            tick(1.0)

    seen = []
    monkeypatch.setattr(type(EXPERIMENTS["table1"]), "load", lambda self: Module)
    with Bars(terminal()) as bars:
        (outcome,) = experiments.reproduce([EXPERIMENTS["table1"]], bars, root=tmp_path)
    assert outcome.status == "ran", outcome.error
    assert seen == [
        "epoch 10/200  loss 3.2500  test_accuracy 60.00%  41,000 samples/s, 2:05 left",
        "epoch 1/200  loss 3.2500  41,000 samples/s, 2:05 left",
    ]


def test_an_estimate_counts_the_speed_of_this_machine_and_the_processes_that_an_experiment_can_use():
    experiment = dataclasses.replace(SPIKE, jobs=3)
    start = 2 * progress.WORKER_SECONDS
    assert progress.estimate_seconds(experiment, 60, slowness=2.0, cores=2) == 60 + start
    assert progress.estimate_seconds(experiment, 6, slowness=2.0, cores=16) == 4 + start
    assert progress.estimate_seconds(experiment, 6, slowness=2.0, cores=1) == 12, "in this process"
    assert progress.estimate_seconds(dataclasses.replace(experiment, gpu=True), 60, slowness=2.0, cores=2) == 60


def make_digits(folder):
    """Files that have the names of all of MNIST."""
    for known in mnist.FILES:
        store.write_atomic(folder / "mnist" / known.name, "")
    return folder


@pytest.mark.parametrize("name", ["floor-mnist", "spikes-mnist"])
def test_an_estimate_is_that_of_the_digits_that_are_here(tmp_path, monkeypatch, no_data, name):
    experiment, digits = EXPERIMENTS[name], make_digits(tmp_path / "data")
    monkeypatch.setattr(experiment.load(), "run", lambda recipe, data, tick: {})

    def get_expected(quick, data):
        display = Recorder()
        experiments.reproduce([experiment], display, root=tmp_path, quick=quick, data=data)
        return display.expected[name]

    sample, quick = experiment.seconds
    assert get_expected(quick=False, data=None) == sample
    assert get_expected(quick=False, data=digits) == experiment.seconds_by_data["mnist"] > 4 * sample
    assert get_expected(quick=True, data=digits) == quick, "of a part of the sample"
