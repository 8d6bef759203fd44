"""The optimizers that are timed: torch's Adam, our cells, and other implementations that are installed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import torch

CLASS_NAMES = ("Adam", "AdaBelief", "LaProp", "MVNGrad")
PATHS: dict[str, dict[str, Any]] = {
    "eager": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
STATES: dict[str, dict[str, Any]] = {
    "": {},
    " bf16": {"state_dtype": torch.bfloat16},
    " int8": {"state_dtype": "int8"},
}


@dataclass(frozen=True)
class Candidate:
    """An optimizer by the module and name of its class, which `make` imports."""

    name: str
    module: str
    factory: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    origin: Literal["torch", "ours", "peer"] = "peer"

    def make(self, params: list[torch.nn.Parameter], decoupled: bool) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"lr": 1e-6, "weight_decay": 1e-2 if decoupled else 0.0, **self.options}
        if self.capturable and params[0].is_cuda:
            options["capturable"] = True
        return self._load()(params, **options)

    @property
    def capturable(self) -> bool:
        return self.path == "fused" and self.origin != "peer"

    def _load(self) -> Callable[..., torch.optim.Optimizer]:
        package = self.module.partition(".")[0]
        try:
            factory: Callable[..., torch.optim.Optimizer] = getattr(import_module(self.module), self.factory)
        except Exception as error:  # an import can raise anything, for example in a library built for another torch
            missing = isinstance(error, ModuleNotFoundError) and error.name == package
            reason = "not installed" if missing else f"cannot be imported: {describe_error(error)}"
            raise Unavailable(f"{package}: {reason}") from error
        return factory


class Unavailable(Exception):
    """A candidate's package is not installed or cannot be imported."""


def describe_error(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# Options that make them compute what ours compute: no rectification, decoupled decay.
PEERS = [
    Candidate("timm AdaBelief", "timm.optim", "AdaBelief", "eager", {"rectify": False}),
    Candidate("timm LaProp", "timm.optim", "LaProp", "eager"),
    Candidate("timm AdamWLegacy", "timm.optim", "AdamWLegacy", "eager", {"foreach": False}),
    Candidate("timm AdamWLegacy foreach", "timm.optim", "AdamWLegacy", "foreach", {"foreach": True}),
    *(
        Candidate(
            f"pytorch_optimizer {cell}{' foreach' if path == 'foreach' else ''}",
            "pytorch_optimizer",
            cell,
            path,
            {"weight_decouple": True, **PATHS[path]},
        )
        for path in ("eager", "foreach")
        for cell in ("AdaBelief", "LaProp")
    ),
    Candidate("torchao AdamW8bit", "torchao.optim", "AdamW8bit", "fused"),
    Candidate("bitsandbytes AdamW8bit", "bitsandbytes.optim", "AdamW8bit", "fused"),
]


def _make_torch(path: str, decoupled: bool) -> Candidate:
    factory = "AdamW" if decoupled else "Adam"
    return Candidate(f"torch {factory} {path}", "torch.optim", factory, path, PATHS[path], "torch")


def _make_ours(path: str, decoupled: bool) -> list[Candidate]:
    candidates = []
    for cell in CLASS_NAMES:
        factory = cell + ("W" if decoupled else "")
        forms: dict[str, dict[str, Any]] = {"": {}}
        if path == "fused":
            lean = {f" lean{name}": {"lean": True, **options} for name, options in STATES.items()}
            forms = STATES | (lean if cell == "MVNGrad" else {})
        candidates += [
            Candidate(f"{factory} {path}{form}", "mvngrad", factory, path, PATHS[path] | options, "ours")
            for form, options in forms.items()
        ]
    return candidates


def get_candidates(decoupled: bool, only: str = "") -> list[Candidate]:
    """The candidates whose names match the pattern `only`, and torch's on their paths and on the fused path."""
    every = []
    for path in PATHS:
        every += [_make_torch(path, decoupled), *_make_ours(path, decoupled)]
        every += [peer for peer in PEERS if peer.path == path]
    chosen = [candidate for candidate in every if re.search(only, candidate.name)]
    compared = {"fused", *(candidate.path for candidate in chosen)}
    return [c for c in every if c in chosen or (c.origin == "torch" and c.path in compared)]
