"""The variance gap along a training: measured once at each checkpoint, through interruptions, and judged."""

import dataclasses
import os
import signal

import pytest
from tiny import Tiny, TinyTask

from mvngrad.diagnostics import gap as diagnostics_gap
from mvngrad.rule import ADABELIEF
from mvngrad_lab import store
from mvngrad_lab.experiments.cifar100 import gap as cifar_gap
from mvngrad_lab.experiments.cifar100.gap import GapRecipe
from mvngrad_lab.report.page import draw
from mvngrad_lab.report.verdicts import CAVEAT, NOT_REPRODUCED, REPRODUCED, UNDECIDED, find_judges
from mvngrad_lab.store import read_rows
from mvngrad_lab.training.train import Interrupted, train

JUDGES = find_judges()

TRAININGS = tuple(
    Tiny(optimizer=name, epochs=6, images=96, weight_decay=1e-3, lr=1e-3, beta1=0.5)
    for name in ("adabelief", "mvngrad")
)
SMALL = GapRecipe(trainings=TRAININGS, K=64, epochs=(1, 3, 5))


@pytest.fixture
def measure(tmp_path):
    def measure(recipe=SMALL, root="runs", **options):
        options = {"device": "cpu", "task": TinyTask, "on_event": id, **options}
        return cifar_gap.measure(recipe, tmp_path / root, None, lambda share: None, **options)

    return measure


def status(result):
    return JUDGES["cifar-gap"](result).status


def test_the_gap_is_positive_along_a_training_and_kept_as_a_run(measure, tmp_path):
    run = measure()
    assert status(run.result) == REPRODUCED
    assert run.result["epochs"] == [1, 3, 5]
    assert list(run.result["trained_with"]) == ["AdaBelief", "MVN-Grad"]
    for row in run.result["trained_with"].values():
        assert row["gap"] == pytest.approx([b - a for b, a in zip(row["before"], row["after"], strict=True)])
    stored = {each.key: each for each in store.load_runs(tmp_path / "runs")}
    assert stored[run.key] == run
    assert stored.keys() == {run.key, *(each.key for each in TRAININGS)}, "a training that was not there is kept"
    assert measure() == run, "and nothing is done again"
    (figure,) = draw(run)
    assert len(figure.panels) == 2
    assert "K = 64" in JUDGES["cifar-gap"](run.result).measured


def test_it_notices_momentum_before_normalizing(measure, monkeypatch):
    monkeypatch.setattr(diagnostics_gap, "cells_by_order", lambda rule: (ADABELIEF, ADABELIEF))
    assert status(measure().result) == UNDECIDED, "no gap at all"


def test_the_batches_are_fresh_at_each_checkpoint_and_enough(measure):
    """Not those of the training, not those of the checkpoint before; more than an epoch has, where K is more."""
    seen = {"training": [], "measured": []}

    class Watched(TinyTask):
        kind = "training"

        def make_batch(self, row):
            seen[self.kind].append(tuple(row["order"].tolist()))
            return super().make_batch(row)

    def gap(training, training_step, *rest):
        training_step.task.kind = "measured"
        found = original(training, training_step, *rest)
        training_step.task.kind = "training"
        return found

    original, cifar_gap.measure_gap = cifar_gap.measure_gap, gap
    try:
        measure(dataclasses.replace(SMALL, trainings=TRAININGS[:1]), task=Watched)
    finally:
        cifar_gap.measure_gap = original
    assert len(seen["training"]) == 6 * 6
    assert len(set(seen["measured"])) == 3 * 64
    assert not set(seen["training"]) & set(seen["measured"])


def test_an_interrupted_measurement_resumes_to_the_same_numbers(measure, tmp_path):
    whole = measure(root="whole")

    def interrupt(event):
        if getattr(event, "epoch", 0) == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    for _ in TRAININGS:
        with pytest.raises(Interrupted):
            measure(on_event=interrupt)
    folder = tmp_path / "runs" / SMALL.key
    path = folder / "mvngrad.jsonl"
    assert [row["epoch"] for row in read_rows(path)] == [1, 3]
    for checkpoint in (folder / TRAININGS[1].key / "checkpoints").iterdir():
        checkpoint.unlink()  # as if it had been killed before it could save
    assert measure().result == whole.result


def test_a_training_of_the_store_is_left_as_it_is(measure, tmp_path):
    kept = train(TRAININGS[0], root=tmp_path / "runs", task=TinyTask, on_event=id)
    measure()
    assert store.RunFolder(TRAININGS[0], tmp_path / "runs").run == kept
    assert (tmp_path / "runs" / SMALL.key / TRAININGS[0].key / "result.json").exists()


def test_a_diverged_training_has_no_gap(measure):
    broken = dataclasses.replace(SMALL, trainings=(dataclasses.replace(TRAININGS[1], break_at=10),))
    with pytest.raises(RuntimeError, match=r"after epochs \(1,\) and not \(1, 3, 5\): it is diverged; delete"):
        measure(broken)


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [([3, 3, 3, 3], REPRODUCED), ([3, 3, 3, 2], CAVEAT), ([3, 3, 1, 1], UNDECIDED), ([3, 3, 1, -3], NOT_REPRODUCED)],
)
def test_a_gap_counts_by_its_standard_errors(gaps, expected):
    clear = {"gap": [3] * 4, "error": [1.0] * 4, "before": [9.0] * 4}
    result = {"K": 128, "data": "", "epochs": [1, 2, 3, 4], "trained_with": {"AdaBelief": clear}}
    assert status({**result, "trained_with": {"AdaBelief": clear, "MVN-Grad": {**clear, "gap": gaps}}}) == expected


def test_the_papers_runs_at_128_are_measured():
    recipe = GapRecipe()
    assert [(each.optimizer, each.batch_size, each.seed, each.epochs) for each in recipe.trainings] == [
        ("adabelief", 128, 1, 200), ("mvngrad", 128, 1, 200),
    ]  # fmt: skip
    assert recipe.K == 128
    assert max(recipe.epochs) < 200
