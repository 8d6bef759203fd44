"""The benchmark of a step: what it writes, how it judges, what it counts."""

import json
import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import candidates, first_step, largest, memory, monitor, report, step, versions
from benchmarks.candidates import Candidate
from benchmarks.report import FIGURES, markdown
from benchmarks.targets import find_machine, judge_targets
from benchmarks.timing import profile_host
from benchmarks.traffic import bytes_needed, state_bytes

ROOT = Path(__file__).parents[1]
SHAPES = [(64, 32), (1000,)]
SIZE = 64 * 32 + 1000


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setitem(step.MODELS, "small", SHAPES)
    monkeypatch.setattr(step, "copy_bandwidth", lambda device: 1e10)

    def run(*arguments):
        step.main(["--device", "cpu", "--models", "small", "--rounds", "2", "--out", str(tmp_path), *arguments])
        return json.loads((tmp_path / "step-cpu.json").read_text()), (tmp_path / "step-cpu.md").read_text()

    return run


def test_a_run_writes_the_selected_candidates_and_their_references(run):
    result, page = run("--only", "^MVNGradW (eager|foreach)$")
    rows = {row["name"]: row for row in result["models"]["small"]["decoupled"]}
    assert list(rows) == [
        "torch AdamW eager",
        "MVNGradW eager",
        "torch AdamW foreach",
        "MVNGradW foreach",
        "torch AdamW fused",
    ]
    for row in rows.values():
        assert {key for _, key, _ in FIGURES} <= row.keys()
        assert row["milliseconds"] > 0
        assert row["ratio_quartiles"][0] <= row["ratio"] <= row["ratio_quartiles"][1]
        assert f"| {row['name']} |" in page
    assert rows["torch AdamW fused"]["ratio_to_fused"] == rows["torch AdamW eager"]["ratio"] == 1
    assert rows["MVNGradW eager"]["reference"] == "torch AdamW eager"
    assert rows["torch AdamW eager"]["state_bytes"] == pytest.approx(8, abs=0.01)
    assert rows["MVNGradW eager"]["state_bytes"] == pytest.approx(12, abs=0.01)
    assert rows["MVNGradW eager"]["limit"] == pytest.approx(1.1 * 36 / 28, abs=0.01)
    assert rows["MVNGradW eager"]["peak"] > 8 + 12
    assert result["targets"] == []


def test_a_candidate_that_cannot_run_becomes_a_note(run, monkeypatch):
    absent = Candidate("absent Adam", "no_such_package.optim", "Adam", "fused")
    wrong = Candidate("wrong AdamW", "torch.optim", "AdamW", "fused", {"no_such_option": 1})
    monkeypatch.setattr(candidates, "PEERS", [absent, wrong])
    result, page = run("--only", "absent|wrong")
    assert [row["name"] for row in result["models"]["small"]["decoupled"]] == ["torch AdamW fused"]
    assert result["notes"][0] == "no_such_package: not installed"
    assert result["notes"][1].startswith("wrong AdamW: TypeError")
    assert "- no_such_package: not installed" in page


def test_the_host_profile_names_the_fused_candidates(run, tmp_path, monkeypatch):
    monkeypatch.setattr(step, "profile_host", partial(profile_host, steps=3))
    run("--only", "torch AdamW fused", "--profile", "--decay", "none", "decoupled")
    text = (tmp_path / "profile-host.txt").read_text()
    assert "small: torch Adam fused" in text
    assert "small: torch AdamW fused" in text
    assert text.count("3 steps") == 2


def test_launches_are_counted_for_existing_rows(monkeypatch):
    monkeypatch.setitem(step.MODELS, "small", SHAPES)
    monkeypatch.setattr(step, "count_launches", lambda step: 7)
    rows = [{"name": "torch AdamW fused", "launches": None}]
    step.StepBenchmark("cpu", 2, 1e10).count_launches("small", True, candidates.get_candidates(True, "torch"), rows)
    assert rows == [{"name": "torch AdamW fused", "launches": 7}]


def test_every_cell_and_state_is_a_candidate():
    names = {candidate.name for candidate in candidates.get_candidates(decoupled=True)}
    for cell in ("AdamW", "AdaBeliefW", "LaPropW", "MVNGradW"):
        assert {f"{cell} {form}" for form in ("eager", "foreach", "fused", "fused bf16", "fused int8")} <= names
    assert {"MVNGradW fused lean", "MVNGradW fused lean bf16", "MVNGradW fused lean int8"} <= names
    assert not {name for name in names if "lean" in name and "MVNGrad" not in name}


def make_tables(model, host=80.0, **ratios):
    rows = [{"name": "torch AdamW fused", "ratio_to_fused": 1.0, "of_copy": 0.6, "host_microseconds": 300.0}]
    rows += [
        {
            "name": f"MVNGradW {name.replace('_', ' ')}",
            "ratio_to_fused": ratio,
            "of_copy": 0.95,
            "graph_of_copy": 0.95,
            "host_microseconds": host,
        }
        for name, ratio in ratios.items()
    ]
    return {model: {"decoupled": rows}}


def test_a_target_is_met_missed_or_not_measured():
    targets = judge_targets(make_tables("gpt2-124m", fused=0.85, fused_bf16=0.70), "H200")
    verdicts = {target["target"]: target["verdict"] for target in targets}
    assert verdicts["MVNGradW fused: time over torch's fused AdamW"] == "met"
    assert verdicts["MVNGradW fused bf16: time over torch's fused AdamW"] == "missed"
    assert verdicts["MVNGradW fused int8: time over torch's fused AdamW"] == "not measured"
    assert verdicts["MVNGradW fused: of copy, on the device"] == "met"
    assert verdicts["MVNGradW fused: host, us"] == "met"
    assert all(target["models"] == ["gpt2-124m"] for target in targets)
    result = {"environment": {"device": "H200"}, "copy_bytes_per_second": 4e12, "targets": targets}
    page = markdown(result | {"models": {}, "notes": []})
    assert "| at most 0.62 | 0.7 | missed |" in page
    assert "| at least 0.9 | 0.95 | met |" in page


@pytest.mark.parametrize(("host", "verdict"), [(2000.0, "met"), (20000.0, "missed")])
def test_host_time_may_not_grow_faster_than_torchs(host, verdict):
    models = make_tables("gpt2-124m", fused=0.85) | make_tables("tiny-2000", host=host, fused=0.3)
    models["tiny-2000"]["decoupled"][0]["host_microseconds"] = 6000.0
    (growth,) = (target for target in judge_targets(models, "H200") if len(target["models"]) == 2)
    assert growth["verdict"] == verdict


def test_a_target_is_judged_on_its_machine_only():
    assert find_machine({"device": "NVIDIA H200", "threads": 16}, "cuda") == "H200"
    assert find_machine({"device": "NVIDIA L4", "threads": 2}, "cuda") is None
    assert find_machine({"device": "Xeon", "threads": 2}, "cpu") == "2 CPU cores"
    assert find_machine({"device": "Xeon", "threads": 8}, "cpu") is None
    assert judge_targets(make_tables("gpt2-124m", fused=0.85), None) == []


def test_state_bytes_count_each_tensor_once():
    params = step.make_parameters(SHAPES, "cpu")
    optimizer = torch.optim.AdamW(params, fused=True)
    assert state_bytes(optimizer) == 0
    optimizer.step()
    assert state_bytes(optimizer) == 8 * SIZE + 4 * len(params)
    assert bytes_needed(optimizer) == 28 * SIZE + 8 * len(params)
    shared = torch.ones(256)
    for param in params:
        optimizer.state[param] = {"code": torch.ones_like(param, dtype=torch.uint8), "map": shared, "step": 3}
    assert state_bytes(optimizer) == SIZE + 4 * 256


def test_the_monitor_benchmark_writes_every_arm_of_every_optimizer(tmp_path):
    monitor.main(["--rounds", "2", "--every", "2", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "monitor-cpu.json").read_text())
    assert [(row["network"], row["optimizer"], row["monitor"]) for row in result["rows"]] == [
        ("-".join(map(str, widths)), optimizer, arm)
        for widths in monitor.NETWORKS
        for optimizer in monitor.OPTIMIZERS
        for arm in monitor.ARMS
    ]
    assert all(row["ratio"] == 1 for row in result["rows"] if row["monitor"] == "without")
    page = (tmp_path / "monitor-cpu.md").read_text()
    assert page.count("| mvngrad.MVNGradW |") == 6 + 2
    for row in result["rows"]:
        assert row["parts"].keys() == ({*monitor.PARTS, "_after_step"} if row["monitor"] == "with spikes" else set())
        assert sum(row["parts"][name] for name in row["parts"] if name != "_after_step") <= row["parts"].get(
            "_after_step", 0
        )


@pytest.mark.parametrize("free", [300, 801, 1000, 1099, 1100, 1101, 2500, 13_333])
@pytest.mark.parametrize("curve", [0, 0.5, -0.15])
def test_the_largest_model_is_found_whatever_the_prediction(free, curve):
    """A layer needs 100, and less or more the more layers there are."""
    tried = []

    def measure(layers):
        tried.append(layers)
        need = layers * 100 + curve * layers**2
        return need if need <= free else math.inf

    found = largest.find_largest(measure, free)
    assert len(tried) == len(set(tried)) <= 16
    assert measure(found) < math.inf == measure(found + 1)


def test_the_memory_benchmark_counts_bytes_and_trains(monkeypatch):
    monkeypatch.setitem(memory.SHAPES, "gpt2-tiny", (memory.Shape(1, 32, 2, 16, vocabulary=256), (1, 16), (2, 16)))
    arms = [arm for arm in memory.ARMS if arm.name == memory.TORCH or "lean" in arm.name]
    torch_row, lean = memory.measure_steps(arms, "gpt2-tiny", "cpu", 2, [])
    assert torch_row["bytes"] == pytest.approx(12, abs=0.1)
    assert lean["bytes"] == pytest.approx(2 + 1 + 2, abs=0.3)  # scales weigh more in small tensors
    results = {"model": "gpt2-tiny", "steps": [torch_row, lean], "largest": [], "notes": ["a note"], "environment": {}}
    results["training"] = memory.measure_training(arms, "gpt2-tiny", "cpu", 2, [])
    assert [row["name"] for row in results["training"]] == [arm.name for arm in arms]
    assert "- a note" in memory.make_markdown(results)
    assert [line[-1] for line in memory.judge_targets(results)][-1] in ("met", "missed")


@pytest.mark.parametrize(("benchmark", "stem"), [(first_step, "first-step-cpu"), (largest, "largest-cuda")])
def test_the_stored_page_is_that_of_the_stored_numbers(benchmark, stem):
    stored = json.loads((memory.RESULTS / f"{stem}.json").read_text())
    assert (memory.RESULTS / f"{stem}.md").read_text() == benchmark.make_markdown(stored)


@pytest.mark.skipif(os.name != "posix", reason="limits are posix's")
def test_a_failed_write_leaves_the_old_result_whole(tmp_path):
    """The kernel refuses the rest of the file, as on a disk that becomes full."""
    import resource

    report.write({"name": "old"}, tmp_path / "results" / "step", "old page")
    before = {path.name: path.read_text() for path in (tmp_path / "results").iterdir()}
    assert sorted(before) == ["step.json", "step.md"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        for result, page in (({"name": "x" * 5000}, "new page"), (json.loads(before["step.json"]), "x" * 5000)):
            with pytest.raises(OSError, match="too large"):
                report.write(result, tmp_path / "results" / "step", page)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_text() for path in (tmp_path / "results").iterdir()} == before


def test_the_targets_of_memory_are_judged_from_the_stored_run():
    stored = json.loads((memory.RESULTS / "memory-cuda.json").read_text())
    assert (memory.RESULTS / "memory-cuda.md").read_text() == memory.make_markdown(stored)
    judged = {line[0]: line[1:] for line in memory.judge_targets(stored)}
    assert judged["release: peak saved, of the gradients"] == ["at least 1", "0.6057", "missed"]
    assert judged["release: training step over that without"][-1] == "met"
    assert [verdict for *_, verdict in judged.values()].count("missed") == 4


def test_the_table_of_torch_versions_is_that_of_the_records():
    page = (versions.RESULTS / "torch-versions.md").read_text()
    assert page == versions.make_page(versions.RESULTS)
    floor = re.search(r"torch>=([\d.]+)", (versions.RESULTS.parent / "pyproject.toml").read_text())[1]
    assert f"\n| {floor}" in page


def test_failures_are_named_under_the_table_of_torch_versions(tmp_path):
    counts = {"passed": 1200, "failed": 1, "error": 0, "skipped": 3}
    about = {"torch": "2.11.0+cpu", "python": "3.11.7", "commit": None, "device": "cpu", "command": "pytest tests -q"}
    record = {**about, **counts, "failures": ["tests/test_a.py::test_b"]}
    (tmp_path / "torch-2.11.0.json").write_text(json.dumps(record))
    page = versions.make_page(tmp_path)
    assert "| 2.11.0+cpu | 3.11.7 | 1,200 | 1 | 3 | `tests -q`, cpu |" in page
    assert page.endswith("- torch 2.11.0+cpu: `tests/test_a.py::test_b`\n")


@pytest.mark.usefixtures("triton")
def test_instructions_are_those_of_the_kernel_compiled_for_an_h200(tmp_path):
    """In a process of its own, because the kernels of this one may be interpreted."""
    command = [sys.executable, "-m", "benchmarks.instructions", "--only", "MVNGradW fused bf16", "--out", str(tmp_path)]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, cwd=ROOT, check=True, capture_output=True)
    (row,) = json.loads((tmp_path / "instructions.json").read_text())["steps"]
    assert row["bytes"] == 3 * 4 + 2 * 6
    assert 2 <= row["kinds"]["special"] < 3, "a root and a reciprocal"
    assert sum(row["kinds"].values()) == row["instructions"] < 100


def test_the_counts_of_instructions_in_the_log_are_those_of_results():
    stored = json.loads((ROOT / "results" / "instructions.json").read_text())["steps"]
    log = " ".join((ROOT / "docs" / "log.md").read_text().split())
    (row,) = (each for each in stored if each["name"] == "MVNGradW int8, 24-bit masters")
    counts = f"{row['instructions']:.0f} instructions for each coordinate, of which {row['kinds']['integer']:.0f} need"
    assert counts in log
    times = row["milliseconds"]
    assert f"{times['integers']:.3f} of the measured {times['measured']:.3f} ms" in log
    assert f"Moving the bytes takes {times['bytes']:.3f}." in log
