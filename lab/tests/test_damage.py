"""Files damaged at random, as their readers meet them: refused or reported by name, or without effect; never a number
that differs in silence, or a traceback.

`MVNGRAD_FAULTS=10 pytest lab/tests/test_damage.py -s` repeats each part ten times, with other seeds, and prints counts.
"""

import dataclasses
import json
import os
import random
import shutil
from collections import Counter

import pytest
import samples
import torch
from sweep_toy import Bench, small
from test_faults import SEEDS, damage
from test_parallel import RECIPE, Group, Small, alone, write_tokens

from mvngrad.diagnostics import JSONLines, read_records
from mvngrad_lab import cli, report
from mvngrad_lab.experiments.sweeps.records import load_exports
from mvngrad_lab.sweep.summary import export
from mvngrad_lab.training import checkpoint

HOWS = ("truncate", "garble", "empty", "flip")
"""What can happen to any file."""


def change_json(content, generator):
    """Replace a value at a random place in a JSON object by one of another type, or remove it."""
    whole, places = json.loads(content), []

    def add_places(value):
        for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
            places.append((value, key))
            if isinstance(part, dict | list):
                add_places(part)

    add_places(whole)
    parent, key = generator.choice(places)
    new = generator.choice([None, "x", 7, -1.5, True, 10**400, float("inf"), [], {}, [1], {"a": 1}, "remove"])
    if new == "remove":
        del parent[key]
    else:
        parent[key] = new
    return json.dumps(whole)


def get_refusal(read, *arguments):
    """The message of the user's error that reading raises; None if it raises none."""
    try:
        read(*arguments)
    except ValueError as error:
        return str(error)
    return None


def show(what, how, seed, counts):
    print(f"{what}, {how}, seed {seed}: {dict(counts)}")


@pytest.mark.parametrize("how", [*HOWS, "swap", "json"])
@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_tokens_are_refused_with_the_remedy(tmp_path, how, seed):
    """Also if the size of the file and its modification time stay the same."""
    generator, counts = random.Random(f"tokens {seed} {how}"), Counter()
    source = tmp_path / "source" / "tokens" / "made"
    write_tokens(source)

    def load(data):
        task = Small(RECIPE, data, torch.device("cpu"))
        parts = [task.train, task.validation["validation"]]
        return task.source, [part.manifest for part in parts], [part.data.tolist() for part in parts]

    whole = load(tmp_path / "source")
    for name in ("manifest.json", "train.bin", "validation.bin", "train.verified"):
        path = shutil.copytree(source, tmp_path / "damaged" / "tokens" / "made", dirs_exist_ok=True) / name
        load(tmp_path / "damaged")
        before = path.stat()
        if how == "swap":
            path.write_bytes((source / ("train.bin" if name != "train.bin" else "validation.bin")).read_bytes())
        elif how != "json":
            damage(path, how, generator)
        elif name == "manifest.json":
            path.write_text(change_json(path.read_text(), generator))
        if generator.random() < 0.5:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        if (message := get_refusal(load, tmp_path / "damaged")) is None:
            assert load(tmp_path / "damaged") == whole, path
        else:
            assert str(path) in message
            assert message.endswith("Delete its folder and prepare the text again")
        counts["refused" if message else "unharmed"] += 1
    show("tokens", how, seed, counts)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A run that two processes left after its second step, and the weights that it has if only the first one counts."""
    home = tmp_path_factory.mktemp("sharded")
    write_tokens(home / "tokens" / "made")
    group = Group(home / "runs", home, "fsdp", hold=2)
    group.reached(2)
    group.kill()
    newest, _ = checkpoint.list_checkpoints(home / "runs" / RECIPE.key / "checkpoints")
    shutil.copytree(home / "runs", home / "first")
    shutil.rmtree(home / "first" / newest.relative_to(home / "runs"))
    return home, newest, alone(home / "first", home, on_event=id).result["weights"]


@pytest.mark.parametrize("how", [*HOWS, "missing", "foreign"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_sharded_checkpoint_is_named_and_the_one_before_is_used(tmp_path, sharded, how, seed):
    generator, counts = random.Random(f"shards {seed} {how}"), Counter()
    home, newest, weights = sharded
    names = sorted(path.name for path in newest.iterdir())
    resumed = generator.choice(names)
    for name in names:
        root, said = tmp_path / name, []
        copy = shutil.copytree(home / "runs", root) / newest.relative_to(home / "runs")
        if how == "missing":
            (copy / name).unlink()
        elif how == "foreign":
            shutil.copy(newest / generator.choice([other for other in names if other != name]), copy / name)
        else:
            damage(copy / name, how, generator)
        assert checkpoint.find_newest(copy.parent, said.append).name.startswith("step-00000001")
        assert said == [f"{newest.name} is damaged, its content is not what was written; it is not used"]
        counts["reported"] += 1
        if name == resumed:
            assert alone(root, home, on_event=id).result["weights"] == weights
            counts["resumed from the one before"] += 1
            copy = shutil.copytree(newest, tmp_path / "again", ignore=shutil.ignore_patterns(name))
        if message := get_refusal(checkpoint.load, copy, {}):  # as if it was damaged after that check
            assert message.startswith(f"{copy} is not a checkpoint of a run (")
            assert message.endswith("); delete it to use an older one")
        counts["refused" if message else "read", "without that check"] += 1
    show("shards", how, seed, counts)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """What `mvngrad sweep export` writes."""
    bench = Bench(tmp_path_factory.mktemp("sweep"))
    bench.init(small())
    bench.work()
    path = bench.root / "sweep-toy.json"
    export(bench.queue, path)
    bench.close()
    return path.read_text()


@pytest.mark.parametrize("how", [*HOWS, "digit", "json"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_export_of_a_sweep_is_left_out_by_name(tmp_path, exported, how, seed):
    generator, counts = random.Random(f"export {seed} {how}"), Counter()
    path = tmp_path / "sweep-toy.json"
    path.write_text(exported)
    (whole,) = load_exports(tmp_path, warn=pytest.fail)
    for _ in range(1 if how == "empty" else 8):
        said = []
        path.write_text(change_json(exported, generator) if how == "json" else exported)
        if how != "json":
            damage(path, how, generator)
        for read in load_exports(tmp_path, warn=said.append):
            assert dataclasses.replace(read, key=whole.key) == whole
            counts["unharmed"] += 1
        for message in said:
            assert message.startswith(f"{path} is left out, because it is no export of a sweep: ")
            assert message.endswith("; export the sweep again")
            counts["reported"] += 1
    show("export", how, seed, counts)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_export_of_any_shape_is_left_out_or_drawn(tmp_path, seed):
    """Of an early version, without a checksum: its values cannot be verified."""
    generator, counts, text = random.Random(f"shape {seed}"), Counter(), json.dumps(samples.sweep())
    for _ in range(4):
        said = []
        (tmp_path / "sweep-mnist.json").write_text(change_json(text, generator))
        report.build(tmp_path, out=tmp_path / "report.html", warn=said.append)
        counts["reported" if said else "drawn"] += 1
    show("export", "shape", seed, counts)


@pytest.fixture
def record(tmp_path):
    """A Monitor's file."""
    sink = JSONLines(tmp_path / "monitor.jsonl")
    for each in samples.records():
        sink(each)
    sink.close()
    return sink.path


@pytest.mark.parametrize("how", [*HOWS, "digit", "line", "json"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_record_of_a_monitor_is_reported_by_line(record, how, seed):
    generator, counts = random.Random(f"monitor {seed} {how}"), Counter()
    text, whole = record.read_text(), read_records(record)
    for _ in range(1 if how == "empty" else 8):
        said, lines = [], text.splitlines(keepends=True)
        number = generator.randrange(len(lines))
        if how == "line":
            lines[number] = lines[number][: generator.randrange(1, len(lines[number]) - 1)] + "\n"
        elif how == "json":
            lines[number] = change_json(lines[number], generator) + "\n"
        record.write_text("".join(lines))
        if how not in ("line", "json"):
            damage(record, how, generator)
        if message := get_refusal(read_records, record, id):
            assert message.startswith(str(record))
            assert message.endswith("name a file that a Monitor wrote")
            counts["refused"] += 1
            continue
        read = read_records(record, said.append)
        read = [{name: each[name] for name in whole[0]} for each in read]  # the checksum's own name may be damaged
        assert all(each in whole for each in read)
        if said:
            assert said[0].startswith(f"{record} has lines that are incomplete or damaged; they are left out: ")
            counts["reported"] += 1
        elif read == whole:
            counts["unharmed"] += 1
        else:
            assert how == "truncate"
            assert record.read_text()[-1:] in ("\n", "}")
            counts["cut between lines"] += 1
    show("monitor", how, seed, counts)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_record_of_any_shape_is_refused_or_drawn(tmp_path, capsys, seed):
    """Of an early version, without a checksum: its values cannot be verified."""
    generator, counts, path = random.Random(f"shape {seed}"), Counter(), tmp_path / "monitor.jsonl"
    for _ in range(8):
        lines = [json.dumps(each) for each in samples.records()]
        number = generator.randrange(len(lines))
        lines[number] = change_json(lines[number], generator)
        path.write_text("\n".join(lines))
        code = cli.main(["diagnose", str(path)])
        assert code == 0 or f"{path}, line {number + 1} is not a Monitor's record" in capsys.readouterr().err
        counts["refused" if code else "drawn"] += 1
    show("monitor", "shape", seed, counts)
