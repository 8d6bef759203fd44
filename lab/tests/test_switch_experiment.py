"""The switch from AdamW at half of training: a small form of the whole experiment on the CPU, and its rules."""

import json
import shutil
import sys

import pytest
import torch
from texts import write_text

from mvngrad_lab.experiments.switch import figure, judge, run
from mvngrad_lab.experiments.switch.records import FILE, collect, find_bump, make_arms
from mvngrad_lab.report import Sources
from mvngrad_lab.report.verdicts import CAVEAT, NOT_REPRODUCED, NOT_RUN, REPRODUCED, UNDECIDED
from mvngrad_lab.store import FinishedRun, read_run
from mvngrad_lab.tasks.language.data.prepare import prepare_folder_tokens
from mvngrad_lab.training import checkpoint

SMALL = {"model": "tiny", "steps": 4, "epoch_steps": 1, "warmup_steps": 1, "batch_size": 2, "micro_batch_size": 2}


@pytest.fixture
def text(tmp_path, no_data, letters, monkeypatch):
    monkeypatch.setattr(run, "SEEDS", (0,))
    write_text(tmp_path / "text" / "text.txt", *("some words " * 40 for _ in range(40)))
    write_text(tmp_path / "text" / "validation.txt", "some other words " * 40)
    return prepare_folder_tokens(tmp_path / "text", tmp_path, workers=1)[0]


def test_all_arms_train_on_the_same_data_and_switch_at_half(tmp_path, text, monkeypatch, capsys):
    settings = {**SMALL, "text": text, "precision": "float32"}
    runs, path = tmp_path / "runs", tmp_path / FILE
    monkeypatch.setattr(
        sys, "argv",
        ["run", "--runs", str(runs), "--data", str(tmp_path), "--device", "cpu", "--export", str(path),
         "--settings", json.dumps(settings)],
    )  # fmt: skip
    run.main()
    arms = make_arms(0, **settings)
    adamw = runs / arms["AdamW"].key
    losses = {arm: run.read_losses(recipe, runs) for arm, recipe in arms.items()}
    assert {len(values) for values in losses.values()} == {2}
    switched = [losses[arm] for arm in ("AdamW", "converted", "fresh")]
    assert len({first for first, _ in switched}) == 1, "the first loss after the switch is of the same weights"
    assert len({second for _, second in switched}) == 3
    assert losses["MVN-GradW"][0] != switched[0][0]
    (record,) = collect(Sources((tmp_path,), {}, print))
    (seed,) = record.result["seeds"]
    assert set(seed["validation_loss"]) == set(arms)
    assert figure.draw(record.result)[0].table.rows[0][0] == "AdamW"
    assert judge.judge_bump(record.result).status == NOT_RUN  # one seed of three

    half = torch.load(adamw / run.HALF, weights_only=True)
    assert half["optimizer.0.step"] == 2
    started = {}
    for arm in ("converted", "fresh"):
        folder = runs / arms[arm].key / checkpoint.FOLDER
        shutil.rmtree(folder)
        run.start_at_half(arms[arm], arms["AdamW"], runs, tmp_path)
        (path,) = checkpoint.list_checkpoints(folder)
        started[arm], notes = checkpoint.load(path, {})
        assert notes["step"] == 2
        assert torch.equal(started[arm]["model.final_norm.weight"], half["model.final_norm.weight"])
    assert torch.equal(started["converted"]["optimizer.0.m"], half["optimizer.0.m"])
    assert started["converted"]["optimizer.0.step"] == 2
    assert not any(started["fresh"][f"optimizer.0.{name}"].any() for name in ("m", "s", "u", "step"))
    with pytest.raises(FileNotFoundError, match="to train AdamW again"):
        run.start_at_half(arms["fresh"], arms["AdamW"], tmp_path / "empty", tmp_path)

    before = read_run(adamw)
    assert isinstance(before, FinishedRun)
    run.main()  # everything is stored
    assert read_run(adamw) == before
    assert capsys.readouterr().out.count("1 of 1 seeds") == 2


def make_result(bumps, ends):
    """`bumps` are pairs of converted and fresh; `ends` are validation losses of AdamW and converted."""
    return {
        "seeds": [
            {
                "bump": dict(zip(("converted", "fresh"), bump, strict=True)),
                "validation_loss": {"AdamW": end[0], "converted": end[1], "fresh": end[1], "MVN-GradW": end[1] + 0.001},
            }
            for bump, end in zip(bumps, ends, strict=True)
        ]
    }


@pytest.mark.parametrize(
    ("bumps", "status"),
    [
        ([(0.005, 0.04), (0.006, 0.05), (0.004, 0.045)], REPRODUCED),
        ([(0.005, 0.009), (0.006, 0.010), (0.004, 0.011)], CAVEAT),
        ([(0.05, 0.4), (0.06, 0.5), (0.04, 0.45)], CAVEAT),
        ([(0.05, 0.06), (0.06, 0.05), (0.04, 0.05)], NOT_REPRODUCED),
    ],
)
def test_the_rule_for_the_bump(bumps, status):
    verdict = judge.judge_bump(make_result(bumps, [(4.0, 4.0)] * 3))
    assert verdict.status == status
    assert verdict.strip.rows[0].value == pytest.approx(bumps[0][0]), "the middle of the three"


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ([(4.0, 4.001), (4.1, 4.102), (4.2, 4.200)], REPRODUCED),
        ([(4.0, 4.009), (4.1, 4.090), (4.2, 4.215)], UNDECIDED),
        ([(4.0, 4.020), (4.1, 4.120), (4.2, 4.221)], NOT_REPRODUCED),
    ],
)
def test_the_rule_for_the_end(ends, status):
    verdict = judge.judge_end(make_result([(0.0, 0.0)] * 3, ends))
    assert verdict.status == status
    assert [row.label for row in verdict.strip.rows] == ["less AdamW", "less fresh", "less MVN-GradW"]


def test_a_bump_is_the_largest_mean_of_ten_differences():
    assert find_bump([1.0] * 5 + [3.0] * 10 + [0.0] * 5, [1.0] * 20) == 2.0
    assert find_bump([1.0, 2.0], [1.0, 1.0]) == 0.5
