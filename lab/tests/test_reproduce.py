"""Results survive errors, kill -9 and a full disk; and the command that makes them."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("tyro")
pytest.importorskip("rich")

from mvngrad_lab import cli, experiments, store
from mvngrad_lab.cli.data import DATA_SETS
from mvngrad_lab.discovery import find_experiments
from mvngrad_lab.experiments.spike import run as spike

EXPERIMENTS = find_experiments()
SPIKE, MEMORY = EXPERIMENTS["spike"], EXPERIMENTS["memory"]


class Recorder:
    """A display that records its calls."""

    def __init__(self):
        self.expected, self.begun, self.ended = None, [], []

    def plan(self, experiments):
        self.expected = {experiment.name: seconds for experiment, seconds in experiments}

    def begin(self, experiment, interrupted):
        self.begun.append((experiment.name, interrupted))
        return lambda share: None

    def event(self, event):
        pass

    def end(self, outcome):
        self.ended.append(outcome)


def run_quick(root, *names, **options):
    display = Recorder()
    return experiments.reproduce(
        experiments.select_experiments(names), display, root=root, quick=True, **options
    ), display


def get_statuses(outcomes):
    return {outcome.experiment.name: outcome.status for outcome in outcomes}


def test_finished_results_are_reused(tmp_path):
    assert get_statuses(run_quick(tmp_path, "spike", "memory")[0]) == {"spike": "ran", "memory": "ran"}
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    outcomes, display = run_quick(tmp_path, "spike", "memory")
    assert get_statuses(outcomes) == {"spike": "stored", "memory": "stored"}
    assert display.expected == {}
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}


def test_results_of_other_code_are_computed_again(tmp_path, monkeypatch):
    run_quick(tmp_path, "memory")
    monkeypatch.setattr(experiments, "code_hash", lambda experiment: "another")
    outcomes, _ = run_quick(tmp_path, "memory")
    assert get_statuses(outcomes) == {"memory": "ran"}
    (run,) = store.load_runs(tmp_path)
    assert run.environment["code"] == "another"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("LIBRARY/rule.py", True),
        ("LIBRARY/optim/optimizer.py", True),
        ("LIBRARY/optim/backends/cpu/kernel.cpp", True),
        ("LAB/arrays.py", True),
        ("LAB/tasks/mnist/task.py", True),
        ("LAB/training/step.py", True),
        ("LAB/experiments/spike/run.py", True),
        ("LAB/experiments/spike/judge.py", False),
        ("LAB/experiments/memory/run.py", False),
    ],
)
def test_the_hash_covers_the_code_behind_a_result_in_both_packages(tmp_path, monkeypatch, name, changes):
    for package in ("LIBRARY", "LAB"):
        shutil.copytree(getattr(experiments, package), tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
        monkeypatch.setattr(experiments, package, tmp_path / package)
    monkeypatch.setattr(spike, "__file__", str(tmp_path / "LAB/experiments/spike/run.py"))
    before = experiments.code_hash(EXPERIMENTS["spike"])
    with (tmp_path / name).open("a") as file:
        file.write("# another\n")
    assert (experiments.code_hash(EXPERIMENTS["spike"]) != before) == changes


def test_quick_and_full_are_two_results(tmp_path):
    assert spike.make_recipe(True, None).key != spike.make_recipe(False, None).key
    run_quick(tmp_path, "spike")
    (run,) = store.load_runs(tmp_path)
    assert run.environment["quick"] is True
    assert run.result["seconds"] > 0


def test_an_error_ends_only_its_experiment(tmp_path, monkeypatch):
    def broken(recipe, data, tick):
        raise RuntimeError("it broke")

    monkeypatch.setattr(spike, "run", broken)
    outcomes, display = run_quick(tmp_path, "spike", "memory")
    assert get_statuses(outcomes) == {"spike": "failed", "memory": "ran"}
    assert outcomes[0].error.startswith("RuntimeError: it broke (test_reproduce.py, line ")
    monkeypatch.undo()
    outcomes, display = run_quick(tmp_path, "spike", "memory")
    assert display.begun == [("spike", True)]
    assert get_statuses(outcomes) == {"memory": "stored", "spike": "ran"}


@pytest.mark.parametrize("content", ["{}", '{"seconds": null}', '{"seconds": "x"}'])
def test_a_damaged_result_is_computed_again(tmp_path, content):
    run_quick(tmp_path, "spike")
    (path,) = tmp_path.glob("spike-*/result.json")
    path.write_text(content)
    assert get_statuses(run_quick(tmp_path, "spike")[0]) == {"spike": "ran"}
    assert "panels" in path.read_text()


def test_a_result_that_is_not_json_is_not_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(spike, "run", lambda recipe, data, tick: {"peak": float("nan")})
    outcomes, _ = run_quick(tmp_path, "spike")
    assert get_statuses(outcomes) == {"spike": "failed"}
    assert store.load_runs(tmp_path) == []


def test_experiments_that_need_a_gpu_run_only_if_named(tmp_path):
    on_gpu = {name for name, each in EXPERIMENTS.items() if each.gpu}
    assert {"table1", "table2", "cifar-gap", "state-precision", "floor", "floor-dial"} <= on_gpu
    default = {each.name for each in experiments.select_experiments([])}
    assert not on_gpu & default
    assert "floor-mnist" in default
    assert "floor-mnist-table" not in default, "it takes long"
    if torch.cuda.is_available():
        return  # they would run
    outcomes, _ = run_quick(tmp_path, *on_gpu, "memory")
    assert get_statuses(outcomes)["memory"] == "ran"
    failed = [outcome for outcome in outcomes if outcome.experiment.name in on_gpu]
    assert len(failed) == len(on_gpu)
    for outcome in failed:
        assert outcome.status == "failed"
        assert "needs a CUDA device" in outcome.error
        small = {"table2": "train wikitext103 --model tiny", "floor-dial": "reproduce floor-mnist"}
        command = small.get(outcome.experiment.name, "train cifar100 --train-limit")
        assert f"mvngrad {command}" in outcome.error


def test_an_experiment_that_needs_a_gpu_is_refused_before_the_plan_without_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["reproduce", "table1", "cifar-gap", "memory", "--runs", str(tmp_path / "runs")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("mvngrad: cifar-gap, table1: a CUDA device is needed, and torch sees none; use a ")
    assert not (tmp_path / "runs").exists()
    assert cli.main(["reproduce", "floor-dial", "floor", "spikes", "--runs", str(tmp_path / "runs")]) == 2
    assert "or `mvngrad reproduce floor-mnist spikes-mnist`, which asks the same on MNIST" in capsys.readouterr().err


def test_unknown_experiments_are_refused_with_the_valid_ones(capsys):
    assert cli.main(["reproduce", "spike", "spyke"]) == 2
    error = capsys.readouterr().err
    assert error.strip() == f"mvngrad: no experiment 'spyke'; choose from {', '.join(EXPERIMENTS)}"


# The command, in processes of its own


def command(*arguments, root, wait=True, **options):
    """Run a command in `root`, where there is no results/, which would all be in the report."""
    line = [sys.executable, "-m", "mvngrad_lab", *arguments, "--runs", str(root)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=root, **options
    )
    return process.communicate(timeout=1200)[0] if wait else process


def has_started(root, target):
    """Wait until an experiment has started; False if it does not."""
    end = time.monotonic() + 1200
    while time.monotonic() < end:
        if any((folder / "environment.json").exists() for folder in root.glob(f"{target}-*")):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.slow
def test_an_interruption_loses_only_the_unfinished_experiment(tmp_path):
    """Ctrl-C, then kill -9 of the same command, which then runs to its end."""
    for how, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        process = command("reproduce", "spike", "separation", root=tmp_path, wait=False)
        assert has_started(tmp_path, "separation")
        process.send_signal(how)
        output, _ = process.communicate(timeout=1200)
        assert process.returncode == code
        assert ("Finished results are stored" in output) == (how == signal.SIGINT)
        assert [run.name for run in store.load_runs(tmp_path)] == ["spike"]
        for started in tmp_path.glob("separation-*/environment.json"):
            started.unlink()  # so that the next start is seen
    output = command("reproduce", "spike", "separation", root=tmp_path)
    assert "stored spike" in output
    assert "separation: an earlier run did not finish" in output
    assert "done   separation" in output
    assert output.strip().splitlines()[-1] == f"report: {tmp_path / 'report.html'}"
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") >= 4
    assert "reproduced with a caveat" in page


def test_a_full_disk_fails_the_experiment(tmp_path):
    """Files may not grow past 20 kB, so that spike's result cannot be written and memory's can."""

    def limit():
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    output = command("reproduce", "spike", "memory", root=tmp_path, preexec_fn=limit)
    assert "failed spike" in output
    assert "File too large" in output
    assert "done   memory" in output
    assert [run.name for run in store.load_runs(tmp_path)] == ["memory"]
    assert not list(tmp_path.rglob(".*")), "a partial file was left behind"


def list_files(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_second_process_is_refused_before_it_changes_anything(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # without results/
    process = command("reproduce", "separation", root=tmp_path, wait=False)
    try:
        assert has_started(tmp_path, "separation")
        process.send_signal(signal.SIGSTOP)
        before = list_files(tmp_path)
        assert cli.main(["reproduce", "memory", "--quick", "--runs", str(tmp_path)]) == 2
        assert list_files(tmp_path) == before
        error = capsys.readouterr().err
        assert f"mvngrad: {tmp_path} is in use by process {process.pid} on this machine; wait for it" in error
        assert "another folder with --runs" in error
        assert cli.main(["report", "--runs", str(tmp_path)]) == 0, "others may read"
    finally:
        process.kill()
        process.communicate()
    assert cli.main(["reproduce", "memory", "--quick", "--runs", str(tmp_path)]) == 0
    assert not (tmp_path / "lock").exists()


NO_RESULTS = (
    "no results/ in this folder: the runs stored with the repository are not included; run this in the clone to "
    "include them"
)


def test_a_report_says_that_it_lacks_the_runs_of_the_repository(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report"]) == 0
    assert NO_RESULTS in capsys.readouterr().out.splitlines()
    (tmp_path / "results").mkdir()
    assert cli.main(["report"]) == 0
    assert "no results/" not in capsys.readouterr().out


def test_the_summary_is_first_of_the_experiments_that_were_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # without results/
    assert cli.main(["reproduce", "memory", "--quick"]) == 0
    capsys.readouterr()
    assert cli.main(["reproduce", "spike", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("writing the report")
    assert lines[start - 1] == NO_RESULTS
    assert re.fullmatch(
        r"\d+ claims of spike: \d+ reproduced, 1 confirmed, \d+ reproduced with a caveat", lines[start + 1]
    )
    assert re.fullmatch(r"- Of \d simulated claims that have a proof, \d hold.*", lines[start + 2])
    assert re.fullmatch(r"\d+ other claims: 2 reproduced, \d+ not run", lines[start + 3])
    assert lines[start + 4 :] == [f"report: {tmp_path / 'runs' / 'report.html'}"]


def test_a_process_that_lost_its_lock_stores_no_result(tmp_path, monkeypatch, capsys):
    def run(recipe, data, tick):
        (tmp_path / "lock").write_text("another's lock")
        return {}

    monkeypatch.setattr(spike, "run", run)
    for others in ((), ("memory",)):
        assert cli.main(["reproduce", "spike", *others, "--quick", "--runs", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert "was taken by another process" in error
        assert "--runs" not in error
        assert store.load_runs(tmp_path) == []
        assert not (tmp_path / "report.html").exists()
        (tmp_path / "lock").unlink()


@pytest.mark.parametrize("words", ["reproduce memory", "train mnist --digits mnist-5k", "sweep work mnist-5k"])
@pytest.mark.parametrize("path", ["afile", "afile/folder"])
def test_a_folder_of_results_that_cannot_be_made_is_refused(tmp_path, capsys, path, words):
    (tmp_path / "afile").touch()
    assert cli.main([*words.split(), "--runs", str(tmp_path / path)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    reason = "File exists" if path == "afile" else "Not a directory"
    assert error == f"mvngrad: --runs {tmp_path / path} is not a folder and cannot be made ({reason}); name another"


def test_without_its_packages_the_command_says_what_to_install():
    code = "import sys; sys.modules['tyro'] = None; from mvngrad_lab.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("pip install mvngrad-lab")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mvngrad ")


def test_data_list_names_the_digits(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("MVNGRAD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["data", "list"]) == 0
    output = capsys.readouterr().out
    assert "mnist: 5,000 of MNIST's" in output
    assert [line.partition(":")[0] for line in output.splitlines()] == list(DATA_SETS)
    assert "wikitext103: not here; get it with `mvngrad data get wikitext103`" in output
    assert "wikipedia_en: not here; get it with `mvngrad data get wikipedia_en --data FOLDER`" in output
    for name, content in {"cut": "{", "other": "5"}.items():
        store.write_atomic(tmp_path / "mvngrad" / "tokens" / name / "manifest.json", content)
    assert cli.main(["data", "list"]) == 0
    assert capsys.readouterr().out.count("manifest.json cannot be read") == 2
    assert cli.main(["data", "list", "--data", str(tmp_path / "none")]) == 0
    assert "is not a folder" in capsys.readouterr().out
