"""The environment of a benchmark, and its results as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.models import MODELS
from benchmarks.targets import Row
from mvngrad_lab.store import environment as lab, timestamp, write_atomic

RESULTS = Path(__file__).parents[1] / "results"

INTRODUCTION = """\
Measured by `python -m benchmarks.step`. Every round steps every candidate once; times are medians over rounds, ratios
are medians of the ratios of each round, with quartiles. *Of fused* is the time relative to torch's fused Adam(W), *of
same path* relative to torch's Adam(W) on the same path, both in the same run. Bytes are per parameter: *state* is what
the optimizer keeps; *held*, what a step allocates at its peak; *peak*, the sum of these, the parameter, its gradient
and anything else that the optimizer keeps; *touched*, what the operations of a step read and write. *Of copy* is the
bytes that no step can avoid (gradient read, parameter and state read and written) over its time, as a fraction of the
bandwidth of a copy in the same run; on a CPU a copy also reads what it overwrites, so a step in place can exceed 1. The
*limit* of our eager and foreach paths, on their ratio to the same path, is the ratio of these bytes plus 10%. *Host* is
the time until `step` returns, *launches* are a step's kernels, and *graph* is the step replayed from a CUDA graph,
which measures the device alone."""

FIGURES = [  # label, key, digits
    ("ms", "milliseconds", 3),
    ("of fused", "ratio_to_fused", 2),
    ("of same path", "ratio", 2),
    ("limit", "limit", 2),
    ("of copy", "of_copy", 2),
    ("state", "state_bytes", 2),
    ("held", "held", 1),
    ("peak", "peak", 1),
    ("touched", "touched", 0),
    ("launches", "launches", 0),
    ("host, us", "host_microseconds", 0),
    ("graph, ms", "graph_milliseconds", 3),
    ("graph, of copy", "graph_of_copy", 2),
]


def get_environment(device: str) -> dict[str, Any]:
    """The machine, versions and commit of a benchmark."""
    return lab.get_environment(device, RESULTS.parent / "benchmarks")


def markdown_table(head: list[str], body: Iterable[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body)])


def _format(row: Row, key: str, digits: int) -> str:
    if row[key] is None:
        return ""
    text = f"{row[key]:.{digits}f}"
    if (around := row.get(f"{key}_quartiles")) is None:
        return text
    return f"{text} ({around[0]:.{digits}f}-{around[1]:.{digits}f})"


def table(rows: list[Row]) -> str:
    """A line for each candidate, without the figures that none of them has on this device."""
    figures = [figure for figure in FIGURES if any(row[figure[1]] is not None for row in rows)]
    body = [[row["name"], *(_format(row, key, digits) for _, key, digits in figures)] for row in rows]
    return markdown_table(["step", *(label for label, _, _ in figures)], body)


def targets_table(targets: list[Row]) -> str:
    body = [
        [
            ", ".join([target["machine"], *target["models"]]),
            target["target"],
            f"{'at least' if target['at_least'] else 'at most'} {target['bound']:.4g}",
            "" if target["value"] is None else f"{target['value']:.3g}",
            target["verdict"],
        ]
        for target in targets
    ]
    return markdown_table(["where", "what", "target", "measured", "verdict"], body)


def markdown(result: dict[str, Any]) -> str:
    where = result["environment"]
    text = [f"# One optimizer step on {where['device']}", INTRODUCTION]
    facts = [f"{key} {value}" for key, value in where.items()]
    text.append(", ".join([*facts, f"copy {result['copy_bytes_per_second'] / 1e9:.0f} GB/s"]))
    if result["targets"]:
        text += ["## Targets", targets_table(result["targets"])]
    for model, tables in result["models"].items():
        for decay, rows in tables.items():
            rounds = rows[0]["rounds"]
            title = f"## {model}, {len(MODELS[model])} float32 tensors, weight decay: {decay}, {rounds} rounds"
            text += [title, table(rows)]
    if result["notes"]:
        text += ["## Not measured", "\n".join(f"- {note}" for note in result["notes"])]
    return "\n\n".join(text) + "\n"


def write(result: dict[str, Any], stem: Path, page: str) -> None:
    """Write the result of a benchmark as JSON, with the time, and its page next to it."""
    write_atomic(stem.with_suffix(".json"), json.dumps({"made": timestamp(), **result}, indent=1) + "\n")
    write_atomic(stem.with_suffix(".md"), page)
