"""One training on several real processes, started by torchrun: the run of one, and nothing lost to kill -9."""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import Tiny, TinyTask

from mvngrad.lab import checkpoint, metrics, parallel as processes, step
from mvngrad.lab.data.tokens import Manifest, Part
from mvngrad.lab.lock import began
from mvngrad.lab.parallel import agreed, joined, ranks, told
from mvngrad.lab.recipes.language import wikitext103
from mvngrad.lab.tasks.language import LanguageTask
from mvngrad.lab.train import train

MODES = ["ddp", "fsdp"]
RANKS = {"ddp": 3, "fsdp": 2}
"""With two there is one order in which to add; what DDP does to it, only more can show."""
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
OPTIONS = {name: value for name, value in RECIPE.settings.items() if value is not None}


def write_tokens(folder):
    """Tokens that a model can learn something about: each number follows from the one before, or is anew."""
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


def started(root, data, mode, every=0.0, **changed):
    """`torchrun -m mvngrad train` on several processes."""
    given = {**OPTIONS, **changed}
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value)) if value]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS[mode])]
    command += ["-m", "mvngrad", "train", "wikitext103", *options, "--device", "cpu", "--data", str(data)]
    command += ["--runs", str(root), "--parallel", mode, "--checkpoint-every", str(every)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
    )


def kill(process):
    """With -9 and all at once: torchrun, and its processes, which are in sessions of their own and would go on."""
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for number in (process.pid, *map(int, workers)):
        os.kill(number, signal.SIGKILL)
    process.communicate()
    for number in map(int, workers):
        while began(number) is not None:  # they have memory to give back, and nobody here waits for them
            time.sleep(0.01)


def finished(process, code=0):
    output, _ = process.communicate(timeout=180)
    assert process.returncode == code, output
    return output


def reached(process, root, steps, recipe=RECIPE):
    """Wait until a run has written a checkpoint of so many steps."""
    for _ in range(9000):
        found = checkpoint.found(root / recipe.key / "checkpoints")
        if found and int(found[0].name[5:13]) >= steps:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    raise AssertionError(f"no checkpoint of step {steps} in 90 s")


def alone(root, data, recipe=RECIPE, **options):
    """Train, or go on, in this process."""
    try:
        return train(recipe, root=root, data=data, on_event=lambda event: None, **options)
    finally:
        step.forget()


def read(root, recipe=RECIPE):
    """The result of a run and its rows without clocks."""
    folder = root / recipe.key
    rows = [
        {name: value for name, value in row.items() if name != "seconds"}
        for row in metrics.rows(folder / "metrics.jsonl")
    ]
    return json.loads((folder / "result.json").read_text()), rows


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A store for each way to train, with a run that nothing interrupted; made by one of the processes that test."""
    base = tmp_path_factory.getbasetemp()
    home = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "whole"
    try:
        home.mkdir()
    except FileExistsError:
        for _ in range(18000):
            if (home / "done").exists():
                break
            time.sleep(0.01)
        assert (home / "done").exists(), "the process that makes them failed"
    else:
        alone(home / "one", data)
        for mode in MODES:
            finished(started(home / mode, data, mode, every=1e9))
        (home / "done").touch()
    return {name: home / name for name in ("one", *MODES)}


def close(a, b):
    """To rounding: what eight steps make of sums in another order. Norms are the least exact: torch's of one large
    float32 tensor on a CPU is low by up to a thousandth, and that of a shard by less.
    """
    (result, rows), (other, others) = a, b
    assert result["validation_loss"] == pytest.approx(other["validation_loss"], rel=1e-5)
    assert result["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)
    for row, beside in zip(rows, others, strict=True):
        assert row["losses"] == pytest.approx(beside["losses"], rel=1e-5)
        assert row["norms"] == pytest.approx(beside["norms"], rel=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_several_processes_train_what_one_does(whole, tmp_path, mode):
    close(read(whole[mode]), read(whole["one"]))
    environment = json.loads((whole[mode] / RECIPE.key / "environment.json").read_text())
    assert (environment["parallel"], environment["ranks"]) == (mode, RANKS[mode])
    (kept,) = (whole[mode] / RECIPE.key / "checkpoints").iterdir()
    assert kept.suffix == ".dcp"
    shutil.copytree(kept, tmp_path / kept.name)
    assert checkpoint.newest(tmp_path) == tmp_path / kept.name
    part, told = next((tmp_path / kept.name).glob("*.distcp")), []
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert checkpoint.newest(tmp_path, told.append) is None, "one bit of one process's part"
    assert kept.name in told[0]


@pytest.mark.parametrize(("mode", "steps"), [("ddp", 1), ("fsdp", 5)])
def test_killed_with_all_its_processes_a_run_ends_in_the_same_weights(whole, data, tmp_path, mode, steps):
    process = started(tmp_path, data, mode)
    reached(process, tmp_path, steps)
    kill(process)
    assert "goes on after step" in finished(started(tmp_path, data, mode))
    (result, rows), (unharmed, others) = read(tmp_path), read(whole[mode])
    assert result["weights"] == unharmed["weights"]
    assert rows == others


def test_a_checkpoint_of_two_processes_is_gone_on_with_by_one_or_three(whole, data, tmp_path):
    """By three in the other mode."""
    process = started(tmp_path / "one", data, "fsdp")
    reached(process, tmp_path / "one", 2)
    kill(process)
    shutil.copytree(tmp_path / "one", tmp_path / "three")
    alone(tmp_path / "one", data)
    assert "goes on after step" in finished(started(tmp_path / "three", data, "ddp"))
    for name in ("one", "three"):
        close(read(tmp_path / name), read(whole["one"]))


def test_a_checkpoint_of_one_process_is_gone_on_with_by_two(whole, data, tmp_path):
    def stop(epoch, stepper):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        alone(tmp_path, data, checkpoint_every=0, observe=stop)
    assert "goes on after step 3 of 8" in finished(started(tmp_path, data, "fsdp"))
    close(read(tmp_path), read(whole["one"]))


def test_in_bfloat16_a_sharded_model_is_the_same_to_that_rounding(data, tmp_path):
    """Under fsdp embeddings and norms are in bfloat16 too, which autocast leaves in float32."""
    recipe = dataclasses.replace(RECIPE, precision="bf16")
    alone(tmp_path / "one", data, recipe)
    finished(started(tmp_path / "fsdp", data, "fsdp", every=1e9, precision="bf16"))
    (result, rows), (other, others) = read(tmp_path / "one", recipe), read(tmp_path / "fsdp", recipe)
    assert other["validation_loss"] == pytest.approx(result["validation_loss"], rel=1e-3)
    for row, beside in zip(rows, others, strict=True):
        assert beside["losses"] == pytest.approx(row["losses"], rel=2e-3)
        assert beside["norms"] == pytest.approx(row["norms"], rel=2e-2)


TWICE = """
import sys
from pathlib import Path
from test_parallel import RECIPE, dataclasses, train
root, data, mode = sys.argv[1:]
for seed in (0, 1):
    train(dataclasses.replace(RECIPE, seed=seed, steps=4), root=Path(root), data=Path(data), parallel=mode)
"""


def test_one_job_of_torchrun_may_train_twice(data, tmp_path):
    finished(launched(TWICE, tmp_path, tmp_path / "runs", data, "ddp", count=2))
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 2


def test_a_device_that_is_too_small_names_the_micro_batch(data, tmp_path):
    class Large(LanguageTask):
        def batch(self, row):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError, match="make micro_batch_size=6 smaller"):
        alone(tmp_path, data, dataclasses.replace(RECIPE, micro_batch_size=6), task=Large)


ON_GPU = """
import sys
from pathlib import Path
from test_parallel import EXACT, train
root, data, *mode = sys.argv[1:]
train(EXACT, root=Path(root), data=Path(data), device="cuda", checkpoint_every=0, parallel=mode[0] if mode else None)
"""


def launched(text, home, root, data, *mode, count=1):
    """A process of its own, or with a mode what torchrun makes of it; the way to the packages stays as it is."""
    script = home / "script.py"
    script.write_text(text)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)] if mode else []
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *launch, str(script), str(root), str(data), *mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


@pytest.mark.gpu
def test_on_a_gpu_a_killed_run_ends_in_the_same_weights_too(data, tmp_path):
    """One process; and the captured step is the one that is not."""
    process = launched(ON_GPU, tmp_path, tmp_path / "killed", data)
    reached(process, tmp_path / "killed", 3, EXACT)
    process.kill()
    process.communicate()
    found = {}
    for name, capture in {"captured": True, "plain": False, "killed": True}.items():
        options = {"data": data, "device": "cuda", "capture": capture, "on_event": lambda event: None}
        found[name] = train(EXACT, root=tmp_path / name, **options).result["weights"]
        step.forget()
    assert len(set(found.values())) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_a_group_of_one_process_trains_the_same(data, tmp_path, mode):
    """All that can be tried of NCCL on one GPU."""
    finished(launched(ON_GPU, tmp_path, tmp_path / mode, data, mode))
    train(EXACT, root=tmp_path / "one", data=data, device="cuda", on_event=lambda event: None)
    step.forget()
    close(read(tmp_path / mode, EXACT), read(tmp_path / "one", EXACT))


def test_a_signal_to_one_process_stops_all_of_them_at_one_step(data, tmp_path):
    process = started(tmp_path, data, "ddp")
    reached(process, tmp_path, 1)
    process.send_signal(signal.SIGTERM)  # which torchrun passes on, when it likes to
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "stopped by SIGTERM after step" in output
    newest = checkpoint.newest(tmp_path / RECIPE.key / "checkpoints")
    assert newest is not None
    assert f"after step {int(newest.name[5:13])};" in output


def test_without_torchrun_or_without_parallel_it_says_what_is_missing(data, tmp_path, monkeypatch, capsys):
    pytest.importorskip("tyro")
    from mvngrad import cli

    with pytest.raises(RuntimeError, match=r"parallel='ddp' needs processes that know of each other: torchrun"):
        train(RECIPE, root=tmp_path, data=data, parallel="ddp")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", "wikitext103", "--runs", str(tmp_path)]) == 2
    assert "2 processes would each train the whole; add --parallel ddp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "change", "message"),
    [
        ("fsdp", {"state_dtype": "int8"}, "take bf16, or take ddp"),
        ("ddp", {"batch_size": 6, "micro_batch_size": 2}, "batch_size=6 on 2 processes does not make whole"),
    ],
)
def test_what_cannot_be_spread_is_refused(data, tmp_path, monkeypatch, mode, change, message):
    monkeypatch.setattr(processes, "joined", lambda mode, device: device)
    monkeypatch.setattr(processes, "ranks", lambda: 2)
    with pytest.raises(ValueError, match=message):
        train(dataclasses.replace(RECIPE, **change), root=tmp_path, data=data, parallel=mode)


def test_a_task_that_does_not_share_its_batches_has_one_process():
    with pytest.raises(ValueError, match="parallel='ddp' is for language models; TinyTask has one process"):
        step.Bench(TinyTask(Tiny(), None, torch.device("cpu")), mode="ddp")


def test_one_process_has_nobody_to_ask():
    device = joined(None, torch.device("cpu"))
    assert (device.type, ranks(), told("x"), agreed(True, False)) == ("cpu", 1, "x", (True, False))
