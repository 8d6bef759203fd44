"""Set-up for all tests; with ``-m gpu --record FILE``, a record of the run on a GPU."""

import json
import os
from pathlib import Path

# bfloat16 products kill the process on some CPUs that advertise AMX and do not have it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--record", help="write versions, device, commit and counts of this run to a JSON file")


def pytest_terminal_summary(terminalreporter, config):
    if path := config.getoption("--record"):
        from benchmarks.environment import environment

        counts = {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")}
        record = {**environment("cuda"), "command": "pytest -m gpu", **counts}
        Path(path).write_text(json.dumps(record, indent=1) + "\n")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
