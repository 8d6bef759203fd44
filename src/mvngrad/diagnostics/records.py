"""Read the records of a Monitor from a file of JSON lines, and report damaged lines. Standard library only.

A file may come from anywhere, so the shape of its records is checked here, once for all readers.
"""

from __future__ import annotations

import json
import math
import os
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

Record = dict[str, Any]
NEW_RUN = '{"new_run": true}'
"""The line between the records of two runs."""
CHECKSUM = "crc32"
"""The key of a JSON object's checksum, which objects of early versions do not have."""


def add_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a JSON object with a checksum of its values."""
    return {**values, CHECKSUM: _checksum(values)}


def pop_checksum(values: dict[str, Any]) -> bool:
    """Remove the checksum of a JSON object, if it has one; False if its values are not those that were written."""
    return CHECKSUM not in values or bool(values.pop(CHECKSUM) == _checksum(values))


def _checksum(values: Mapping[str, Any]) -> int:
    """The checksum of the text that `json.dumps` makes, which is the same after the object was written and read."""
    return zlib.crc32(json.dumps(values).encode())


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def read_records(path: str | os.PathLike[str], on_problem: Callable[[str], object] = _warn) -> list[Record]:
    """The records of the last run in a Monitor's file.

    Lines that a crash left incomplete, or whose content is not what was written, are left out: `on_problem` is called
    with a message that has their numbers, and warns by default. A run that was resumed takes steps again; what it
    recorded of them before is left out, too.

    Raises:
        ValueError: the file has no record, or lines that are not records, or several Monitors wrote to it in turn.
    """
    name, remedy = os.fspath(path), "name a file that a Monitor wrote"
    lines = [line.strip() for line in Path(path).read_text(encoding="utf-8", errors="replace").split("\n")]
    start = max((number for number, line in enumerate(lines, start=1) if line == NEW_RUN), default=0)
    records, damaged = list[Record](), list[str]()
    for number, line in enumerate(lines[start:], start=start + 1):
        if not line:
            continue
        try:
            value = json.loads(line)
            whole = not isinstance(value, dict) or pop_checksum(value)
        except (ValueError, RecursionError):
            whole = False
        if not whole:
            damaged.append(str(number))
        elif field := _find_invalid_field(value, RECORD):
            raise ValueError(
                f"{name}, line {number} is not a Monitor's record, because of {field}; remove it, or {remedy}"
            )
        else:
            records.append(value)
    if not records:
        raise ValueError(f"{name} has no record of a Monitor; {remedy}")
    if damaged:
        on_problem(f"{name} has lines that are incomplete or damaged; they are left out: {', '.join(damaged)}")
    try:
        check_not_mixed(records, [_read_monitor(line) for line in lines[:start]])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return drop_repeated_steps(records)


def _read_monitor(line: str) -> str | None:
    """The id of the Monitor that wrote a line of an earlier run, which may be damaged."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    monitor = value.get("monitor") if isinstance(value, dict) else None
    return monitor if isinstance(monitor, str) else None


def check_not_mixed(records: Sequence[Record], earlier: Iterable[str | None] = ()) -> None:
    """Raise a ValueError if Monitors wrote records in turn, as those of two optimizers in one training do.

    `earlier` has the ids of the Monitors of records before these. A resumed training has a new Monitor, whose records
    follow those of the old one. Records of early versions have no id.
    """
    optimizers = {record["monitor"]: record.get("optimizer") for record in records if record.get("monitor")}
    order = filter(None, (*earlier, *(record.get("monitor") for record in records)))
    turns = Counter(monitor for monitor, _ in groupby(order))
    if any(turns[monitor] > 1 for monitor in optimizers):
        names = ", ".join(f"{monitor} ({optimizer})" for monitor, optimizer in optimizers.items())
        raise ValueError(
            f"records of several Monitors are mixed: {names}; give each optimizer, and each process, a sink of its own"
            ', and close a Monitor before another; to judge one of these, keep only the records with its "monitor"'
        )


def drop_repeated_steps(records: Iterable[Record]) -> list[Record]:
    """The records without those of steps that were taken again later, after a resume or in another training."""
    steps: list[Record] = []
    for record in records:
        while steps and steps[-1]["step"] >= record["step"]:
            steps.pop()
        steps.append(record)
    return steps


# The shape of a record: a function that checks a value, a list with the shape of each item, or an object's fields


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= 0


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _optional(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _has_numbers(*names: str) -> Callable[[Any], bool]:
    """Whether a value is an object with these names, and all its values are numbers or None."""
    return lambda value: (
        isinstance(value, dict) and value.keys() >= {*names} and all(v is None or _is_number(v) for v in value.values())
    )


GROUP = {
    "group": _is_count,
    "cell": _is_text,
    "lr": _optional(_is_number),
    "beta1": _is_share,
    "beta2": lambda value: _is_share(value) and value < 1,
    "eps": _is_number,
    "floor": _is_number,
    "z_clip": _optional(_is_number),
    "weight_decay": _is_number,
    "decoupled_weight_decay": lambda value: isinstance(value, bool),
    "t": lambda value: _is_count(value) and value > 0,
    "mean_noise": _is_share,
    "m": _optional(_is_text),
    "dead": _optional(_is_share),
    "not_finite": _optional(_is_share),
    "ratio": _optional(_has_numbers("0.5")),
    "snr": _optional(_has_numbers("0.5")),
    "noise_hidden": _optional(_is_share),
    "sign_collapse": _optional(_is_share),
    "sign_collapse_is": _is_text,
    "epsilon_floor": _optional(_is_share),
    "clipped": _optional(_is_share),
    "floor_divisor": _optional(_is_number),
    "root": _optional(_is_number),
    "update": _optional(_has_numbers("0.5")),
    "gradient_norm": _optional(_has_numbers("median", "max")),
    "gradients_not_finite": _is_count,
    "spikes": [
        {
            "step": _is_count,
            "median": _is_number,
            "multiple": _optional(_is_number),
            "update_during": _optional(_is_number),
            "update_after": _optional(_is_number),
            "recovery_steps": _optional(_is_count),
            "recovered": _is_number,
        }
    ],
    "layers": [
        {
            "name": _is_text,
            "sampled": _is_count,
            "epsilon_floor": _optional(_is_share),
            "update": _optional(_is_number),
            "snr": _optional(_is_number),
        }
    ],
}
RECORD = {
    "step": _is_count,
    "monitor": _is_text,
    "optimizer": _is_text,
    "groups": [GROUP],
    "logged": _has_numbers(),
    "logged_not_finite": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
}
OPTIONAL_FIELDS = (
    "monitor", "optimizer", "logged", "logged_not_finite", "weight_decay", "decoupled_weight_decay", "noise_hidden",
    "not_finite", "z_clip", "clipped", "floor_divisor", "root", "gradients_not_finite", "recovered", "layers",
)  # fmt: skip
"""Fields that early versions did not write, or that only some records have."""


def _find_invalid_field(value: Any, shape: Any, where: str = "its content") -> str | None:
    """The name of the first field that is missing or invalid, such as `groups[0].beta2`; None if there is none."""
    if callable(shape):
        return None if shape(value) else where
    if isinstance(shape, list):
        if not isinstance(value, list):
            return where
        invalid = (_find_invalid_field(item, shape[0], f"{where}[{index}]") for index, item in enumerate(value))
    elif not isinstance(value, dict):
        return where
    else:
        prefix = f"{where}." if shape is not RECORD else ""
        invalid = (
            _find_invalid_field(value[name], part, prefix + name) if name in value else prefix + name
            for name, part in shape.items()
            if name in value or name not in OPTIONAL_FIELDS
        )
    return next(filter(None, invalid), None)
