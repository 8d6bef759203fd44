"""What the lab makes of a Monitor's records: figures, the records of a training, and the floors that are cited."""

import math
import re
from statistics import median

import numpy as np
import pytest
import torch
from pages import ROOT
from samples import records as make_records
from test_clipping import Clipped, ClippedTask

from mvngrad.diagnostics import diagnose, floor, read_records
from mvngrad_lab.report import load_records
from mvngrad_lab.report.figures import monitor
from mvngrad_lab.training.train import make_monitor_observer, train


def draw_coordinates(entries):
    (figure,) = (each for each in monitor.draw("group", entries) if each.title == "Coordinates, over steps")
    return figure


def draw_signal(entries):
    return next((panel for panel in draw_coordinates(entries).panels if panel.title == "Signal to noise"), None)


@pytest.fixture
def entries():
    return [(record["step"], record["groups"][0]) for record in make_records()]


def test_the_signal_that_is_drawn_is_the_one_that_is_judged(entries):
    """The floor is part of `ratio`, not of `snr`."""
    entries = [(step, {**entry, "ratio": dict.fromkeys(entry["ratio"], 0.01)}) for step, entry in entries]
    first, last = (entry["snr"]["0.5"] for _, entry in (entries[0], entries[-1]))
    assert f"The median goes from {first:.3g} to {last:.3g}." in draw_signal(entries).svg


def test_hidden_noise_makes_the_drawn_signal_a_lower_bound(entries):
    assert "lower bound" not in draw_coordinates(entries).caption
    entries[-1][1]["noise_hidden"] = 0.4
    assert "is a lower bound: epsilon hides the noise of 40% of the coord" in draw_coordinates(entries).caption


def test_a_signal_that_is_missing_is_a_gap(entries, monkeypatch):
    drawn = []
    monkeypatch.setattr(monitor, "draw_curve", lambda axes, mark, x, y: drawn.append(np.array(y, dtype=float)))
    entries[3][1]["snr"] = dict.fromkeys(entries[3][1]["snr"])
    assert draw_signal(entries) is not None
    assert np.flatnonzero(np.isnan(drawn[0])).tolist() == [3]
    assert draw_signal([(step, {**entry, "snr": None}) for step, entry in entries]) is None


@pytest.mark.parametrize("cell", ["Adam", "AdaBelief", "LaProp", "MVN-Grad", "lean MVN-Grad"])
def test_the_median_and_the_largest_gradient_norm_are_drawn_differently(entries, cell):
    entries = [(step, {**entry, "cell": cell}) for step, entry in entries]
    (figure,) = (each for each in monitor.draw("group", entries) if each.title == "Gradient norms")
    middle, largest = (mark for mark in figure.legend if mark.line)
    assert (middle.dash, middle.width) != (largest.dash, largest.width)


def test_a_monitored_training_counts_steps_that_were_not_finite(tmp_path):
    recipe = Clipped(exploding=(3, 4, 9))
    at = tmp_path / recipe.key
    train(recipe, root=tmp_path, task=ClippedTask, observe=make_monitor_observer(at))
    records = read_records(at / "monitor.jsonl")
    assert [record.get("logged_not_finite", {}).get("loss", 0) for record in records] == [2, 1, 0]
    assert "Values of loss that were not finite: 3, the first by step 7." in str(diagnose(records))


def test_a_finite_loss_with_an_infinite_gradient_is_counted_apart(tmp_path):
    class Task:
        steps_per_epoch = 4

    class Step:
        task, losses, norms = Task, torch.tensor([1.0, 2.0, 30.0, math.nan]), torch.tensor([1.0, 1.0, math.inf, 1.0])
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(20))])

    Step.optimizer.param_groups[0]["params"][0].grad = torch.ones(20)
    Step.optimizer.step()
    make_monitor_observer(tmp_path)(1, Step)
    (record,) = read_records(tmp_path / "monitor.jsonl")
    assert record["logged"] == {"loss": 1.5, "gradient_norm": None}
    assert record["logged_not_finite"] == {"loss": 1, "gradient_norm": 1}


def test_the_floor_that_diagnose_cites_is_that_of_the_runs():
    dial = next(each.result for each in load_records(ROOT / "results", warn=pytest.fail) if each.name == "floor-dial")
    times = 1e-3 / dial["images"]["gradient_rms"]
    start = [record["groups"][0] for record in read_records(ROOT / "results" / "cifar100-start-monitor.jsonl")]
    roots = start[0]["floor"] / median(entry["root"] for entry in start)
    text = f"1e-3, {times:.1f} times the root mean square of the gradient, and {roots:.0f} times the median root in"
    assert text in floor.MEASURED_FLOOR
    for cited in (floor.FLOOR_COUPLED, floor.FLOOR_DECOUPLED, floor.FLOOR_WITHOUT_DECAY):
        assert cited.startswith(floor.MEASURED_FLOOR)
        assert re.search(r"[Bb]etas (were tuned|differed)", cited)
