"""The study of 4-bit state: its codes round as they say, and its verdicts follow its rules."""

import json
import math

import pytest
import torch
from scipy import stats

from benchmarks import four_bits, quality
from benchmarks.four_bits import ALONE, CANDIDATES, DYNAMIC, LINEAR, LOG, NF4, PAIRS, RULES, FourBitJob, round_to_code
from benchmarks.report import RESULTS
from mvngrad_lab.tasks.mnist import data as mnist

SIGNED, SQUARES = (DYNAMIC, NF4), (LINEAR, LOG)
BEST = "NF4 and log, at random"


def make_values(code):
    values = torch.randn(300, generator=torch.Generator().manual_seed(0)) ** 3
    return values if code in SIGNED else values**2


@pytest.mark.parametrize("code", [*SIGNED, *SQUARES], ids=["dynamic", "NF4", "linear", "log"])
def test_a_block_has_at_most_16_values_and_keeps_its_largest(code):
    values = make_values(code)
    rounded = round_to_code(values, 0.5, code)
    for before, after in zip(values.split(128), rounded.split(128), strict=True):
        assert len(after.unique()) <= 16
        if before.max() == before.abs().max():  # the dynamic code has no -1
            assert after.max().item() == pytest.approx(before.max().item(), rel=1e-5)


@pytest.mark.parametrize("code", [NF4, LOG], ids=["NF4", "log"])
def test_rounding_at_random_has_no_bias_and_to_the_nearest_a_smaller_error(code):
    values, generator = make_values(code), torch.Generator().manual_seed(1)
    values = values[:256]
    drawn = [round_to_code(values, four_bits.make_draws(values, generator), code) for _ in range(2000)]
    first, second = (side.view(-1) for side in four_bits.find_neighbours(values.view(2, 128), code))
    reach = 5 * (second - first) / 2 / math.sqrt(2000)  # the deviation is at most half of the distance
    assert ((torch.stack(drawn).mean(0) - values).abs() <= reach + 1e-5 * values.abs()).all()
    nearest = round_to_code(values, 0.5, code)
    assert (nearest - values).abs().sum() < (drawn[0] - values).abs().sum()


def test_no_square_becomes_zero_and_zeros_stay_where_a_code_has_one():
    squares = make_values(LOG)
    squares[:5] = 0
    assert ((round_to_code(squares, 0.5, LOG) == 0) == (squares == 0)).all()
    assert (round_to_code(squares, 0.5, LINEAR) > 0).all()
    for code in (*SIGNED, *SQUARES):
        assert (round_to_code(torch.zeros(200), 0.5, code) == 0).all()
        assert (round_to_code(torch.full((200,), 3.0), 0.5, code) == 3.0).all()


def test_the_dynamic_and_linear_codes_are_those_of_torchao():
    maps = pytest.importorskip("torchao.optim.subclass_4bit")
    assert maps.get_qmap_signed() == pytest.approx(list(DYNAMIC))
    assert maps.get_qmap_unsigned() == pytest.approx(list(LINEAR))


def test_powers_are_as_the_rules_say():
    def power(margin, deviation, n):
        return stats.nct.sf(stats.t.isf(1 - four_bits.CONFIDENCE, n - 1), n - 1, margin / deviation * math.sqrt(n))

    assert [round(power(*each, 12), 2) for each in ((0.5, 0.38), (0.03, 0.019))] == [0.96, 0.99]
    assert [round(power(*each, 6), 2) for each in ((0.3, 0.10), (0.01, 0.002))] == [1.00, 1.00]
    assert "0.96 and 0.99 with 12" in RULES


@pytest.fixture
def sample(monkeypatch, tmp_path):
    """The 5,000 digits of the package, whatever data this machine has; and threads as they were."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MVNGRAD_DATA", raising=False)
    monkeypatch.setenv("MVNGRAD_COMMIT", "tested")
    monkeypatch.setattr(four_bits, "_compile_rounding", lambda: round_to_code)
    threads = torch.get_num_threads()
    yield mnist.load()
    torch.set_num_threads(threads)


def test_only_the_named_state_of_large_tensors_is_rounded(sample):
    torch.manual_seed(0)
    model = quality.network.mlp(quality.network.HIDDEN)
    job = FourBitJob(*PAIRS[1], f"{BEST}{ALONE}u", False, 7)
    optimizer = job.make_optimizer(model.parameters(), None)
    model(torch.randn(8, 784)).square().sum().backward()
    optimizer.step()
    large, small = list(model.parameters())[:2]
    counts = {name: max(len(block.unique()) for block in optimizer.state[large][name].view(-1, 128)) for name in "msu"}
    assert counts["u"] <= 16 < min(counts["m"], counts["s"])
    assert len(optimizer.state[small]["u"].unique()) > 16


def test_real_digits_are_learnt_in_4_bits_the_same_way_twice(sample, monkeypatch):
    monkeypatch.setitem(quality.SETTINGS, "quick", quality.Setting(3e-3, (0.9, 0.99), 1e-8, batch=500, epochs=4))
    job = FourBitJob("quick", "MVNGrad", BEST, False, 7)
    metrics, again = (quality.train(job, sample, "cpu", None) for _ in range(2))
    assert metrics["test_accuracy"] > 70
    assert {**again, "seconds": 0} == {**metrics, "seconds": 0}
    exact = quality.train(FourBitJob("quick", "MVNGrad", "float32", False, 7), sample, "cpu", None)
    assert exact["train_loss"] != metrics["train_loss"]


def invent(job, data, device, fused, harm):
    """Metrics without training: candidates in `harm` lose that many points of accuracy."""
    noise = (job.seed * 7919 % 11 - 5) / 1000
    lost = harm.get(job.state, 0.0)
    metrics = {"test_accuracy": 97 + noise - lost, "test_loss": 0.1 + noise, "train_loss": 0.05, "peak_loss": 0.5}
    return {**metrics, "seconds": 0.0}


@pytest.mark.parametrize(
    ("harm", "survivors", "runs"),
    [
        (dict.fromkeys(CANDIDATES, 2.0), [], 150 + 52),
        (dict.fromkeys(list(CANDIDATES)[:3], 2.0), [BEST], 150 + 12 + 52),
        ({}, list(CANDIDATES), 150 + 30 + 52),
    ],
)
def test_verdicts_follow_the_rules_and_an_interrupted_study_continues(
    sample, monkeypatch, tmp_path, harm, survivors, runs
):
    ran = []
    monkeypatch.setattr(quality, "train", lambda job, *rest: ran.append(job) or invent(job, *rest, harm))
    arguments = ["--workers", "1", "--out", str(tmp_path / "out"), "--store", str(tmp_path / "store.jsonl")]
    four_bits.main([*arguments, "--stop-after", "0"])
    assert (len(ran), (tmp_path / "out").exists()) == (1, False)
    four_bits.main(arguments)
    assert (len(ran), len(set(ran))) == (runs, runs)
    result = json.loads((tmp_path / "out" / "four-bits-mnist5k.json").read_text())
    assert (result["survivors"], len(result["runs"])) == (survivors, runs)
    assert {verdict for state in harm for verdict in result["verdicts"][state]} <= {"inferior"}
    alone = {(line["cell"], line["state"]) for line in result["comparisons"] if ALONE in line["state"]}
    assert {state.partition(ALONE)[0] for _, state in alone} == {result["best"]}
    assert {(cell, state[-1]) for cell, state in alone} == {
        *(("MVNGrad", name) for name in "msu"),
        *(("Adam", name) for name in "mv"),
    }
    page = (tmp_path / "out" / "four-bits-mnist5k.md").read_text()
    assert page.index(RULES) < page.index("## Verdicts")
    assert ("4 bits do not survive" in page) == (not survivors)


def test_the_stored_verdicts_follow_from_the_stored_runs():
    result = json.loads((RESULTS / "four-bits-mnist.json").read_text())
    runs = {}
    for row in result["runs"]:
        runs.setdefault((row["setting"], row["cell"], row["state"], row["lean"]), {})[row["seed"]] = row
    assert result["rules"] == RULES
    assert four_bits.make_result(runs) == {
        name: result[name] for name in ("comparisons", "verdicts", "survivors", "best")
    }
    jobs = {(job.setting, job.cell, job.state, job.seed) for job in four_bits.make_jobs(runs)}
    assert jobs == {(row["setting"], row["cell"], row["state"], row["seed"]) for row in result["runs"]}
