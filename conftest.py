"""Set-up for all tests. ``pytest -m gpu --record FILE`` also writes a record of a run on a GPU."""

import json
import os
import shutil
import signal
from importlib import import_module
from pathlib import Path

# bfloat16 matrix products end in SIGILL on some CPUs that advertise AMX without having it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs this way, and the processes that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # run the kernel in Triton's interpreter


def pytest_addoption(parser):
    parser.addoption("--record", help="write versions, device, commit and counts of this run to a JSON file")


def pytest_terminal_summary(terminalreporter, config):
    if path := config.getoption("--record"):
        from benchmarks.report import environment

        counts = {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")}
        record = {**environment("cuda"), "command": "pytest -m gpu", **counts}
        Path(path).write_text(json.dumps(record, indent=1) + "\n")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def cpp_compiler():
    """Skip the test if there is no C++ compiler for torch.compile; in CI there is one."""
    if os.environ.get("CI") != "true" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler")


@pytest.fixture
def triton():
    """Skip the test if Triton is not installed; in CI it is."""
    return import_module("triton") if os.environ.get("CI") == "true" else pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
