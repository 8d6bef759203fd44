"""What an optimizer costs each rank of a large training under FSDP2: arithmetic on what was measured on one GPU.

    python -m benchmarks.scaling

Reads step-cuda.json and writes scaling.md. Nothing is run: bytes and times for each parameter were measured on models
of up to 124M parameters, and are multiplied here.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS
from benchmarks.models import MODELS
from benchmarks.report import lines

RANKS = (8, 64, 512)
MASTER, GRADIENT, GATHERED = 4, 4, 2
"""Bytes of a parameter that is kept, of its gradient and of a parameter that is gathered to be multiplied."""
KINDS = {"float32": "", "bf16": " bf16", "int8": " int8"}
FORMS = {
    "torch AdamW": (["torch AdamW fused"], 2),
    "Adam, AdaBelief, LaProp": (["AdamW fused", "AdaBeliefW fused", "LaPropW fused"], 2),
    "MVN-Grad": (["MVNGradW fused"], 3),
    "MVN-Grad, lean": (["MVNGradW fused lean"], 2),
}
"""Rows of the measurement that share a line, of which the slowest counts, and tensors of state."""
LARGE, MANY = "gpt2-124m", "tiny-2000"
"""The measured models that say what a parameter costs the device, and what a tensor costs the host."""


@dataclass(frozen=True)
class Model:
    """A size, in the shape of a Llama of about that size: layers of 9 tensors, and 3 more."""

    name: str
    parameters: float
    layers: int

    @property
    def tensors(self) -> int:
        return 9 * self.layers + 3


LARGER = (Model("1B", 1e9, 16), Model("7B", 7e9, 32), Model("70B", 70e9, 80))


@dataclass(frozen=True)
class Cost:
    """What was measured of an optimizer: for each parameter on the device, for each tensor on the host."""

    form: str
    kind: str
    slots: int
    state_bytes: float
    moved_bytes: float
    seconds: float
    """Of the device, for a parameter."""
    host_seconds: float
    """Until a step of no tensors would return."""
    host_seconds_of_tensor: float

    def state(self, model: Model, ranks: int) -> float:
        """Bytes of state of one rank."""
        return self.state_bytes * model.parameters / ranks

    def held(self, model: Model, ranks: int) -> float:
        """Bytes of a rank's part of parameters, gradients and state."""
        return (MASTER + GRADIENT) * model.parameters / ranks + self.state(model, ranks)

    def device(self, model: Model, ranks: int) -> float:
        """Seconds of a step on the device."""
        return self.seconds * model.parameters / ranks

    def host(self, model: Model) -> float:
        """Seconds until a step returns: FSDP2 keeps every tensor, however small the part of it."""
        return self.host_seconds + self.host_seconds_of_tensor * model.tensors

    def checkpoint(self, model: Model) -> float:
        """Bytes of parameters and state on the disk; 8-bit state of sharded parameters is saved in float32."""
        return model.parameters * (MASTER + (4 * self.slots if self.kind == "int8" else self.state_bytes))


def costs(measured: dict[str, Any]) -> list[Cost]:
    """Of every optimizer and state that step-cuda.json has."""
    rows = {model: {row["name"]: row for row in kinds["decoupled"]} for model, kinds in measured["models"].items()}
    size, few, many = sum(map(math.prod, MODELS[LARGE])), len(MODELS[LARGE]), len(MODELS[MANY])
    found = []
    for form, (names, slots) in FORMS.items():
        for kind, suffix in KINDS.items():
            if any(name + suffix not in rows[LARGE] for name in names):
                continue  # torch's own has one kind of state
            slowest = max((name + suffix for name in names), key=lambda name: rows[LARGE][name]["graph_milliseconds"])
            one, other = rows[LARGE][slowest], rows[MANY][slowest]
            each = 1e-6 * (other["host_microseconds"] - one["host_microseconds"]) / (many - few)
            found.append(
                Cost(
                    form,
                    kind,
                    slots,
                    one["state_bytes"],
                    one["needed"],
                    1e-3 * one["graph_milliseconds"] / size,
                    1e-6 * one["host_microseconds"] - few * each,
                    each,
                )
            )
    return found


def per_parameter(found: list[Cost]) -> str:
    """The measured numbers that all others follow from."""
    head = [
        "optimizer",
        "state",
        "tensors",
        "state, bytes",
        "moved by a step, bytes",
        "device, ps",
        "of a tensor, host, us",
    ]
    body = []
    for cost in found:
        body.append([cost.form, cost.kind, f"{cost.slots}", f"{cost.state_bytes:.2f}", f"{cost.moved_bytes:.1f}"])
        body[-1] += [f"{1e12 * cost.seconds:.2f}", f"{1e6 * cost.host_seconds_of_tensor:.2f}"]
    return lines(head, body)


def per_rank(model: Model, found: list[Cost]) -> str:
    """What a rank of 8, 64 and 512 has and does."""
    ranks = " / ".join(map(str, RANKS))
    head = ["optimizer", "state", f"state, GB ({ranks})", "with parameters and gradients, GB", "step, ms"]
    head += ["checkpoint, GB", "time is"]
    body = []
    for cost in found:
        state, held = ([f"{of(model, n) / 1e9:.3g}" for n in RANKS] for of in (cost.state, cost.held))
        times = [f"{1e3 * max(cost.device(model, n), cost.host(model)):.3g}" for n in RANKS]
        body.append([cost.form, cost.kind, " / ".join(state), " / ".join(held), " / ".join(times)])
        body[-1] += [f"{cost.checkpoint(model) / 1e9:.4g}", " / ".join(basis(cost, model, n) for n in RANKS)]
    return lines(head, body)


def basis(cost: Cost, model: Model, ranks: int) -> str:
    """How far a time is from what was measured: the host's, or so many times the measured model's."""
    if cost.host(model) > cost.device(model, ranks):
        return "host"
    return f"{model.parameters / ranks / sum(map(math.prod, MODELS[LARGE])):.2g}x"


def gathered() -> str:
    """What does not shrink with more ranks."""
    head = [
        "model",
        "layers",
        "tensors",
        "two gathered layers, bf16, GB",
        *(f"parameters a rank of {n}, M" for n in RANKS),
    ]
    body = []
    for model in LARGER:
        body.append([model.name, f"{model.layers}", f"{model.tensors}"])
        body[-1].append(f"{2 * GATHERED * model.parameters / model.layers / 1e9:.2f}")
        body[-1] += [f"{model.parameters / ranks / 1e6:,.4g}" for ranks in RANKS]
    return lines(head, body)


def tables(measured: dict[str, Any]) -> dict[str, str]:
    """All tables, by title."""
    found = costs(measured)
    titled = {"Measured, for each parameter": per_parameter(found), "The models": gathered()}
    return titled | {f"{model.name} parameters": per_rank(model, found) for model in LARGER}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of step-cuda.json, and for the result")
    args = parser.parse_args(arguments)
    measured = json.loads((args.out / "step-cuda.json").read_text())
    where = ", ".join(f"{key} {value}" for key, value in measured["environment"].items())
    text = [
        "# Optimizers at larger scale",
        "Computed by `python -m benchmarks.scaling` from step-cuda.json, measured on:",
    ]
    text += [f"{where}, copy {measured['copy_bytes_per_second'] / 1e9:.0f} GB/s"]
    text += ["What the columns mean, and what is assumed: docs/concepts/scaling.md."]
    text += [part for title, lines in tables(measured).items() for part in (f"## {title}", lines)]
    (args.out / "scaling.md").write_text("\n\n".join(text) + "\n")


if __name__ == "__main__":
    main()
