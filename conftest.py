"""Set-up for all tests. With ``--record FILE``, a run also writes a record: machine, versions, commit and counts."""

import json
import os
import shutil
import signal
from importlib import import_module
from pathlib import Path

# bfloat16 matrix products end in SIGILL on some CPUs that advertise AMX without having it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
# Tests run side by side, and some compare bits with those of a process that has one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch.compile would start processes that import torch, for graphs of a few kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# On a GPU each process that imports JAX would reserve most of its memory.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

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
        from benchmarks.report import get_environment

        stats = {kind: terminalreporter.stats.get(kind, []) for kind in ("passed", "failed", "error", "skipped")}
        asked = [str(argument) for argument in config.invocation_params.args]
        arguments = [each for i, each in enumerate(asked) if "--record" not in (each, *asked[max(i - 1, 0) : i])]
        record = {
            **get_environment("cuda" if torch.cuda.is_available() else "cpu"),
            "command": " ".join(["pytest", *arguments]),
            **{kind: len(reports) for kind, reports in stats.items()},
            "failures": sorted({report.nodeid for kind in ("failed", "error") for report in stats[kind]}),
        }
        Path(path).write_text(json.dumps(record, indent=1) + "\n")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "slow" not in item.keywords)  # so that no worker is left alone with one at the end
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def cpp_compiler():
    """Skip the test if there is no C++ compiler, for the CPU's kernel or torch.compile; in CI there is one."""
    if os.environ.get("CI") != "true" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler")


@pytest.fixture
def triton():
    """Skip the test if Triton is not installed; in CI it is. Of torch 2.11's, 3.6, only the compiler is tested."""
    module = import_module("triton") if os.environ.get("CI") == "true" else pytest.importorskip("triton")
    if module.__version__.startswith("3.6.") and not torch.cuda.is_available():
        pytest.skip("the interpreter of Triton 3.6 cannot run a loop with NumPy 2")
    return module


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
