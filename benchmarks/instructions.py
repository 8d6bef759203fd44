"""Instructions of the CUDA kernel for each coordinate, by kind: compiled for an H200, on a machine without a GPU.

    python -m benchmarks.instructions [--only NAME ...] [--out results]

The kernel is compiled by Triton for sm_90 with the arguments that a step passes, and disassembled by the cuobjdump that
comes with Triton. Counted is one pass of its loop over a full block. Three lower bounds follow for a step of GPT-2
124M: the time to issue all instructions, if every scheduler issued one in each clock; the time of the integer ones, of
which a multiprocessor completes 64 in a clock, half as many as additions of floats; and the time to move the bytes at
the bandwidth of a copy. Next to them is what was measured, without the host (results/step-cuda.json and
memory-cuda.json). Writes results/instructions.json and .md.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import mvngrad
from benchmarks.models import MODELS
from benchmarks.report import RESULTS, get_environment, markdown_table, write
from mvngrad.optim import backends
from mvngrad.optim.backends.cuda import kernel
from mvngrad.optim.backends.cuda.launch import REGISTERS

TARGET = GPUTarget("cuda", 90, 32)
CLOCKS = 132 * 1.98e9
"""Of all multiprocessors of an H200 in a second."""
ISSUED, INTEGERS = 128, 64
"""Instructions of single threads that a multiprocessor issues in a clock, and those that its integer units complete
(CUDA programming guide, arithmetic instructions, compute capability 9.0).
"""
WARP = 32
KINDS = {
    "special": r"MUFU",
    "moves and control": r"U|[CS]2R|R2UR|MOV|IMAD\.MOV|B(RA|SSY|SYNC|AR)|EXIT|NOP|SHFL|WARPSYNC",
    "multiply-add": r"F(ADD|MUL|FMA)|IMAD",
    "memory": r"LD|ST",
}
"""By the beginning of an instruction's name, the first that fits. All others are of the integer units: additions,
shifts, logic, comparisons and selections. They do not multiply: IMAD is computed where floats are.
"""
LEAN = "MVNGradW lean int8, 24-bit masters"
CONFIGURATIONS: dict[str, tuple[Any, torch.dtype, dict[str, Any]]] = {
    "MVNGradW fused bf16": (mvngrad.MVNGradW, torch.float32, {"state_dtype": "bf16"}),
    "MVNGradW fused int8": (mvngrad.MVNGradW, torch.float32, {"state_dtype": "int8"}),
    "AdamW int8, 24-bit masters": (mvngrad.AdamW, torch.bfloat16, {"state_dtype": "int8", "master_bits": 24}),
    "MVNGradW int8, 24-bit masters": (mvngrad.MVNGradW, torch.bfloat16, {"state_dtype": "int8", "master_bits": 24}),
    LEAN: (mvngrad.MVNGradW, torch.bfloat16, {"state_dtype": "int8", "master_bits": 24, "lean": True}),
}
"""By the name in step-cuda.json or memory-cuda.json: an optimizer, the dtype of its parameters and its options."""
SIGNATURES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


class Recorder:
    """Stands for a kernel, and keeps the arguments of its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self.launches.append((arguments, options))


def record_launch(make: Any, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Any, dict[str, Any], float]:
    """The arguments and options with which a step on a GPU launches the update, and the bytes that it moves for each
    coordinate: it reads the gradient, and reads and writes parameter and state.
    """
    param = torch.nn.Parameter(torch.zeros(2**16, dtype=dtype))
    param.grad = torch.zeros_like(param)
    optimizer, update = make([param], **options), Recorder()
    with (
        mock.patch.object(kernel, "advance", Recorder()),
        mock.patch.object(kernel, "update", update),
        mock.patch.object(backends, "cuda_kernel_accepts", return_value=True),
    ):
        optimizer.step()
    ((arguments, launched),) = update.launches
    values = kernel.UpdateArguments(*arguments)
    state = optimizer.state[param]
    (dtype,) = (value.dtype for name, value in state.items() if name in ("v", "s"))
    registers = {"maxnreg": REGISTERS[dtype]} if dtype in REGISTERS else {}
    moved = 3 * param.nbytes + 2 * sum(value.nbytes for name, value in state.items() if name != "step")
    return values._replace(ALIGNED=True, FAST=True), {**launched, **registers}, moved / param.numel()


def disassemble(values: Any, options: dict[str, Any]) -> str:
    """The instructions of the update, compiled for `TARGET`."""
    signature, constants, attributes = {}, {}, {}
    for number, (parameter, value) in enumerate(zip(kernel.update.params, values, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[(number,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name], attributes[(number,)] = SIGNATURES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(kernel.update, signature, constants, attributes)
    compiled = triton.compile(source, target=TARGET, options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def find_hot_path(text: str) -> list[str]:
    """The instructions of one pass of the loop over a full block.

    The loop has one part for full blocks and one for the last block, whose loads have a mask, so that it is longer.

    >>> lines = ["LDC R1", "@P0 BRA 0x40", "LDG R2", "BRA 0x60", "@P1 LDG R2", "@P1 MOV R3", "STG R2", "BRA 0x10"]
    >>> find_hot_path("".join(f"/*{16 * i:04x}*/ {line} ;" for i, line in enumerate(lines)))
    ['@P0 BRA 0x40', 'LDG R2', 'BRA 0x60', 'STG R2', 'BRA 0x10']
    """
    code = {int(at, 16): line.strip() for at, line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", text)}
    found = {at: re.search(r"\bBRA\b.*?0x([0-9a-f]+)", line) for at, line in code.items()}
    jumps = {at: int(jump[1], 16) for at, jump in found.items() if jump}
    last = max(at for at, to in jumps.items() if to < at)
    first = jumps[last]
    branch = min(at for at, to in jumps.items() if first <= at < to)
    other = jumps[branch]
    join = max(to for at, to in jumps.items() if branch < at < other < to)
    parts = ([at for at in code if low < at < high] for low, high in ((branch, other), (other - 1, join)))
    around = [at for at in code if first <= at <= branch or join <= at <= last]
    return [code[at] for at in sorted(around + min(parts, key=len))]


def count(lines: list[str]) -> dict[str, int]:
    """How many instructions there are of each kind."""
    names = (line.split()[1 if line.startswith("@") else 0] for line in lines)
    kinds = (next((kind for kind, pattern in KINDS.items() if re.match(pattern, name)), "integer") for name in names)
    return dict(Counter(kinds))


def measure(name: str) -> dict[str, Any]:
    """The instructions of one coordinate, and the bytes that a step must move for it."""
    values, options, moved = record_launch(*CONFIGURATIONS[name])
    coordinates = values.BLOCK / (WARP * options["num_warps"])
    counts = count(find_hot_path(disassemble(values, options)))
    kinds = {kind: number / coordinates for kind, number in counts.items()}
    return {"name": name, "instructions": sum(kinds.values()), "kinds": kinds, "bytes": moved}


def read_measured() -> tuple[dict[str, float], float]:
    """Milliseconds of a step without the host by name, and the bandwidth of a copy."""
    step = json.loads((RESULTS / "step-cuda.json").read_text())
    rows = [*step["models"]["gpt2-124m"]["decoupled"], *json.loads((RESULTS / "memory-cuda.json").read_text())["steps"]]
    times = {row["name"]: row["graph_milliseconds"] for row in rows if row["name"] in CONFIGURATIONS}
    return times, step["copy_bytes_per_second"]


def make_markdown(results: dict[str, Any]) -> str:
    kinds, times = ("integer", *KINDS), ("issue", "integers", "bytes", "measured")
    head = ["step", *kinds, "all", "bytes", "all, ms", "integers, ms", "bytes, ms", "measured, ms"]
    rows = []
    for row in results["steps"]:
        counts = [row["kinds"].get(kind, 0) for kind in kinds]
        numbers = [f"{number:.1f}" for number in (*counts, row["instructions"], row["bytes"])]
        rows.append([row["name"], *numbers, *(f"{row['milliseconds'][key]:.3f}" for key in times)])
    title, _, rest = (__doc__ or "").partition("\n\n")
    text = rest.partition("\n\n")[2].partition("Writes")[0].strip()
    parts = ["# Instructions of the CUDA kernel", title, text, markdown_table(head, rows)]
    return "\n\n".join([*parts, f"Environment: `{results['environment']}`"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=CONFIGURATIONS, metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    measured, bandwidth = read_measured()
    size = sum(torch.Size(shape).numel() for shape in MODELS["gpt2-124m"])
    rows = []
    for name in args.only:
        row = measure(name)
        times = {
            "issue": 1e3 * size * row["instructions"] / (ISSUED * CLOCKS),
            "integers": 1e3 * size * row["kinds"]["integer"] / (INTEGERS * CLOCKS),
            "bytes": 1e3 * size * row["bytes"] / bandwidth,
            "measured": measured[name],
        }
        rows.append({**row, "milliseconds": times})
    results = {"environment": {**get_environment("cpu"), "triton": triton.__version__}, "steps": rows}
    write(results, args.out / "instructions", make_markdown(results))
    print(make_markdown(results))


if __name__ == "__main__":
    main()
