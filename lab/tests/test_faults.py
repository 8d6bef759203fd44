"""Kills, freezes and damaged files at random: nothing is lost, doubled, or wrong in silence.

`MVNGRAD_FAULTS=10 pytest lab/tests/test_faults.py -s` repeats each part ten times, with other seeds, and prints counts.
"""

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress

import optuna
import pytest
from optuna.exceptions import OptunaError
from postgres import server  # noqa: F401
from sqlalchemy.exc import DBAPIError
from sweep_toy import Bench, crowd, kill, read_output, small, wait_for
from tiny import Tiny, TinyTask, exit_code, killed_after, rows, start_training

from mvngrad_lab import store
from mvngrad_lab.store.lock import Locked
from mvngrad_lab.sweep.queue import Queue
from mvngrad_lab.sweep.records import latest_by_key
from mvngrad_lab.sweep.summary import make_rows
from mvngrad_lab.training.train import train

SEEDS = range(int(os.environ.get("MVNGRAD_FAULTS", "1")))
LONG = Tiny(epochs=8, deterministic=True)


def damage(path, how, generator):
    content = bytearray(path.read_bytes())
    if how == "empty":
        content = b""
    elif how == "truncate":
        content = content[: generator.randrange(len(content))]
    elif how == "flip":
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    elif how == "digit":
        place = generator.choice([at for at, byte in enumerate(content) if chr(byte).isdecimal()])
        content[place] = ord(generator.choice("0123456789".replace(chr(content[place]), "")))
    else:
        start = generator.randrange(len(content))
        count = min(64, len(content) - start)
        content[start : start + count] = generator.randbytes(count)
    path.write_bytes(content)


def has_lock(folder, process):
    with suppress(FileNotFoundError):
        return json.loads((folder / "lock").read_text())["pid"] == process.pid
    return False


@pytest.mark.parametrize("seed", SEEDS)
def test_a_training_killed_and_frozen_at_random_moments_ends_with_the_same_weights(tmp_path, seed):
    generator, log, faults = random.Random(seed), tmp_path / "log", Counter()
    options = {"root": tmp_path / "runs", "task": TinyTask, "checkpoint_every": 0}
    folder = tmp_path / "runs" / LONG.key
    while not (folder / "result.json").exists() and faults["kill"] < 6:
        process = start_training(log, LONG, **options)
        wait_for(lambda process=process: has_lock(folder, process) or not process.is_alive())
        time.sleep(generator.uniform(0, 0.4))
        if faults["freeze"] < 2 and process.is_alive():
            os.kill(process.pid, signal.SIGSTOP)
            if has_lock(folder, process) and not (folder / "result.json").exists():
                with pytest.raises(Locked):
                    train(LONG, **options)
                faults["freeze"] += 1
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(generator.uniform(0, 0.1))
        process.kill()
        faults["kill"] += exit_code(process, log) == -signal.SIGKILL
    ended = train(LONG, **options, on_event=id)
    whole = train(LONG, **{**options, "root": tmp_path / "whole"}, on_event=id)
    print(f"training, seed {seed}: {dict(faults)}")
    assert ended.result["weights"] == whole.result["weights"]
    assert rows(folder) == rows(tmp_path / "whole" / LONG.key)


@pytest.fixture
def bench(request, tmp_path):
    url = request.getfixturevalue("server").url if request.param == "postgresql" else None
    bench = Bench(tmp_path, url)
    yield bench
    optuna.delete_study(study_name=bench.name, storage=bench.queue.storage)  # other tests use the server too
    bench.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bench", "seed"), [(("sqlite", "postgresql")[seed % 2], seed) for seed in SEEDS], indirect=["bench"]
)
def test_workers_killed_and_frozen_at_random_moments_finish_every_run_once(bench, seed):
    """One seed on SQLite; with MVNGRAD_FAULTS=2 or more, every second one on PostgreSQL."""
    generator, faults = random.Random(seed), Counter()
    bench.init(crowd(), "sweep_toy:crowd", heartbeat=1, grace=3)
    workers = [bench.start_worker() for _ in range(3)]
    wait_for(lambda: any(bench.root.glob("*/log")))
    for _ in range(6):
        time.sleep(generator.uniform(0, 0.5))
        victim = generator.randrange(3)
        if workers[victim].poll() is None and generator.random() < 0.5:
            kill(workers[victim], signal.SIGSTOP)
            time.sleep(generator.uniform(0, 5))  # sometimes longer than the grace
            kill(workers[victim], signal.SIGCONT)
            faults["freeze"] += 1
        elif workers[victim].poll() is None:
            kill(workers[victim])
            faults["kill"] += 1
            read_output(workers[victim])
            workers[victim] = bench.start_worker()
    output = [read_output(process) for process in [*workers, bench.start_worker()]]
    records = bench.queue.records()
    expected = {recipe.key for recipe in crowd().stages[0]}
    print(f"sweep, {bench.address.url.drivername}, seed {seed}: {dict(faults)}")
    assert Counter(r.key for r in records if r.status == "finished") == Counter(expected), output
    assert {r.status for r in latest_by_key(records).values()} == {"finished"}
    assert {run.key for run in store.load_runs(bench.root, on_problem=pytest.fail)} == expected


@pytest.mark.parametrize("how", ["truncate", "garble", "empty"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_file_of_a_run_changes_no_result_in_silence(tmp_path, how, seed):
    """Of a run that is interrupted, and of one that has finished."""
    generator, counts = random.Random(f"{seed} {how}"), Counter()
    options = {"task": TinyTask, "on_event": id}
    recipe = Tiny()
    whole = train(recipe, root=tmp_path / "whole", **options)
    with killed_after(15):
        train(recipe, root=tmp_path / "part", checkpoint_every=0, **options)
    for state in ("part", "whole"):
        source = tmp_path / state / recipe.key
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            root = tmp_path / "damaged"
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(source, root / recipe.key)
            damage(root / recipe.key / path.relative_to(source), how, generator)
            said = []
            stored = store.load_runs(root, on_problem=said.append)
            assert [run.result for run in stored] == [whole.result] if stored else True, path
            try:
                done = train(recipe, root=root, task=TinyTask, on_event=said.append)
                table = rows(root / recipe.key)
            except (ValueError, OSError, RuntimeError):  # with a message; a KeyError or TypeError would be a bug
                counts["refused"] += 1
                continue
            assert done.result["weights"] == whole.result["weights"], path
            if path.name == "metrics.jsonl" and state == "whole":
                counts["not read"] += 1  # the result has what it needs of it
            elif table != rows(tmp_path / "whole" / recipe.key):
                assert done.result.get("missing_rows"), path
                counts["said in the result"] += 1
            else:
                counts["same result"] += 1
    print(f"files of a run, {how}, seed {seed}: {dict(counts)}")


@pytest.mark.parametrize("how", ["truncate", "garble", "empty"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_bundle_or_sweep_store_changes_no_result_in_silence(tmp_path, how, seed):
    generator, counts, said = random.Random(f"{seed} {how}"), Counter(), []
    bench = Bench(tmp_path)
    bench.init(small())
    bench.work()
    before, runs = make_rows(bench.queue), store.load_runs(bench.root)
    bench.close()
    bundle = tmp_path / "kept" / store.BUNDLE
    store.write_bundle(bundle, runs)
    damage(bundle, how, generator)
    kept = store.load_runs(bundle.parent, on_problem=said.append)
    assert all(run in runs for run in kept)
    assert said or kept == runs or how != "garble"
    counts["line left out" if said else "lines missing or whole"] += 1
    damage(bench.address.file, how, generator)
    try:
        queue = Queue(bench.address, bench.name)
        counts["same result" if make_rows(queue) == before else "WRONG"] += 1
        queue.close()
    except (ValueError, OSError, RuntimeError, OptunaError, DBAPIError):
        counts["refused"] += 1
    print(f"bundle and store, {how}, seed {seed}: {dict(counts)}")
    assert not counts["WRONG"]
