"""What an optimizer costs each rank of a large training under FSDP2, computed from measurements on one GPU.

    python -m benchmarks.scaling

Reads step-cuda.json and writes scaling.md. Nothing is run: bytes and times per parameter were measured on models of up
to 124M parameters, and are multiplied here.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models import MODELS
from benchmarks.report import RESULTS, markdown_table

RANKS = (8, 64, 512)
MASTER, GRADIENT, GATHERED = 4, 4, 2
"""Bytes per parameter: the stored one, its gradient, and the all-gathered copy for the forward pass."""
STATE_DTYPES = {"float32": "", "bf16": " bf16", "int8": " int8"}
FORMS = {
    "torch AdamW": (["torch AdamW fused"], 2),
    "Adam, AdaBelief, LaProp": (["AdamW fused", "AdaBeliefW fused", "LaPropW fused"], 2),
    "MVN-Grad": (["MVNGradW fused"], 3),
    "MVN-Grad, lean": (["MVNGradW fused lean"], 2),
}
"""Measured rows that share a line, where the slowest counts; and the number of state tensors."""
LARGE, MANY = "gpt2-124m", "tiny-2000"
"""The measured models that give the device time per parameter and the host time per tensor."""


@dataclass(frozen=True)
class Model:
    """A model size, with the layers of a Llama of about that size: 9 tensors per layer, and 3 more."""

    name: str
    parameters: float
    layers: int

    @property
    def tensors(self) -> int:
        return 9 * self.layers + 3


LARGER = (Model("1B", 1e9, 16), Model("7B", 7e9, 32), Model("70B", 70e9, 80))


@dataclass(frozen=True)
class Cost:
    """The measured cost of an optimizer: per parameter on the device, per tensor on the host."""

    form: str
    state_dtype: str
    state_tensors: int
    state_bytes: float
    moved_bytes: float
    seconds: float
    """Device time per parameter."""
    host_seconds: float
    """Host time of a step without tensors."""
    host_seconds_of_tensor: float

    def state(self, model: Model, ranks: int) -> float:
        """Bytes of state of one rank."""
        return self.state_bytes * model.parameters / ranks

    def held(self, model: Model, ranks: int) -> float:
        """Bytes of a rank's shards of parameters, gradients and state."""
        return (MASTER + GRADIENT) * model.parameters / ranks + self.state(model, ranks)

    def device(self, model: Model, ranks: int) -> float:
        """Seconds of a step on the device."""
        return self.seconds * model.parameters / ranks

    def host(self, model: Model) -> float:
        """Seconds until a step returns: under FSDP2 every rank has every tensor, however small its shard."""
        return self.host_seconds + self.host_seconds_of_tensor * model.tensors

    def checkpoint(self, model: Model) -> float:
        """Bytes of parameters and state on the disk; 8-bit state of sharded parameters is saved in float32."""
        return model.parameters * (
            MASTER + (4 * self.state_tensors if self.state_dtype == "int8" else self.state_bytes)
        )


def load_costs(measured: dict[str, Any]) -> list[Cost]:
    """The costs of every optimizer and state dtype in step-cuda.json."""
    rows = {model: {row["name"]: row for row in tables["decoupled"]} for model, tables in measured["models"].items()}
    size, few, many = sum(map(math.prod, MODELS[LARGE])), len(MODELS[LARGE]), len(MODELS[MANY])
    costs = []
    for form, (names, state_tensors) in FORMS.items():
        for state_dtype, suffix in STATE_DTYPES.items():
            if any(name + suffix not in rows[LARGE] for name in names):
                continue  # torch has one state dtype
            slowest = max((name + suffix for name in names), key=lambda name: rows[LARGE][name]["graph_milliseconds"])
            large, many_tensors = rows[LARGE][slowest], rows[MANY][slowest]
            seconds_of_tensor = 1e-6 * (many_tensors["host_microseconds"] - large["host_microseconds"]) / (many - few)
            costs.append(
                Cost(
                    form,
                    state_dtype,
                    state_tensors,
                    large["state_bytes"],
                    large["needed"],
                    1e-3 * large["graph_milliseconds"] / size,
                    1e-6 * large["host_microseconds"] - few * seconds_of_tensor,
                    seconds_of_tensor,
                )
            )
    return costs


def parameter_table(costs: list[Cost]) -> str:
    """The measured numbers, from which all others are computed."""
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
    for cost in costs:
        body.append(
            [cost.form, cost.state_dtype, f"{cost.state_tensors}", f"{cost.state_bytes:.2f}", f"{cost.moved_bytes:.1f}"]
        )
        body[-1] += [f"{1e12 * cost.seconds:.2f}", f"{1e6 * cost.host_seconds_of_tensor:.2f}"]
    return markdown_table(head, body)


def rank_table(model: Model, costs: list[Cost]) -> str:
    """Memory and time of one rank out of 8, 64 and 512."""
    ranks = " / ".join(map(str, RANKS))
    head = ["optimizer", "state", f"state, GB ({ranks})", "with parameters and gradients, GB", "step, ms"]
    head += ["checkpoint, GB", "time is"]
    body = []
    for cost in costs:
        state, held = ([f"{of(model, n) / 1e9:.3g}" for n in RANKS] for of in (cost.state, cost.held))
        times = [f"{1e3 * max(cost.device(model, n), cost.host(model)):.3g}" for n in RANKS]
        body.append([cost.form, cost.state_dtype, " / ".join(state), " / ".join(held), " / ".join(times)])
        body[-1] += [f"{cost.checkpoint(model) / 1e9:.4g}", " / ".join(basis(cost, model, n) for n in RANKS)]
    return markdown_table(head, body)


def basis(cost: Cost, model: Model, ranks: int) -> str:
    """What a time is based on: the host, or the size of the shard relative to the measured model."""
    if cost.host(model) > cost.device(model, ranks):
        return "host"
    return f"{model.parameters / ranks / sum(map(math.prod, MODELS[LARGE])):.2g}x"


def model_table() -> str:
    """The models, and what does not shrink with more ranks."""
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
    return markdown_table(head, body)


def tables(measured: dict[str, Any]) -> dict[str, str]:
    """All tables, by title."""
    costs = load_costs(measured)
    titled = {"Measured, for each parameter": parameter_table(costs), "The models": model_table()}
    return titled | {f"{model.name} parameters": rank_table(model, costs) for model in LARGER}


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
