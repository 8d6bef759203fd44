"""Checkpoints saved by one wrapper and loaded by another, in every state format, by every route, on real processes.

    python -m benchmarks.checkpoint_routes

runs the whole table with gloo on the CPU: models of one process, DDP, FSDP2, HSDP, TP+FSDP2 and ZeRO are trained and
saved, and loaded on 1, 2 and 4 processes. It writes `results/checkpoint-routes.json` and the page
`docs/how-to/checkpoint-routes.md`, and fails if a cell is wrong: loaded with other values, or refused by some ranks
only.
A part of it runs in `tests/test_sharded.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mvngrad
from mvngrad.optim.checkpoint import AS_FLOATS, _make_sharded, unpack_blocks
from mvngrad.optim.formats import load_state
from mvngrad.optim.tensors import get_local, is_sharded

ROOT = Path(__file__).parents[1]
RESULT, PAGE = ROOT / "results/checkpoint-routes.json", ROOT / "docs/how-to/checkpoint-routes.md"
TIMEOUT = 600
"""Seconds that a rank waits for the others, so that a deadlock fails."""

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"state_dtype": torch.bfloat16},
    "int8": {"state_dtype": "int8"},
    "lean": {"lean": True},
    "torch": {},
}
"""The last is torch.optim.AdamW, to see what torch itself can do."""
NARROW = {"bf16": 2**-8, "int8": 1 / 8}
"""The largest relative error of rounding to the nearest."""
SHARDED = ("FSDP2", "HSDP", "TP+FSDP2")
LOADERS = {1: ("one", "FSDP2"), 2: ("DDP", "FSDP2", "ZeRO"), 4: ("DDP", *SHARDED, "ZeRO")}
ROUTES = ("file", "dcp", "flat", "full", "broadcast")


class Cell(NamedTuple):
    saver: str
    saved_format: str
    route: str
    loader: str
    world: int
    format: str
    converted: bool = False


# Models


@cache
def get_mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def make_model() -> nn.Sequential:
    """A model whose shards have several blocks of 256, unequal sizes, and on 4 ranks none of 6 rows."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(80, 12), nn.Tanh(), nn.Linear(12, 6))


def wrap(name: str, model: nn.Sequential) -> nn.Module:
    if name in ("DDP", "ZeRO"):
        return DistributedDataParallel(model)
    mesh = get_mesh(2, 2) if name in ("HSDP", "TP+FSDP2") else None
    if name == "TP+FSDP2":
        parallelize_module(model, mesh["shards"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = mesh["replicas"]
    if name in SHARDED:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    return model


def make(wrapper: str, state_format: str, lr: float) -> tuple[nn.Module, Any]:
    model = wrap(wrapper, make_model())
    cls: Any = torch.optim.AdamW if state_format == "torch" else mvngrad.MVNGradW
    if wrapper == "ZeRO":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(model.parameters(), cls, lr=lr, **FORMATS[state_format])
    return model, cls(model.parameters(), lr=lr, **FORMATS[state_format])


def train(model: nn.Module, optimizer: Any, steps: int, seed: int) -> None:
    """All ranks have the same data, so that the mean of their gradients is that of one process."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(16, 80, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :6]).square().mean().backward()
        optimizer.step()


def gather(value: Any) -> list[Any]:
    """The values of all ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def get_full(value: Any) -> Tensor:
    whole: Tensor = value.full_tensor() if is_sharded(value) else value
    return whole.detach().clone()


def get_params(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): get_full(param) for name, param in model.named_parameters()}


def get_values(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The state that this optimizer steps with, decoded, as whole tensors."""
    optimizer = getattr(optimizer, "optim", optimizer)
    values = {}
    for key, param in model.named_parameters():
        state = {name: get_local(value) for name, value in unpack_blocks(optimizer.state.get(param, {})).items()}
        if state:
            names = [name for name in state if name != "step" and not name.endswith("_scale")]
            loaded: dict[str, Tensor] = load_state(names, state, torch.float32)
            if is_sharded(param):
                loaded = {name: get_full(_make_sharded(value, param)) for name, value in loaded.items()}
            values |= {f"{key.removeprefix('module.')}.{name}": value.clone() for name, value in loaded.items()}
            values[f"{key.removeprefix('module.')}.step"] = state["step"].clone()
    return {name: value for part in gather(values) for name, value in part.items()}  # a rank of ZeRO has a part


# Routes


def save(route: str, model: nn.Module, optimizer: Any, path: Path) -> None:
    first = not dist.is_initialized() or dist.get_rank() == 0
    options = StateDictOptions(flatten_optimizer_state_dict=route == "flat")
    if route == "file":
        if hasattr(optimizer, "consolidate_state_dict"):
            optimizer.consolidate_state_dict(to=0)
        state_dict = optimizer.state_dict() if first else {}
    elif route == "full":
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state_dict = get_optimizer_state_dict(model, optimizer, options=options)
    else:
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=path / route)
        return
    if first:
        torch.save(state_dict, path / f"{route}.pt")


def load(cell: Cell, model: nn.Module, optimizer: Any, path: Path) -> None:
    def convert(state_dict: Any) -> Any:
        if not cell.converted:
            return state_dict
        state_dtype: Any = FORMATS[cell.format].get("state_dtype")
        as_floats = state_dtype == "int8" and cell.loader in SHARDED
        return mvngrad.convert_state_dict(state_dict, AS_FLOATS if as_floats else state_dtype)

    if cell.route == "file":
        optimizer.load_state_dict(convert(torch.load(path / "file.pt")))
    elif cell.route in ("full", "broadcast"):
        broadcast = cell.route == "broadcast"
        reads = not (broadcast and dist.get_rank())
        state_dict = convert(torch.load(path / "full.pt")) if reads else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_optimizer_state_dict(model, optimizer, state_dict, options=options)
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=cell.route == "flat")
        states = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp.load(states, checkpoint_id=path / cell.route)
        set_optimizer_state_dict(model, optimizer, convert(states["optimizer"]), options=options)


def describe(error: BaseException) -> str:
    """The message of an error; of those that torch.distributed.checkpoint gathers from all ranks, the first."""
    failures = getattr(error, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else error
    return f"{type(cause).__name__}: {cause}"


# Cells


def get_routes(saver: str, loader: str) -> Iterable[str]:
    """The routes between two wrappers that torch offers."""
    if "ZeRO" in (saver, loader) or saver not in SHARDED:
        yield "file"
    if "ZeRO" not in (saver, loader):
        yield from ROUTES[1:-1] if loader == "one" else ROUTES[1:]


def list_cells(savers: Iterable[str], loaders: Iterable[str], world: int, formats: Iterable[str]) -> list[Cell]:
    """Every cell with one format, and conversions between all formats of mvngrad for the common wrappers."""
    cells = []
    for saver, loader in product(savers, loaders):
        for route in get_routes(saver, loader):
            if route == "file" and saver in SHARDED:  # torch.save of a shard is for the same rank only
                continue
            cells += [Cell(saver, name, route, loader, world, name) for name in formats]
            if "int8" in formats and route in ("full", "broadcast") and loader in SHARDED and saver not in SHARDED:
                cells.append(Cell(saver, "int8", route, loader, world, "int8", True))
            if {saver, loader} <= {"one", "DDP", "FSDP2"} and (loader, world) != ("FSDP2", 4):
                ours = [name for name in formats if name != "torch"]
                pairs = [pair for pair in product(ours, ours) if pair[0] != pair[1]]
                cells += [Cell(saver, old, route, loader, world, new) for old, new in pairs]
                if route != "flat":  # convert_state_dict does not take it
                    pairs = [pair for pair in pairs if "lean" not in pair]
                    cells += [Cell(saver, old, route, loader, world, new, True) for old, new in pairs]
    return cells


def save_all(folder: Path, savers: Iterable[str], formats: Iterable[str]) -> None:
    for saver, name in product(savers, formats):
        path = folder / saver / name
        path.mkdir(parents=True, exist_ok=True)
        model, optimizer = make(saver, name, 1e-2)
        train(model, optimizer, 4, seed=1)
        for route in ROUTES[:-1]:
            if (route == "file") if saver == "ZeRO" else (route != "file" or saver not in SHARDED):
                save(route, model, optimizer, path)
        expected = {"values": get_values(model, optimizer), "params": get_params(model)}
        train(model, optimizer, 2, seed=2)
        expected["after"] = get_params(model)
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(expected, path / "expected.pt")


def run_cell(cell: Cell, folder: Path) -> tuple[str, str]:
    """The outcome of a cell (exact, rounded, refused, or what is wrong) and the message of a refusal."""
    path = folder / cell.saver / cell.saved_format
    expected = torch.load(path / "expected.pt")
    model, optimizer = make(cell.loader, cell.format, 5e-2)  # another rate, which loading must replace
    options = StateDictOptions(full_state_dict=dist.is_initialized())
    set_model_state_dict(model, expected["params"], options=options)
    error = None
    try:
        load(cell, model, optimizer, path)
    except (Exception, CheckpointException) as caught:  # the latter is a BaseException
        error = describe(caught)
    errors = gather(error)
    if any(errors):
        ranks = [rank for rank, message in enumerate(errors) if message]
        return ("refused" if all(errors) else f"WRONG: only ranks {ranks} refuse"), errors[ranks[0]]
    try:
        return check(cell, model, optimizer, expected), ""
    except Exception as caught:  # of torch's AdamW, which loads whole tensors into shards
        return f"WRONG: {describe(caught)}", ""


def check(cell: Cell, model: nn.Module, optimizer: Any, expected: dict[str, dict[str, Tensor]]) -> str:
    """Compare what was loaded with what was saved, and the next steps with those of the saved run."""
    loaded, outcome = get_values(model, optimizer), "exact"
    rtol = NARROW.get(cell.format, 0.0)
    for name, value in expected["values"].items():
        if name not in loaded or not torch.equal(loaded[name], value):
            if name not in loaded or not torch.allclose(loaded[name], value, rtol, 2**-16 * value.abs().max().item()):
                return f"WRONG: {name} differs"
            outcome = "rounded" if rtol else f"WRONG: {name} is rounded"
    train(model, optimizer, 2, seed=2)
    narrow = {cell.format, cell.saved_format} & {*NARROW}
    for name, value in get_params(model).items():
        if not torch.allclose(value, expected["after"][name], 0, 5e-3 if narrow else 1e-5):
            return f"WRONG: {name} differs after two steps"
    return outcome


class Phase(NamedTuple):
    """What the processes of one launch do: save, then load."""

    world: int
    savers: tuple[str, ...] = ()
    cells: tuple[Cell, ...] = ()


def run_phase(rank: int, phase: Phase, folder: Path, formats: tuple[str, ...], grouped: bool = True) -> None:
    """The work of one rank; rank 0 writes the outcomes."""
    torch.set_num_threads(1)
    if grouped:
        name = f"rendezvous-{phase.world}-{time.time() if phase.world == 1 else 0}"
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{name}",
            rank=rank,
            world_size=phase.world,
            timeout=timedelta(seconds=TIMEOUT),
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of what it deprecates
            save_all(folder, phase.savers, formats)
            outcomes = [(cell, *run_cell(cell, folder)) for cell in phase.cells]
        if rank == 0 and outcomes:
            name = f"{phase.world}-{phase.cells[0].loader}.json"
            (folder / name).write_text(json.dumps([[*cell, *outcome] for cell, *outcome in outcomes]))
    finally:
        get_mesh.cache_clear()
        if grouped:
            dist.destroy_process_group()


def launch(phase: Phase, folder: Path, formats: tuple[str, ...]) -> None:
    context = torch.multiprocessing.start_processes(
        run_phase, (phase, folder, formats), nprocs=phase.world, join=False, start_method="forkserver"
    )
    while not context.join(timeout=10):
        pass


def read_outcomes(folder: Path) -> list[dict[str, Any]]:
    fields = [*Cell._fields, "outcome", "message"]
    rows = [row for file in sorted(folder.glob("*.json")) for row in json.loads(file.read_text())]
    return [dict(zip(fields, row, strict=True)) for row in rows]


def run_all(folder: Path) -> list[dict[str, Any]]:
    formats = tuple(FORMATS)
    savers = {1: ("one",), 4: ("DDP", *SHARDED, "ZeRO")}
    everyone = (*savers[1], *savers[4])
    run_phase(0, Phase(1, savers[1]), folder, formats, grouped=False)
    for world in (4, 2):
        cells = list_cells(everyone, LOADERS[world], world, formats)
        launch(Phase(world, savers.get(world, ()), tuple(cells)), folder, formats)
    run_phase(0, Phase(1, (), tuple(list_cells(everyone, ["one"], 1, formats))), folder, formats, grouped=False)
    launch(Phase(1, (), tuple(list_cells(everyone, ["FSDP2"], 1, formats))), folder, formats)
    return read_outcomes(folder)


# The page

LETTERS = {"exact": "E", "rounded": "R", "refused": "–"}
REMEDIES = ("convert_state_dict", "full_state_dict=True", "into float32 state first", "make the optimizer with")
INTRODUCTION = """# Checkpoint routes

Which checkpoints load where. Each letter below is one run with real processes (gloo, CPU): a model is trained and saved
by one wrapper, loaded by another, compared with what was saved, and trained on.

This page is written by `python -m benchmarks.checkpoint_routes`, which fails if a cell is wrong: if values differ by
more than rounding, or if only some ranks raise an error. The record is `results/checkpoint-routes.json`; CI runs a part
(`test_every_checkpoint_route_is_exact_rounded_or_refused_by_all_ranks`).

| letter | means |
|---|---|
| E | exact: every value of the state is loaded bit for bit |
| R | rounded: 8-bit blocks have other boundaries, so values are rounded once more, to the nearest |
| – | refused: every rank raises an error, and nothing is loaded |
| ✗ | torch's AdamW loads without an error, and its state is unusable |

In each cell the letters are, in this order, the routes that torch offers between the two wrappers:

| route | saved by | loaded by |
|---|---|---|
| file | `torch.save(optimizer.state_dict())` | `load_state_dict` (not for shards) |
| dcp | `get_optimizer_state_dict`, `dcp.save` | `dcp.load`, `set_optimizer_state_dict` |
| flat | the same with `flatten_optimizer_state_dict=True` | the same |
| full | `full_state_dict=True, cpu_offload=True`, a file | `full_state_dict=True` |
| broadcast | the same | the same with `broadcast_from_rank0=True` |

One process saves on 1 process, the others on 4. HSDP and TP+FSDP2 have meshes of 2 x 2. ZeRO is
`ZeroRedundancyOptimizer`, which only has the first route. The columns are the loading wrapper and its number of
processes.
"""


def get_letters(cells: list[dict[str, Any]]) -> str:
    order = sorted(cells, key=lambda cell: ROUTES.index(cell["route"]))
    return " ".join(LETTERS.get(cell["outcome"], "✗") for cell in order)


def make_table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def render(result: dict[str, Any]) -> str:
    """The page, from the stored result."""
    cells = result["cells"]
    own = [cell for cell in cells if cell["saved_format"] == cell["format"] and not cell["converted"]]
    columns = [(loader, world) for world in sorted(LOADERS) for loader in LOADERS[world]]
    savers = list(dict.fromkeys(cell["saver"] for cell in own))
    lines = [INTRODUCTION]
    for name in FORMATS:
        lines += ["## torch.optim.AdamW" if name == "torch" else f"## {name}", ""]
        found: dict[Any, list[Any]] = {}
        for cell in own:
            if cell["format"] == name:
                found.setdefault((cell["saver"], cell["loader"], cell["world"]), []).append(cell)
        rows = [[saver, *(get_letters(found.get((saver, *column), [])) for column in columns)] for saver in savers]
        lines += [*make_table(["saved by", *(f"{loader} {world}" for loader, world in columns)], rows), ""]
    lines += [
        "## From one format to another",
        "",
        "Between one process, DDP and FSDP2: the number of cells by outcome. int8 to int8 is from unsharded to sharded",
        'parameters, by `convert_state_dict(state_dict, "int8 as float32")`.',
        "",
    ]
    pairs: dict[tuple[str, str], list[Counter[str]]] = {}
    for cell in cells:
        if cell["saved_format"] != cell["format"] or cell["converted"]:
            pair = pairs.setdefault((cell["saved_format"], cell["format"]), [Counter(), Counter()])
            pair[cell["converted"]][cell["outcome"]] += 1
    rows = [
        [old, new, *(", ".join(f"{count} {outcome}" for outcome, count in sorted(each.items())) for each in pair)]
        for (old, new), pair in sorted(pairs.items())
    ]
    lines += [*make_table(["saved", "loaded into", "as it is", "after `convert_state_dict`"], rows), ""]
    messages = Counter((cell["message"], cell["format"] == "torch") for cell in cells if cell["outcome"] == "refused")
    lines += ["## What the errors say", ""]
    lines += make_table(["cells", "message"], [[str(count), f"`{m}`"] for (m, _), count in messages.most_common()])
    counts = Counter(cell["outcome"] for cell in cells if cell["format"] != "torch")
    text = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    lines += ["", f"{counts.total()} cells of mvngrad with torch {result['torch']}: {text}."]
    return "\n".join(lines) + "\n"


def find_wrong(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells that are wrong, and cells that torch's AdamW loads and ours refuse without naming a remedy."""
    key = ("saver", "route", "loader", "world")
    exact = {
        tuple(cell[name] for name in key) for cell in cells if (cell["format"], cell["outcome"]) == ("torch", "exact")
    }
    return [
        cell
        for cell in cells
        if cell["format"] != "torch"
        and (
            cell["outcome"] not in LETTERS
            or (
                cell["outcome"] == "refused"
                and cell["saved_format"] == cell["format"]
                and (not exact or tuple(cell[name] for name in key) in exact)
                and not any(remedy in cell["message"] for remedy in REMEDIES)
            )
        )
    ]


def store(cells: list[dict[str, Any]], seconds: float) -> None:
    """Write the record: one line for each cell, with the number of its message."""
    messages = list(dict.fromkeys(cell["message"] for cell in cells))
    lines = [json.dumps([*list(cell.values())[:-1], messages.index(cell["message"])]) for cell in cells]
    head = {"torch": torch.__version__, "seconds": round(seconds), "messages": messages, "fields": list(cells[0])}
    text = json.dumps(head, indent=1)[:-2] + ',\n "cells": [\n' + ",\n".join(lines) + "\n]}\n"
    RESULT.write_text(text, encoding="utf-8")


def read_record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    rows = [[*row[:-1], record["messages"][row[-1]]] for row in record["cells"]]
    return {**record, "cells": [dict(zip(record["fields"], row, strict=True)) for row in rows]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="write the page again from the stored result")
    if not parser.parse_args(arguments).render:
        start = time.time()
        with tempfile.TemporaryDirectory() as folder:
            cells = run_all(Path(folder))
        store(cells, time.time() - start)
    record = read_record()
    PAGE.write_text(render(record), encoding="utf-8")
    wrong = find_wrong(record["cells"])
    print(len(record["cells"]), "cells,", len(wrong), "wrong", *wrong[:20], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
