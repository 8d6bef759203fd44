"""Checkpoints are written completely or not at all; the newest undamaged one is read, old ones are removed."""

import errno
import hashlib
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import filesystem, state_dict_saver

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.store.lock import Locked
from mvngrad_lab.training import checkpoint


def save(folder, step, keep, notes=None):
    checkpoint.save(folder, step, notes or {"seconds": 0.5}, {"x": torch.full((1000,), float(step))}, keep)
    return checkpoint.list_checkpoints(folder)[0]


def newest(folder, messages=None):
    """The step of the newest checkpoint, whose state is the step everywhere."""
    path = checkpoint.find_newest(folder, print if messages is None else messages.append)
    if path is None:
        return None
    state, notes = checkpoint.load(path, {})
    assert state["x"].eq(notes["step"]).all()
    assert notes["seconds"] == 0.5
    return notes["step"]


def test_the_newest_is_read_as_it_was_written(tmp_path):
    assert newest(tmp_path / "none yet") is None
    for step in (9, 10, 200_000_000):
        save(tmp_path, step, keep=3)
    assert newest(tmp_path) == 200_000_000


@pytest.mark.parametrize("keep", [1, 2])
def test_older_checkpoints_are_removed(tmp_path, keep):
    for step in range(4):
        save(tmp_path, step, keep=keep)
    assert [path.name[:13] for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000003", "step-00000002"][
        :keep
    ]
    assert len(list(tmp_path.iterdir())) == keep


def test_saving_a_step_again_keeps_the_one_before(tmp_path):
    for step in (1, 2, 2):
        save(tmp_path, step, keep=2)
    assert [path.name[:13] for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000002", "step-00000001"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def change(path):
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1  # one bit of a tensor, which torch.load would not notice
    path.write_bytes(whole)


def empty(path):
    path.write_bytes(b"")


EMPTY = hashlib.sha256().hexdigest()[:16]


def empty_and_rename(path):
    """The name of an empty file is right if it has the hash of nothing."""
    empty(path.rename(path.with_name(f"{path.name[:14]}{EMPTY}.pt")))


def replace_by_empty_folder(path):
    path.unlink()
    path.with_name(f"{path.name[:14]}{EMPTY}.dcp").mkdir()


@pytest.mark.parametrize("damage", [cut, change, empty, empty_and_rename, replace_by_empty_folder])
def test_a_damaged_checkpoint_is_reported_and_skipped(tmp_path, damage):
    messages = []
    save(tmp_path, 1, keep=2)
    damage(save(tmp_path, 2, keep=2))
    assert newest(tmp_path, messages) == 1
    assert len(messages) == 1
    assert messages[0].startswith("step-00000002")
    assert messages[0].endswith("; it is not used")
    damage(checkpoint.list_checkpoints(tmp_path)[1])
    assert newest(tmp_path, messages) is None


def test_a_failed_write_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1, keep=1)

    def full(value, file):
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space left"):
        save(tmp_path, 2, keep=1)
    assert newest(tmp_path) == 1
    monkeypatch.undo()
    save(tmp_path, 2, keep=1)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("late", [False, True], ids=["before it began", "while it wrote"])
def test_a_process_that_lost_its_folder_leaves_the_new_owners_checkpoints(tmp_path, late):
    """Also a half-written one; its own may be gone by then."""
    save(tmp_path, 1, keep=1)
    half, checks = tmp_path / ".partial.elsewhere-1", []

    def check():
        checks.append(late)
        if len(checks) == 1 + late:
            for own in tmp_path.glob(".partial.*"):
                own.unlink()
            half.write_text("half of it")
            raise Locked("sent no heartbeat")

    with pytest.raises(Locked):
        checkpoint.save(tmp_path, 2, {"seconds": 0.5}, {"x": torch.zeros(1000)}, 1, check)
    assert half.read_text() == "half of it"
    assert newest(tmp_path) == 1
    save(tmp_path, 3, keep=1)
    assert not half.exists()


def test_only_plain_data_is_loaded(tmp_path):
    """A file from elsewhere, with a name that fits, runs no code."""

    class Runs:
        def __reduce__(self):
            return print, ("ran",)

    save(tmp_path, 1, keep=1, notes={"seconds": Runs()})
    with pytest.raises(InvalidInput, match=r"is not a checkpoint of a run .* delete it to use an older one"):
        newest(tmp_path)

    folder, ran = tmp_path / "folder", tmp_path / "ran"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        state_dict_saver.save({"x": torch.ones(3)}, storage_writer=filesystem.FileSystemWriter(folder))
    (folder / checkpoint.NOTES).write_text("{}")
    assert checkpoint.load(folder, {})[0]["x"].eq(1).all()
    (folder / ".metadata").write_bytes(f"cos\nsystem\n(S'touch {ran}'\ntR.".encode())
    with pytest.raises(InvalidInput, match=r"folder is not a checkpoint of a run \(its index names os.system\)"):
        checkpoint.load(folder, {})
    assert not ran.exists()


def test_a_full_disk_is_named_and_leaves_no_partial_file(tmp_path, monkeypatch):
    """torch's own message names a position in an archive."""
    open_path = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *mode: open_path(Path("/dev/full"), *mode))
    with pytest.raises(OSError, match="No space left on device; a checkpoint could not be written") as full:
        checkpoint.save(tmp_path, 1, {}, {"a": torch.zeros(100_000)}, 2)
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
