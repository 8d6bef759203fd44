"""The recipes of both queues, seed by seed. README.md says why. Standard library only."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from mvngrad_lab.recipe import TrainingRecipe
from mvngrad_lab.tasks.cifar100.recipe import Cifar100, paper
from mvngrad_lab.tasks.language.recipe import STAND_IN, WikiText103

IMAGE_ARMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"state_dtype": "bf16"},
    "int8": {"state_dtype": "int8"},
    "lean": {"lean": True},
}
IMAGE_SEEDS = tuple(range(1, 13))
"""Seed 0 selected the setting."""
TORCH, OURS, INT8 = "torch, float32", "ours, float32", "ours, int8"
PEERS = {"torchao": "torchao.optim:AdamW8bit", "bitsandbytes": "bitsandbytes.optim:AdamW8bit"}
ADAMW_ARMS: dict[str, dict[str, Any]] = {
    TORCH: {"optimizer": "torch:AdamW,fused=True"},
    OURS: {"optimizer": "adamw"},
    INT8: {"optimizer": "adamw", "state_dtype": "int8"},
    **{f"{package}, 8 bits": {"optimizer": optimizer} for package, optimizer in PEERS.items()},
}
ADAMW_SEEDS = (1, 2, 3)
QUEUES = ("images", "adamw")


def image_recipe(arm: str, seed: int) -> Cifar100:
    """MVN-Grad as the grid of the floor experiment selected it with the paper's eps_s: 30 epochs at batch 1024."""
    selected = dataclasses.replace(paper("mvngrad", 1024, seed), lr=1e-2, epochs=30, warmup_epochs=1)
    return dataclasses.replace(selected, **IMAGE_ARMS[arm])


def adamw_recipe(arm: str, seed: int) -> WikiText103:
    """GPT-2 30M, 1,000 steps on the stand-in, at the rate that was the best of four for Adam."""
    return WikiText103(
        **ADAMW_ARMS[arm], text=STAND_IN, steps=1_000, warmup_steps=200, lr=3e-3, beta1=0.95, beta2=0.99,
        weight_decay=0.1, seed=seed,
    )  # fmt: skip


def make_queue(name: str) -> dict[tuple[str, int], TrainingRecipe]:
    """The recipe of each arm and seed of a queue."""
    if name == "images":
        return {(arm, seed): image_recipe(arm, seed) for seed in IMAGE_SEEDS for arm in IMAGE_ARMS}
    return {(arm, seed): adamw_recipe(arm, seed) for seed in ADAMW_SEEDS for arm in ADAMW_ARMS}


def find_key(recipe: TrainingRecipe, finished: dict[str, dict[str, Any]]) -> str | None:
    """The key of the recipe's run among settings by key; the code of a peer, a part of its name, may be any version.

    A report is made where the peers are not installed.
    """
    for key, settings in finished.items():
        same = drop_code(settings.get("optimizer", "")) == drop_code(recipe.optimizer)
        if same and dataclasses.replace(recipe, optimizer=settings["optimizer"]).key == key:
            return key
    return None


def drop_code(optimizer: str) -> str:
    """
    >>> drop_code("torchao.optim:AdamW8bit@0123456789ab,block_size=256")
    'torchao.optim:AdamW8bit,block_size=256'
    """
    return re.sub(r"@\w*", "", optimizer)
