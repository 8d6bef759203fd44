"""One training on several real processes: the run of one, and nothing lost to kill -9."""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sweep_toy import wait_for
from tiny import PATIENCE, Tiny, TinyTask, exit_code, killed_after, rows, start_training, wait_for_checkpoint
from torch.distributed import TCPStore

from mvngrad_lab.tasks.language.data.tokens import Manifest, Part
from mvngrad_lab.tasks.language.recipe import wikitext103
from mvngrad_lab.tasks.language.task import LanguageTask
from mvngrad_lab.training import checkpoint, parallel as processes, step
from mvngrad_lab.training.parallel import any_rank, broadcast_from_rank0, get_world_size, init_process_group
from mvngrad_lab.training.train import train

MODES = ["ddp", "fsdp"]
RANKS = {"ddp": 3, "fsdp": 2}
"""Two processes add in one order only; DDP's effect on the order shows with three."""
RECIPE = dataclasses.replace(
    wikitext103("mvngrad"),
    text="made",
    model="tiny",
    precision="float32",
    batch_size=6,
    micro_batch_size=1,  # two of them on each of three processes
    steps=8,
    epoch_steps=4,
    warmup_steps=2,
    eval_every=1,
    eval_windows=5,  # which neither two nor three processes can share evenly
)
EXACT = dataclasses.replace(RECIPE, deterministic=True)
HALF = dataclasses.replace(RECIPE, precision="bf16")
OTHER = dataclasses.replace(RECIPE, seed=1, steps=4)
INT8 = dataclasses.replace(RECIPE, state_dtype="int8", steps=4)


class Small(LanguageTask):
    """With 256 tokens for 50,304, which are nearly all of the model and of the time it takes."""

    def __init__(self, *given):
        super().__init__(*given)
        self.shape = dataclasses.replace(self.shape, vocabulary=256)


def write_tokens(folder):
    """Tokens that a model can learn something about: most numbers follow from the one before."""
    generator, parts = torch.Generator().manual_seed(0), {}
    for split, count in (("train", 4000), ("validation", 600)):
        numbers = torch.randint(200, (count,), generator=generator)
        for at in range(1, count):
            if numbers[at] % 3:
                numbers[at] = (numbers[at - 1] * 7 + 1) % 200
        content = numbers.to(torch.int16).numpy().tobytes()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{split}.bin").write_bytes(content)
        parts[split] = Part(count, 1, hashlib.sha256(content).hexdigest())
    Manifest(source="made", tokenizer="none", split="none", files=(), **parts).write(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_tokens(folder / "tokens" / "made")
    return folder


class Group:
    """Processes that train together, with the variables that torchrun would give them."""

    def __init__(self, root, data, mode, *recipes, count=None, **options):
        self.root, self.log = root, root / "log"
        root.mkdir(parents=True, exist_ok=True)
        count = RANKS[mode] if count is None else count
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a port that is free
        shared = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.store.port}
        shared["TORCHELASTIC_USE_AGENT_STORE"] = True  # rank 0 has no store of its own, as under torchrun
        options = {"root": root, "data": data, "parallel": mode, "checkpoint_every": 0, "task": Small, **options}
        self.processes = [
            start_training(
                self.log,
                *(recipes or [RECIPE]),
                variables={name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()},
                **options,
            )
            for rank in range(count)
        ]

    def reached(self, steps, recipe=RECIPE):
        wait_for_checkpoint(self.processes[0].is_alive, self.log, self.root / recipe.key / "checkpoints", steps)

    def kill(self):
        """With -9 and all at once, so that none sees another die."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in self.processes:
                os.kill(process.pid, number)
        self.end(-signal.SIGKILL)

    def end(self, code=0):
        """Wait for all processes; returns their output."""
        codes, output = {exit_code(process, self.log) for process in self.processes}, self.log.read_text()
        assert codes == {code}, output
        return output


def alone(root, data, recipe=RECIPE, **options):
    """Train or resume in this process."""
    try:
        return train(recipe, root=root, data=data, **{"task": Small, **options})
    finally:
        step.clear_cache()


def read(root, recipe=RECIPE):
    """The result of a run and its rows."""
    return json.loads((root / recipe.key / "result.json").read_text()), rows(root / recipe.key)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A store for each way to train, with runs that nothing interrupted."""
    home = tmp_path_factory.mktemp("whole")
    recipes = {"ddp": (RECIPE, OTHER), "fsdp": (RECIPE, HALF, INT8)}
    groups = [Group(home / mode, data, mode, *recipes[mode], checkpoint_every=1e9) for mode in MODES]
    for recipe in (RECIPE, HALF, INT8):
        alone(home / "one", data, recipe)
    for group in groups:
        group.end()
    return {name: home / name for name in ("one", *MODES)}


def close(a, b):
    """To rounding: what eight steps make of sums in another order. Norms are the least exact: torch's of one large
    float32 tensor on a CPU is low by up to a thousandth, and that of a shard by less.
    """
    (result, rows), (other, others) = a, b
    assert result["validation_loss"] == pytest.approx(other["validation_loss"], rel=1e-5)
    assert result["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)
    for row, other_row in zip(rows, others, strict=True):
        assert row["losses"] == pytest.approx(other_row["losses"], rel=1e-5)
        assert row["norms"] == pytest.approx(other_row["norms"], rel=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_several_processes_train_like_one(whole, tmp_path, mode):
    close(read(whole[mode]), read(whole["one"]))
    environment = json.loads((whole[mode] / RECIPE.key / "environment.json").read_text())
    assert (environment["parallel"], environment["ranks"]) == (mode, RANKS[mode])
    (path,) = (whole[mode] / RECIPE.key / "checkpoints").iterdir()
    assert path.suffix == ".dcp"
    weights, one = (checkpoint.load_weights(root / RECIPE.key) for root in (whole[mode], whole["one"]))
    assert weights.keys() == one.keys()
    for name, value in one.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-4)
    shutil.copytree(path, tmp_path / path.name)
    assert checkpoint.find_newest(tmp_path) == tmp_path / path.name
    part, messages = next((tmp_path / path.name).glob("*.distcp")), []
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert checkpoint.find_newest(tmp_path, messages.append) is None, "one bit of one process's part"
    assert path.name in messages[0]


@pytest.mark.parametrize(("mode", "steps"), [("ddp", 1), ("fsdp", 5)])
def test_a_killed_run_resumes_to_the_same_weights(whole, data, tmp_path, mode, steps):
    group = Group(tmp_path, data, mode, hold=steps)
    group.reached(steps)
    group.kill()
    assert "resumes after step" in Group(tmp_path, data, mode).end()
    (result, rows), (unharmed, others) = read(tmp_path), read(whole[mode])
    assert result["weights"] == unharmed["weights"]
    assert rows == others


def test_a_checkpoint_of_two_processes_is_resumed_by_one_or_three(whole, data, tmp_path):
    """By three in the other mode."""
    group = Group(tmp_path / "one", data, "fsdp", hold=2)
    group.reached(2)
    group.kill()
    shutil.copytree(tmp_path / "one", tmp_path / "three")
    alone(tmp_path / "one", data)
    assert "resumes after step" in Group(tmp_path / "three", data, "ddp").end()
    for name in ("one", "three"):
        close(read(tmp_path / name), read(whole["one"]))


def test_a_checkpoint_of_one_process_is_resumed_by_two(whole, data, tmp_path):
    with killed_after(3):
        alone(tmp_path, data, checkpoint_every=0)
    assert "resumes after step 3 of 8" in Group(tmp_path, data, "fsdp").end()
    close(read(tmp_path), read(whole["one"]))


def test_sharded_int8_state_resumes_exactly_and_on_one_process_to_rounding(whole, data, tmp_path):
    group = Group(tmp_path / "two", data, "fsdp", INT8, hold=2)
    group.reached(2, INT8)
    group.kill()
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    assert "resumes after step" in Group(tmp_path / "two", data, "fsdp", INT8).end()
    (result, rows), (unharmed, others) = read(tmp_path / "two", INT8), read(whole["fsdp"], INT8)
    assert (result["weights"], rows) == (unharmed["weights"], others)
    alone(tmp_path / "one", data, INT8)
    one, (plain, _) = read(tmp_path / "one", INT8)[0], read(whole["one"], INT8)
    for other in (one, plain):
        assert other["validation_loss"] == pytest.approx(unharmed["validation_loss"], rel=0.02)


def test_int8_state_of_one_process_is_sharded_to_rounding(whole, data, tmp_path):
    with killed_after(1):
        alone(tmp_path, data, INT8, checkpoint_every=0)
    assert "resumes after step 1 of 4" in Group(tmp_path, data, "fsdp", INT8).end()
    expected = read(whole["one"], INT8)[0]["validation_loss"]
    assert read(tmp_path, INT8)[0]["validation_loss"] == pytest.approx(expected, rel=0.02)


def test_a_sharded_model_in_bfloat16_agrees_to_rounding(whole):
    """Under fsdp embeddings and norms are in bfloat16 too, which autocast leaves in float32."""
    (result, table), (other, others) = read(whole["one"], HALF), read(whole["fsdp"], HALF)
    assert other["validation_loss"] == pytest.approx(result["validation_loss"], rel=1e-3)
    for row, other_row in zip(table, others, strict=True):
        assert other_row["losses"] == pytest.approx(row["losses"], rel=2e-3)
        assert other_row["norms"] == pytest.approx(row["norms"], rel=2e-2)
    exact, _ = read(whole["fsdp"])
    assert other["validation_loss"] != pytest.approx(exact["validation_loss"], rel=1e-5)


def test_processes_can_train_one_run_after_another(whole):
    assert read(whole["ddp"], OTHER)[0]["steps"] == 4


def test_a_device_that_is_too_small_names_the_micro_batch(data, tmp_path):
    class Large(LanguageTask):
        def make_batch(self, row):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError, match="make micro_batch_size=6 smaller"):
        alone(tmp_path, data, dataclasses.replace(RECIPE, micro_batch_size=6), task=Large)


@pytest.mark.gpu
def test_on_a_gpu_a_killed_run_ends_with_the_same_weights(data, tmp_path):
    """One process; captured and uncaptured steps give the same weights too."""
    options = {"data": data, "device": "cuda", "task": LanguageTask}
    process = start_training(tmp_path / "log", EXACT, hold=3, root=tmp_path / "killed", checkpoint_every=0, **options)
    wait_for_checkpoint(process.is_alive, tmp_path / "log", tmp_path / "killed" / EXACT.key / "checkpoints", 3)
    process.kill()
    exit_code(process, tmp_path / "log")
    weights = {
        alone(tmp_path / name, recipe=EXACT, capture=capture, **options).result["weights"]
        for name, capture in {"captured": True, "plain": False, "killed": True}.items()
    }
    assert len(weights) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_a_group_of_one_process_trains_the_same(data, tmp_path, mode):
    """The part of NCCL that one GPU can test."""
    Group(tmp_path / mode, data, mode, EXACT, count=1, device="cuda", task=LanguageTask).end()
    alone(tmp_path / "one", data, EXACT, device="cuda", task=LanguageTask)
    close(read(tmp_path / mode, EXACT), read(tmp_path / "one", EXACT))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_compiled_on_a_gpu_a_group_of_one_process_trains_the_same(data, tmp_path, mode):
    """With the kernels that only a compiled model has."""
    Group(tmp_path / mode, data, mode, RECIPE, count=1, device="cuda", task=LanguageTask, compile=True).end()
    alone(tmp_path / "one", data, RECIPE, device="cuda", task=LanguageTask)
    for name in ("validation_loss", "train_loss"):
        parallel, expected = (read(tmp_path / root)[0][name] for root in (mode, "one"))
        assert parallel == pytest.approx(expected, rel=1e-3)


def list_ranks(torchrun):
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    return [int(child) for child in children if b"mvngrad_lab" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.slow
def test_a_signal_to_torchrun_stops_all_processes_at_one_step(data, tmp_path):
    pytest.importorskip("tyro")
    recipe = dataclasses.replace(RECIPE, batch_size=2, eval_every=RECIPE.steps)  # evaluating takes the longest
    options = {name: value for name, value in recipe.settings.items() if value}
    options |= {"device": "cpu", "data": data, "runs": tmp_path, "parallel": "fsdp", "checkpoint_every": 0}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "mvngrad_lab", "train", "wikitext103"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    log, at = tmp_path / "log", tmp_path / recipe.key / "checkpoints"

    def launch():
        with log.open("w") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})

    process = launch()
    wait_for_checkpoint(lambda: process.poll() is None, log, at, 1)
    ranks = list_ranks(process)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)  # it passes the signal on, after a while, and they must not end before
    wait_for(lambda: log.read_text().count("closing signal SIGTERM") == 2)
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    assert process.wait(PATIENCE) != 0
    step = int(checkpoint.find_newest(at).name[5:13])
    assert f"stopped by SIGTERM after step {step};" in log.read_text()
    assert launch().wait(PATIENCE) == 0, log.read_text()
    assert f"resumes after step {step} of 8" in log.read_text()
    assert read(tmp_path, recipe)[0]["status"] == "finished"
    assert json.loads((tmp_path / recipe.key / "environment.json").read_text())["parallel"] == "fsdp"


def test_missing_torchrun_or_parallel_is_named(data, tmp_path, monkeypatch, capsys):
    pytest.importorskip("tyro")
    from mvngrad_lab import cli

    with pytest.raises(RuntimeError, match=r"parallel='ddp' needs a process group: torchrun"):
        train(RECIPE, root=tmp_path, data=data, parallel="ddp")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", "wikitext103", "--runs", str(tmp_path)]) == 2
    assert "2 processes would each train the whole; add --parallel ddp" in capsys.readouterr().err


def test_unequal_shares_of_a_batch_are_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "init_process_group", lambda mode, device: device)
    monkeypatch.setattr(processes, "get_world_size", lambda: 2)
    recipe = dataclasses.replace(RECIPE, batch_size=6, micro_batch_size=2)
    with pytest.raises(ValueError, match="batch_size=6 on 2 processes does not make whole micro-batches"):
        train(recipe, root=tmp_path, data=data, parallel="ddp")


def test_a_task_without_parallel_support_is_refused():
    with pytest.raises(ValueError, match="parallel='ddp' is for language models; TinyTask has one process"):
        step.DeviceTask(TinyTask(Tiny(), None, torch.device("cpu")), mode="ddp")


def test_collectives_work_without_a_group():
    device = init_process_group(None, torch.device("cpu"))
    assert (device.type, get_world_size(), broadcast_from_rank0("x")) == ("cpu", 1, "x")
    assert any_rank(True, False) == (True, False)
