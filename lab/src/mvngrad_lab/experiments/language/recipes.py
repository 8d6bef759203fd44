"""The trainings of Table 2 on the stand-in text."""

from __future__ import annotations

import dataclasses

from mvngrad_lab.recipe import COUPLED, DECOUPLED
from mvngrad_lab.tasks.language.recipe import STAND_IN, OpenWebText, WikiText103, openwebtext, wikitext103

SEEDS = (0, 1, 2)
"""Of our runs; the paper has four for WikiText-103."""
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
TUNED: dict[str, float] = dict.fromkeys(COUPLED, 3e-3)
"""The rate of RATES with the lowest validation loss of each after 1,000 steps on the stand-in."""


def table2() -> list[WikiText103]:
    """tab:GPT-Wiki in 3,000 steps on the stand-in, seeds innermost."""
    return [
        dataclasses.replace(wikitext103(optimizer, seed), text=STAND_IN, steps=3_000, warmup_steps=200, eval_every=5)
        for optimizer in COUPLED
        for seed in SEEDS
    ]


def rates() -> list[WikiText103]:
    """Lower and higher rates than the paper's 1e-3 on the stand-in."""
    return [
        dataclasses.replace(wikitext103(optimizer), text=STAND_IN, steps=1_000, warmup_steps=200, lr=lr)
        for optimizer in COUPLED
        for lr in RATES
    ]


def tuned() -> list[WikiText103]:
    """`table2` with the best rate of each optimizer in `rates`."""
    return [dataclasses.replace(recipe, lr=TUNED[recipe.optimizer]) for recipe in table2()]


def official() -> dict[str, list[WikiText103 | OpenWebText]]:
    """Table 2 as the paper has it: four seeds on WikiText-103, three on OpenWebText."""
    return {
        "wikitext103": [wikitext103(optimizer, seed) for optimizer in COUPLED for seed in range(4)],
        "openwebtext": [openwebtext(optimizer, seed) for optimizer in DECOUPLED for seed in range(3)],
    }


def shortened() -> list[OpenWebText]:
    """tab:GPT-Open-loss in 120 steps on the stand-in: too few to rank optimizers, enough to see each train at full
    size. Micro-batches of 96 are faster on a GPU than of 12.
    """
    return [
        dataclasses.replace(
            openwebtext(optimizer),
            text=STAND_IN,
            micro_batch_size=96,
            steps=120,
            warmup_steps=12,
            epoch_steps=10,
            eval_every=4,
        )
        for optimizer in DECOUPLED
    ]


def on_stand_in() -> list[WikiText103 | OpenWebText]:
    """All our runs: at the paper's rate, at others, at the best of these, and at full size."""
    return [*table2(), *rates(), *tuned(), *shortened()]
