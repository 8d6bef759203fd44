"""Measure the state of each optimizer after a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from mvngrad import AdaBeliefW, AdamW, LaPropW, MVNGradW
from mvngrad_lab.experiments import Tick
from mvngrad_lab.recipe import Recipe

OPTIMIZERS = {"AdamW": AdamW, "LaPropW": LaPropW, "AdaBeliefW": AdaBeliefW, "MVN-GradW": MVNGradW}
SMALLER: dict[str, dict[str, Any]] = {
    "lean": {"lean": True},
    "bf16": {"state_dtype": torch.bfloat16},
    "int8": {"state_dtype": "int8"},
    "lean, int8": {"lean": True, "state_dtype": "int8"},
}


@dataclass(frozen=True)
class Memory(Recipe):
    name: ClassVar[str] = "memory"
    size: int = 1 << 20
    """Parameters, in two tensors."""


def make_recipe(quick: bool, data: Path | None) -> Memory:
    return Memory()


def measure_state(optimizer_class: Any, size: int, **options: Any) -> float:
    """Bytes of state, step counts included, over bytes of float32 parameters."""
    params = [torch.nn.Parameter(torch.zeros(size // 2)) for _ in range(2)]
    optimizer = optimizer_class(params, **options)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    tensors = [value for p in params for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors) / sum(p.nbytes for p in params)


def run(recipe: Memory, data: Path | None, tick: Tick) -> dict[str, Any]:
    return {
        "state": {name: measure_state(optimizer, recipe.size) for name, optimizer in OPTIMIZERS.items()},
        "smaller": {name: measure_state(MVNGradW, recipe.size, **options) for name, options in SMALLER.items()},
    }
