"""Checkpoints: whole or not at all, the newest that is undamaged, no more than asked for."""

import pytest
import torch

from mvngrad.lab import checkpoint


def content(step):
    return {"step": step, "seconds": 0.5, "state": {"x": torch.full((1000,), float(step))}}


def test_the_newest_is_read_as_it_was_written(tmp_path):
    assert checkpoint.newest(tmp_path / "none yet") is None
    for step in (9, 10, 200_000_000):
        checkpoint.save(tmp_path, step, content(step), keep=3)
    found = checkpoint.newest(tmp_path)
    assert found["step"] == 200_000_000
    assert torch.equal(found["state"]["x"], content(200_000_000)["state"]["x"])


@pytest.mark.parametrize("keep", [1, 2])
def test_older_ones_go(tmp_path, keep):
    for step in range(4):
        checkpoint.save(tmp_path, step, content(step), keep)
    assert [path.name[:13] for path in checkpoint.found(tmp_path)] == ["step-00000003", "step-00000002"][:keep]
    assert len(list(tmp_path.iterdir())) == keep


def test_saving_a_step_again_keeps_one_before_it(tmp_path):
    for step in (1, 2, 2):
        checkpoint.save(tmp_path, step, content(step), keep=2)
    assert [path.name[:13] for path in checkpoint.found(tmp_path)] == ["step-00000002", "step-00000001"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def change(path):
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1  # one bit of a tensor, which torch.load would not notice
    path.write_bytes(whole)


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, change, empty])
def test_a_damaged_one_gives_way_to_the_one_before_and_says_so(tmp_path, damage):
    told = []
    checkpoint.save(tmp_path, 1, content(1), keep=2)
    damage(checkpoint.save(tmp_path, 2, content(2), keep=2))
    assert checkpoint.newest(tmp_path, told.append)["step"] == 1
    assert len(told) == 1
    assert "step-00000002" in told[0]
    damage(checkpoint.found(tmp_path)[1])
    assert checkpoint.newest(tmp_path, told.append) is None


def test_a_write_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, content(1), keep=1)

    def full(value, file):
        file.write(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(tmp_path, 2, content(2), keep=1)
    assert checkpoint.newest(tmp_path)["step"] == 1
    monkeypatch.undo()
    checkpoint.save(tmp_path, 2, content(2), keep=1)
    assert len(list(tmp_path.iterdir())) == 1


def test_only_plain_data_is_loaded(tmp_path):
    """A file from elsewhere, with a name that fits, runs no code."""
    import pickle

    class Runs:
        def __reduce__(self):
            return print, ("ran",)

    checkpoint.save(tmp_path, 1, {"step": Runs()}, keep=1)
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.newest(tmp_path)
