"""The targets for the cost of a step, and their verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Rows = Mapping[str, Row]
"""The rows of a model by name."""


def verdict(value: float | None, bound: float, at_least: bool) -> str:
    """Judge a value: "met", "missed", or "not measured" for None."""
    if value is None:
        return "not measured"
    return "met" if (value >= bound if at_least else value <= bound) else "missed"


@dataclass(frozen=True)
class Target:
    machine: str
    claim: str
    models: tuple[str, ...]
    value: Callable[..., float | None]  # from the Rows of each of the models
    bound: float
    at_least: bool = False

    def judge(self, *models: Rows) -> Row:
        try:
            value = self.value(*models)
        except KeyError:
            value = None
        entry = {"machine": self.machine, "target": self.claim, "models": list(self.models), "value": value}
        entry |= {"bound": self.bound, "at_least": self.at_least}
        return entry | {"verdict": verdict(value, self.bound, self.at_least)}


def get_figure(name: str, key: str) -> Callable[[Rows], float | None]:
    """A function that looks up a figure of a row."""

    def value(rows: Rows) -> float | None:
        figure: float | None = rows[name][key]
        return figure

    return value


def host_growth(few: Rows, many: Rows) -> float | None:
    """The host time of each additional tensor, relative to torch's."""

    def growth(name: str) -> float:
        more: float = many[name]["host_microseconds"] - few[name]["host_microseconds"]
        return more

    return growth("MVNGradW fused") / growth("torch AdamW fused")


TIME = "time over torch's fused AdamW"


def _time(machine: str, model: str, row: str, bound: float) -> Target:
    return Target(machine, f"{row}: {TIME}", (model,), get_figure(row, "ratio_to_fused"), bound)


TARGETS = [
    _time("H200", "gpt2-124m", "MVNGradW fused", 0.90),
    Target(
        "H200",
        "MVNGradW fused: of copy, on the device",
        ("gpt2-124m",),
        get_figure("MVNGradW fused", "graph_of_copy"),
        0.90,
        at_least=True,
    ),
    _time("H200", "gpt2-124m", "MVNGradW fused bf16", 0.62),
    _time("H200", "gpt2-124m", "MVNGradW fused int8", 0.58),
    _time("H200", "gpt2-124m", "MVNGradW fused lean", 0.72),
    _time("H200", "gpt2-124m", "MVNGradW fused lean bf16", 0.52),
    _time("H200", "resnet18", "MVNGradW fused", 0.45),
    _time("H200", "tiny-2000", "MVNGradW fused", 0.50),
    Target("H200", "MVNGradW fused: host, us", ("gpt2-124m",), get_figure("MVNGradW fused", "host_microseconds"), 100),
    Target(
        "H200",
        "MVNGradW fused: host time of a further tensor, over torch's",
        ("gpt2-124m", "tiny-2000"),
        host_growth,
        1,
    ),
    _time("2 CPU cores", "gpt2-30m", "MVNGradW fused", 1.30),
    _time("2 CPU cores", "gpt2-30m", "MVNGradW fused bf16", 0.95),
    _time("2 CPU cores", "gpt2-30m", "MVNGradW fused int8", 2.00),
]


def find_machine(environment: Mapping[str, Any], device: str) -> str | None:
    """The name under which this machine has targets; None if it has none."""
    if device == "cuda":
        return "H200" if "H200" in environment["device"] else None
    return "2 CPU cores" if environment["threads"] == 2 else None


def judge_targets(models: Mapping[str, Mapping[str, list[Row]]], on: str | None) -> list[Row]:
    """The targets of this machine whose models were run with decoupled weight decay, with their verdicts."""
    named = {model: {row["name"]: row for row in tables.get("decoupled", [])} for model, tables in models.items()}
    return [
        target.judge(*(named[model] for model in target.models))
        for target in TARGETS
        if target.machine == on and all(named.get(model) for model in target.models)
    ]
