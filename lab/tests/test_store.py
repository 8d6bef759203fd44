"""A store that never shows half a result, and reads the others if one is damaged."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from mvngrad_lab import store
from mvngrad_lab.recipe import Recipe
from mvngrad_lab.store import MetricsFile, read_rows


@dataclass(frozen=True)
class Example(Recipe):
    name: ClassVar[str] = "example"
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


def finished(root, lr=0.1, **result):
    folder = store.RunFolder(Example(lr=lr), root)
    folder.start({"commit": "abc"})
    folder.finish(result)
    return folder


def test_a_finished_run_is_read_as_it_was_stored(tmp_path):
    folder = finished(tmp_path, loss=[1.5, None])
    assert not folder.interrupted
    assert folder.run == store.FinishedRun(
        Example().key, "example", {"lr": 0.1, "betas": [0.9, 0.99]}, {"commit": "abc"}, {"loss": [1.5, None]}
    )
    assert store.load_runs(tmp_path) == [folder.run]


def test_a_run_without_a_complete_result_is_interrupted(tmp_path):
    folder = store.RunFolder(Example(), tmp_path)
    assert not folder.interrupted
    folder.start({})
    assert folder.interrupted
    for damage in ("", '{"loss": ', "[]not json"):
        (folder.path / "result.json").write_text(damage)
        assert folder.interrupted, damage
    assert store.load_runs(tmp_path, on_problem=id) == []


def test_starting_again_removes_the_old_result_and_the_old_changes(tmp_path):
    folder = finished(tmp_path, loss=1.0)
    folder.start({"commit": "def"}, "a diff")
    assert folder.run is None
    assert (folder.path / "changes.diff").read_text() == "a diff"
    folder.start({"commit": "def"})
    assert not (folder.path / "changes.diff").exists()


@pytest.mark.skipif(os.name != "posix", reason="limits are posix's")
def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    """The kernel refuses the write, as on a full disk."""
    path = tmp_path / "result.json"
    store.write_atomic(path, "old")
    code = (
        "import resource, signal, sys; from pathlib import Path; from mvngrad_lab import store\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "store.write_atomic(Path(sys.argv[1]), 'x' * 5000)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert "OSError" in done.stderr
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["", "x" * 300])
def test_a_failed_write_names_its_target(tmp_path, name):
    with pytest.raises(OSError, match=r"\[Errno \d+\] .*: '[^']*'$") as caught:  # a folder; a name that is too long
        store.write_atomic(tmp_path / name, "text")
    assert caught.value.filename == str(tmp_path / name)


def test_files_have_the_default_permissions(tmp_path):
    store.write_atomic(tmp_path / "a.json", "1")
    (tmp_path / "b.json").write_text("1")
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "b.json").stat().st_mode


def test_a_bundle_without_runs_can_be_read_and_written_again(tmp_path):
    for _ in range(2):
        store.write_bundle(tmp_path / store.BUNDLE, [])
    assert store.load_runs(tmp_path, on_problem=pytest.fail) == []


def test_a_bundle_keeps_its_runs_when_others_are_added(tmp_path):
    first, second = finished(tmp_path / "runs", loss=1.0).run, finished(tmp_path / "runs", lr=0.2, loss=2.0).run
    bundle = tmp_path / "kept" / store.BUNDLE
    store.write_bundle(bundle, [first])
    store.write_bundle(bundle, [second])
    assert store.load_runs(tmp_path / "kept") == sorted([first, second], key=lambda run: run.key)
    assert [json.loads(line)["key"] for line in bundle.read_text().splitlines()] == sorted([first.key, second.key])


def test_a_damaged_record_is_named_and_left_out(tmp_path):
    """The others are read."""
    good = finished(tmp_path, loss=1.0)
    for lr, damage in ((0.2, "[]"), (0.3, '{"loss": '), (0.4, "")):
        (finished(tmp_path, lr).path / "result.json").write_text(damage)
    bundled = finished(tmp_path / "other", 0.5)
    store.write_bundle(tmp_path / store.BUNDLE, [bundled.run])
    line = (tmp_path / store.BUNDLE).read_text()
    broken = [line[:50], '{"key": 1}', "[1]", line.replace('"result": {}', '"result": []').strip(), "\x00"]
    (tmp_path / store.BUNDLE).write_text("\n".join([*broken, line]))
    problems = []
    assert store.load_runs(tmp_path, on_problem=problems.append) == sorted(
        [good.run, bundled.run], key=lambda run: run.key
    )
    assert len(problems) == 3 + 5
    assert all("result.json cannot be read (" in text for text in problems[:3])
    for number, text in enumerate(problems[3:], start=1):
        assert text.startswith(f"{tmp_path / store.BUNDLE}, line {number} is not a run (")
    with pytest.raises(ValueError, match=r"runs.jsonl, line 1 is not a run .*; repair or remove that line first"):
        store.write_bundle(tmp_path / store.BUNDLE, [good.run])


def test_metrics_with_a_damaged_row_are_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    for damage in ("{}", '{"step": ', "[]", "\x00", '{"step": "2"}'):
        path.write_text(f'{{"step": 1}}\n{damage}\n{{"step": 3}}\n')
        with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is damaged .*; repair it, or delete the folder"):
            MetricsFile(path, 3)


def test_a_key_in_two_roots_is_read_from_the_first(tmp_path):
    here, there = finished(tmp_path / "a", loss=1.0).run, finished(tmp_path / "b", loss=2.0).run
    assert store.load_runs(tmp_path / "a", tmp_path / "b", tmp_path / "none") == [here]
    assert store.load_runs(tmp_path / "b", tmp_path / "a") == [there]
