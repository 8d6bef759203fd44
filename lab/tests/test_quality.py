"""The benchmark of training quality: its verdicts follow its rules, its runs are paired and survive interruptions."""

import json
import math
import shutil
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from scipy import stats

from benchmarks import quality
from benchmarks.paired import MARGINS, RULES, compare_with_margin, compare_with_noise, worst_verdict
from benchmarks.quality import PAPER_128, PAPER_1024, SETTINGS, STRESSED, Job
from mvngrad_lab.tasks.mnist import data as mnist

NAN = math.nan
SEEDED = [96.0, 96.2, 96.4, 96.6, 96.8]  # deviation 0.316


# Rules


def test_how_often_the_noise_rule_errs_is_as_the_rules_say():
    """The mean difference of n unrelated pairs has sqrt(2/n) of the deviation it is compared with."""
    rates = {n: 2 * stats.t.sf(math.sqrt(n / 2), n - 1) for n in (5, 10)}
    assert {n: round(1 / rate) for n, rate in rates.items()} == {5: 5, 10: 19}
    assert "one verdict in 19 at 10 seeds, and one in 5 at 5" in RULES.replace("\n", " ")


@pytest.mark.parametrize(
    ("metric", "shift", "text"),
    [
        ("test_accuracy", 0.3, "within seed noise"),
        ("test_accuracy", -0.3, "within seed noise"),
        ("test_accuracy", 0.0, "within seed noise"),
        ("test_accuracy", -0.33, "worse"),
        ("test_accuracy", 0.33, "better"),
        ("train_loss", 0.33, "worse"),
        ("train_loss", -0.33, "better"),
    ],
)
def test_noise_is_the_deviation_over_seeds(metric, shift, text):
    assert compare_with_noise(metric, SEEDED, [value + shift for value in SEEDED]).text == text


def test_the_interval_is_that_of_the_paired_differences():
    verdict = compare_with_noise("train_loss", [1.0, 2.0, 3.0], [1.1, 2.0, 3.2])
    assert verdict.mean == pytest.approx(0.1)
    assert (verdict.low, verdict.high) == pytest.approx(
        (0.1 - 4.303 * 0.1 / 3**0.5, 0.1 + 4.303 * 0.1 / 3**0.5), abs=1e-4
    )


def test_a_failed_run_is_never_in_its_arms_favour():
    assert compare_with_noise("test_accuracy", SEEDED, [*SEEDED[:-1], NAN]).text == "worse"
    assert compare_with_noise("train_loss", SEEDED, [NAN] * 5).text == "worse"
    assert compare_with_noise("train_loss", [*SEEDED[:-1], NAN], SEEDED).text == "not judged"
    assert compare_with_margin("test_loss", SEEDED, [*SEEDED[:-1], NAN]).text == "inferior"
    assert compare_with_margin("test_loss", [*SEEDED[:-1], NAN], SEEDED).text == "undecided"
    assert compare_with_margin("test_loss", [*SEEDED[:-1], NAN], [*SEEDED[:-1], NAN]).text == "undecided"


@pytest.mark.parametrize("metric", MARGINS)
@pytest.mark.parametrize(
    ("worse", "text"),  # in margins, over seeds
    [
        ([0.0] * 5, "not inferior"),
        ([0.8, 0.9, 0.85, 0.9, 0.8], "not inferior"),
        ([-5.0, -6.0, -4.0, -5.0, -5.0], "not inferior"),
        ([1.5, 1.6, 1.4, 1.5, 1.5], "inferior"),
        ([0.5, 1.5, 0.9, 1.2, 0.4], "undecided"),
        ([-9.0, 9.0, 2.0, -3.0, 1.0], "undecided"),
    ],
)
def test_non_inferiority(metric, worse, text):
    sign = -1 if metric == "test_accuracy" else 1
    arm = [value + sign * MARGINS[metric] * step for value, step in zip(SEEDED, worse, strict=True)]
    verdict = compare_with_margin(metric, SEEDED, arm)
    assert verdict.text == text
    assert verdict.mean == pytest.approx(MARGINS[metric] * sum(worse) / 5, abs=1e-12)


def test_a_setting_has_its_worst_verdict():
    assert worst_verdict(["not inferior", "not inferior"]) == "not inferior"
    assert worst_verdict(["undecided", "not inferior"]) == "undecided"
    assert worst_verdict(["undecided", "inferior"]) == "inferior"


# Runs


def test_every_arm_has_the_seeds_of_its_reference():
    jobs = quality.make_jobs(10)
    assert len(jobs) == len(set(jobs))
    seeds = {}
    for job in jobs:
        seeds.setdefault((job.setting, job.cell, job.state, job.lean), []).append(job.seed)
    for setting in SETTINGS:
        assert seeds[setting, "MVNGrad", "float32", True] == seeds[setting, "MVNGrad", "float32", False]
        assert len(seeds[setting, "MVNGrad", "float32", True]) == 10
    for setting, cells in quality.ROUNDED.items():
        for cell in cells:
            assert seeds[setting, cell, "int8", False] == seeds[setting, cell, "float32", False]
            assert len(seeds[setting, cell, "bfloat16", False]) >= 5
    assert min(map(min, seeds.values())) > 5  # those the settings were chosen on


def test_a_key_is_of_all_that_decides_a_run(monkeypatch):
    job = Job(PAPER_128, "MVNGrad", "float32", False, 100)
    keys = [quality.run_key(job, code="a"), quality.run_key(job, code="b")]
    keys += [
        quality.run_key(Job(PAPER_128, "MVNGrad", "float32", lean, seed), code="a")
        for lean, seed in ((1, 100), (0, 101))
    ]
    monkeypatch.setitem(SETTINGS, PAPER_128, quality.Setting(5e-3, (0.999, 0.7), 1e-8, batch=128, epochs=4))
    keys.append(quality.run_key(job, code="a"))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", ["optim/backends/cpu/kernel.cpp", "optim/backends/cpu/__init__.py", "rule.py"])
def test_results_of_other_kernels_are_not_reused(tmp_path, monkeypatch, name):
    folder = tmp_path / "mvngrad"
    shutil.copytree(Path(quality.rule.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = quality.code_hash()
    monkeypatch.setattr(quality.rule, "__file__", str(folder / "rule.py"))
    assert quality.code_hash() == before
    with (folder / name).open("a") as file:
        file.write("\n")
    assert quality.code_hash() != before


def test_a_line_cut_off_is_run_again_and_spoils_no_other(tmp_path):
    store = tmp_path / "deep" / "runs.jsonl"
    quality.append_run(store, {"key": "a", "x": 1})
    with store.open("a") as file:
        file.write('{"key": "b", "x"')
    quality.append_run(store, {"key": "c", "x": 3})
    assert quality.load_runs(store) == {"a": {"key": "a", "x": 1}, "c": {"key": "c", "x": 3}}


@cache
def digits():
    return mnist.load()


@pytest.fixture
def sample(monkeypatch, tmp_path):
    """Real digits, few of them, whatever data this machine has; and threads as they were."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MVNGRAD_DATA", raising=False)
    monkeypatch.setenv("MVNGRAD_COMMIT", "tested")
    data, threads = digits(), torch.get_num_threads()
    monkeypatch.setattr(mnist, "load", lambda folder: data)
    yield data
    torch.set_num_threads(threads)


@pytest.mark.parametrize("state", ["float32", "bfloat16"])  # 8 bits are slow on a CPU
def test_real_digits_are_learnt_the_same_way_twice(sample, monkeypatch, state):
    monkeypatch.setitem(SETTINGS, "quick", quality.Setting(3e-3, (0.9, 0.99), 1e-8, batch=128, epochs=2))
    job = Job("quick", "MVNGrad", state, False, 7)
    metrics = quality.train(job, sample, "cpu", None)
    assert metrics["test_accuracy"] > 80
    assert metrics["train_loss"] < 0.7
    assert metrics["peak_loss"] < 5
    again = quality.train(job, sample, "cpu", None)
    assert {**again, "seconds": 0} == {**metrics, "seconds": 0}


def test_lean_and_mvngrad_start_alike_and_end_apart(sample, monkeypatch):
    monkeypatch.setitem(SETTINGS, "quick", quality.Setting(3e-3, (0.9, 0.99), 1e-8, batch=1000, epochs=1))
    ends = [quality.train(Job("quick", "MVNGrad", "float32", lean, 7), sample, "cpu", None) for lean in (False, True)]
    assert ends[0]["peak_loss"] == pytest.approx(ends[1]["peak_loss"], rel=0.05)
    assert ends[0]["train_loss"] != ends[1]["train_loss"]


def test_two_processes_do_what_one_does(sample):
    todo = [Job(PAPER_1024, "MVNGrad", "float32", False, seed) for seed in (7, 8)]
    work = partial(quality._train_job, device="cpu", fused=None)
    one, two = (dict(quality.run_jobs(work, todo, workers, quality._load_data, None)) for workers in (1, 2))
    assert [one[job]["test_loss"] for job in todo] == pytest.approx([two[job]["test_loss"] for job in todo])


def invented(job, data, device, fused, broken=()):
    """Metrics without training: lean is worse by a margin and a half of loss when stressed, 8 bits fail for LaProp."""
    noise = (job.seed * 7919 % 11 - 5) / 1000
    metrics = {"test_accuracy": 97 + noise, "test_loss": 0.1 + noise, "train_loss": 0.05 + noise, "peak_loss": 0.5}
    if job.lean and job.setting == STRESSED:
        metrics["test_loss"] += 0.015
    if job.cell == "LaProp" and job.state == "int8":
        metrics |= {"test_loss": None, "train_loss": None, "test_accuracy": 9.8, "peak_loss": None}
    return {**metrics, "seconds": 0.0}


def test_an_interrupted_benchmark_resumes_and_reports_its_numbers(sample, monkeypatch, tmp_path):
    ran = []

    def interrupted(job, *rest):
        if len(ran) == 20:
            raise KeyboardInterrupt
        ran.append(job)
        return invented(job, *rest)

    arguments = [
        "--seeds",
        "3",
        "--workers",
        "1",
        "--out",
        str(tmp_path / "out"),
        "--store",
        str(tmp_path / "store.jsonl"),
    ]
    monkeypatch.setattr(quality, "code_hash", lambda: "the same code")
    monkeypatch.setattr(quality, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quality.main(arguments)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(quality, "train", lambda job, *rest: ran.append(job) or invented(job, *rest))
    quality.main(arguments)
    assert sorted(map(str, ran)) == sorted(map(str, quality.make_jobs(3)))
    quality.main(arguments)
    assert len(ran) == len(quality.make_jobs(3))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    result = json.loads((tmp_path / "out" / "quality-mnist5k.json").read_text(), parse_constant=refuse)
    lean = {(line["setting"], line["metric"]): line["text"] for line in result["verdicts"]["lean"]}
    assert {key for key, text in lean.items() if text != "not inferior"} == {(STRESSED, "test_loss")}
    assert lean[STRESSED, "test_loss"] == "inferior"
    state = {(line["cell"], line["state"], line["text"]) for line in result["verdicts"]["state"]}
    assert {case for case in state if case[2] != "within seed noise"} == {("LaProp", "int8", "worse")}
    page = (tmp_path / "out" / "quality-mnist5k.md").read_text()
    assert page.index(RULES) < page.index("within seed noise |")
    assert "5,000 of MNIST" in page
    assert "(3 failed)" in page
    assert f"{STRESSED}: *inferior*" in page


def test_too_few_seeds_for_a_spread_are_refused(capsys):
    with pytest.raises(SystemExit):
        quality.main(["--seeds", "2"])
    assert "at least 3" in capsys.readouterr().err
