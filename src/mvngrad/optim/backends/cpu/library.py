"""The C++ kernel as a library: compiled at first use by the system's compiler, and cached.

torch.utils.cpp_extension.load does this too, but needs ninja, which torch does not install.

The cache is `$XDG_CACHE_HOME/mvngrad`, by default `~/.cache/mvngrad`. The name of a library is a hash of everything it
depends on (source, compiler, flags and CPU), so versions, machines and users with one home do not collide. A library is
written under another name and renamed, so processes that compile at the same time do not read half a file. If the
folder cannot be written to, or others can write to it, each process compiles for itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from enum import IntEnum
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from mvngrad.optim import formats
from mvngrad.optim.backends.table import Row
from mvngrad.rule import TINY

FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC", "-shared")
OPTIONAL_FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ("-fopenmp",), ())
"""The first that the compiler accepts. Without OpenMP, as in Apple's clang, steps run on one thread."""
REMEDY = "install g++ or clang++ (or name one in CXX), or use fused=False"
LOCK = Lock()
"""Held while compiling, so that the threads of a process compile once."""
if hasattr(os, "register_at_fork"):  # a process forked while another thread compiled would wait for ever
    os.register_at_fork(after_in_child=LOCK._at_fork_reinit)  # type: ignore[attr-defined]


Dtype = IntEnum("Dtype", "FLOAT64 FLOAT32 BFLOAT16 FLOAT16 UINT8", start=0)
POINTERS = ("table", "sizes", "starts")
COUNTS = ("tensors", "chunks", "chunk_size")
DOUBLES = (
    "lr", "beta1", "beta2", "mean_weight", "eps", "eps_s", "weight_decay", "z_clip", "grad_scale", "log_beta1",
    "log_beta2",
)  # fmt: skip
INTEGERS = (
    "seed", "threads", "step_dtype", "param_dtype", "grad_dtype", "state_dtype", "centered", "momentum_last", "lean",
    "coupled", "decoupled", "maximize", "clipped", "scaled", "round_params", "master_bits", "decay_at_most_half",
)  # fmt: skip
INTEGER_CONSTANTS = {
    "ROWS": len(Row), "BLOCK": formats.BLOCK, "CUT": formats.CUT, "FINE": formats.FINE, "COARSE": formats.COARSE,
    "LEAST": formats.LEAST, "OFFSET_BITS": formats.OFFSET_BITS,
}  # fmt: skip
FLOAT_CONSTANTS = {"OFFSET": formats.OFFSET, "INVERSE_TOP": 1 / formats.TOP, "TOP_FACTOR": formats.UP * formats.TOP}


class Arguments(ctypes.Structure):
    """The arguments of the kernel."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in COUNTS),
        *((name, ctypes.c_double) for name in DOUBLES),
        *((name, ctypes.c_int32) for name in INTEGERS),
    ]


def make_source() -> str:
    """The kernel with the definitions that it shares with Python."""
    lines = ["#include <stdint.h>"]
    for enum in (Row, Dtype):
        members = [f"{each.name} = {each.value}" for each in enum]
        lines.append(f"enum {enum.__name__} {{ {', '.join(members)} }};")
    lines += [f"constexpr int {name} = {value};" for name, value in INTEGER_CONSTANTS.items()]
    lines += [f"constexpr float {name} = {value!r}f;" for name, value in FLOAT_CONSTANTS.items()]
    lines += [f"constexpr uint32_t GOLDEN = {formats.GOLDEN % 2**32}u;", f"constexpr double TINY = {TINY!r};"]
    lines.append("struct Arguments {")
    lines.append(f"    const int64_t *{', *'.join(POINTERS)};")
    lines.append(f"    int64_t {', '.join(COUNTS)};")
    lines.append(f"    double {', '.join(DOUBLES)};")
    lines.append(f"    int32_t {', '.join(INTEGERS)};")
    return "\n".join([*lines, "};", '#line 1 "kernel.cpp"', Path(__file__).with_name("kernel.cpp").read_text()])


@cache
def _load() -> Any:
    source, compiler = make_source(), find_compiler()
    name = f"step-{make_key(source, compiler)}.so"
    folder = find_cache()
    if folder is None:
        with tempfile.TemporaryDirectory() as private:
            return open_library(compile_library(source, compiler, Path(private), name))
    path = folder / name
    return open_library(path if is_whole(path) else compile_library(source, compiler, folder, name))


def load() -> Any:
    """The function of the kernel; compiles it if it is not cached. A RuntimeError if it cannot be compiled."""
    with LOCK:
        return _load()


def is_whole(path: Path) -> bool:
    """Whether a library exists and ends with its own hash. Opening one that was cut would end the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def open_library(path: Path) -> Any:
    """The function `mvngrad_step` of a compiled library, which takes a pointer to `Arguments`."""
    function = ctypes.CDLL(str(path)).mvngrad_step
    function.argtypes, function.restype = [ctypes.POINTER(Arguments)], None
    return function


def find_compiler() -> list[str]:
    """The command of the C++ compiler: that of CXX, or the first of g++, clang++ and c++; a RuntimeError if none."""
    if sys.platform == "win32":
        raise RuntimeError("fused=True on the CPU is not available on Windows: use fused=False")
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["g++"], ["clang++"], ["c++"]]:
        if shutil.which(command[0]):
            return command
    raise RuntimeError(f"fused=True on the CPU needs a C++ compiler: {REMEDY}")


def find_cache() -> Path | None:
    """The folder of cached libraries; None if this user cannot write to it, or others can."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "mvngrad"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # Path.home raises a RuntimeError without a home
        return None
    only_own = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if only_own and os.access(folder, os.W_OK | os.X_OK) else None


def make_key(source: str, compiler: list[str]) -> str:
    """A hash of everything that a library depends on."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = (source, *compiler, version, *FLAGS, str(OPTIONAL_FLAGS), platform.platform(), describe_cpu())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def describe_cpu() -> str:
    """The model and the instructions of the CPU, for which -march=native compiles."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor()
    varying = ("processor", "cpu MHz", "bogomips", "BogoMIPS", "apicid", "initial apicid", "core id")
    return "\n".join(line for line in first.splitlines() if not line.startswith(varying))


def compile_library(source: str, compiler: list[str], folder: Path, name: str) -> Path:
    """Compile a library that ends with its hash, and return its path; a RuntimeError with the compiler's message."""
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        for optional in OPTIONAL_FLAGS:
            command = [*compiler, *FLAGS, *optional, "-x", "c++", "-", "-o", temporary]
            result = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                digest = hashlib.sha256(Path(temporary).read_bytes()).digest()
                with open(temporary, "ab") as file:
                    file.write(digest)
                os.replace(temporary, folder / name)
                return folder / name
        lines = result.stderr.splitlines()
        errors = [line for line in lines if "error" in line] or lines
        problem = errors[0] if errors else f"it ended with {result.returncode}"
        raise RuntimeError(
            f"fused=True on the CPU: {shlex.join(compiler)} cannot compile the kernel: {problem}: {REMEDY}"
        )
    finally:
        Path(temporary).unlink(missing_ok=True)
