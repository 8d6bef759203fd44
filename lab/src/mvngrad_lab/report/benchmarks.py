"""What benchmarks measured, as results: files that `python -m benchmarks.NAME` wrote.

A file comes from anywhere, so its shape is checked once, here; what uses it need not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mvngrad_lab.store import FinishedRun

GPT2, ENGINE = "throughput-gpt2", "engine"
FILES = {"language-cuda.json": GPT2, "engine.json": ENGINE}
"""File -> the target of the claims it decides, if there are any."""
SHAPE: dict[str, dict[str, type]] = {
    GPT2: {"environment": dict, "throughput": dict, "overhead": dict, "data": str},
    ENGINE: {"environment": dict, "rows": list},
}


def benchmarks(*roots: Path, tell: Callable[[str], object]) -> list[FinishedRun]:
    """Of each file the first in the folders that can be read; the others are told."""
    found: dict[str, FinishedRun] = {}
    for root in roots:
        for file, name in FILES.items():
            if name not in found and (root / file).is_file() and (run := _read(root / file, name, tell)) is not None:
                found[name] = run
    return list(found.values())


def _read(path: Path, name: str, tell: Callable[[str], object]) -> FinishedRun | None:
    try:
        whole: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        wrong = [key for key, kind in SHAPE[name].items() if not isinstance(whole[key], kind)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        wrong = [repr(error)]
    if wrong:
        tell(f"{path} is left out, because it is not what a benchmark writes: {wrong[0]}")
        return None
    return FinishedRun(path.stem, name, {}, whole.pop("environment"), whole)
