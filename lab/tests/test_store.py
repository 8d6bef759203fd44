"""Recipes, their keys, and a store that never shows half a result."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from mvngrad_lab import store
from mvngrad_lab.recipe import Recipe


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


def test_a_key_is_the_content_and_nothing_else():
    assert Example().key == Example(betas=(0.9, 0.99)).key
    assert len({Example().key, Example(lr=0.2).key, Example(betas=(0.9, 0.999)).key}) == 3
    # Of another process too: a hash that Python salts would be another one there.
    code = "import sys; sys.path[:0] = sys.argv[1:]; from test_store import Example; print(Example().key)"
    there = [sys.executable, "-c", code, str(Path(__file__).parent)]
    assert subprocess.run(there, capture_output=True, text=True, check=True).stdout.strip() == Example().key


def test_a_recipe_that_json_cannot_tell_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        _ = Example(lr=float("nan")).key


def test_a_name_that_is_no_folder_is_refused():
    @dataclass(frozen=True)
    class Wrong(Recipe):
        name: ClassVar[str] = "../wrong"

    with pytest.raises(ValueError, match=r"name='\.\./wrong' of Wrong is invalid"):
        _ = Wrong().key


def test_what_was_kept_comes_back(tmp_path):
    folder = finished(tmp_path, loss=[1.5, None])
    assert not folder.interrupted
    assert folder.run == store.FinishedRun(
        Example().key, "example", {"lr": 0.1, "betas": [0.9, 0.99]}, {"commit": "abc"}, {"loss": [1.5, None]}
    )
    assert store.load_runs(tmp_path) == [folder.run]


def test_a_run_without_a_whole_result_did_not_finish(tmp_path):
    folder = store.RunFolder(Example(), tmp_path)
    assert not folder.interrupted
    folder.start({})
    assert folder.interrupted
    for damage in ("", '{"loss": ', "[]not json"):
        (folder.path / "result.json").write_text(damage)
        assert folder.interrupted, damage
    assert store.load_runs(tmp_path) == []


def test_beginning_again_takes_the_old_result_away(tmp_path):
    folder = finished(tmp_path, loss=1.0)
    folder.start({"commit": "def"})
    assert folder.run is None


@pytest.mark.skipif(os.name != "posix", reason="limits are posix's")
def test_a_write_that_fails_leaves_what_was_there_and_no_litter(tmp_path):
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
def test_a_write_that_cannot_be_names_what_was_asked_for(tmp_path, name):
    with pytest.raises(OSError, match=r"\[Errno \d+\] .*: '[^']*'$") as told:  # a folder; a name that is too long
        store.write_atomic(tmp_path / name, "text")
    assert told.value.filename == str(tmp_path / name)


def test_files_have_the_rights_of_the_user(tmp_path):
    store.write_atomic(tmp_path / "a.json", "1")
    (tmp_path / "b.json").write_text("1")
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "b.json").stat().st_mode


def test_a_bundle_gives_back_its_runs_and_grows(tmp_path):
    first, second = finished(tmp_path / "runs", loss=1.0).run, finished(tmp_path / "runs", lr=0.2, loss=2.0).run
    bundle = tmp_path / "kept" / store.BUNDLE
    store.write_bundle(bundle, [first])
    store.write_bundle(bundle, [second])
    assert store.load_runs(tmp_path / "kept") == sorted([first, second], key=lambda run: run.key)
    assert [json.loads(line)["key"] for line in bundle.read_text().splitlines()] == sorted([first.key, second.key])


def test_of_two_runs_with_one_key_the_first_root_wins(tmp_path):
    here, there = finished(tmp_path / "a", loss=1.0).run, finished(tmp_path / "b", loss=2.0).run
    assert store.load_runs(tmp_path / "a", tmp_path / "b", tmp_path / "none") == [here]
    assert store.load_runs(tmp_path / "b", tmp_path / "a") == [there]
