"""A sweep over a training of your own: mvngrad sweep init valley:valley"""

from dataclasses import dataclass

import torch

import mvngrad
from mvngrad_lab.recipe import Recipe
from mvngrad_lab.sweep import Sweep, grid


@dataclass(frozen=True)
class Valley(Recipe):
    """A run: plain values, each of which may vary."""

    optimizer: str
    lr: float = 0.01
    beta2: float = 0.999
    seed: int = 0


def run(recipe: Valley) -> dict[str, float]:
    """Descend a narrow valley with noisy gradients; how far from its lowest point is the end?"""
    torch.manual_seed(recipe.seed)
    x = torch.nn.Parameter(torch.tensor([-1.0, 1.0]))
    optimizer = getattr(mvngrad, recipe.optimizer)([x], lr=recipe.lr, betas=(0.9, recipe.beta2))
    for _ in range(300):
        x.grad = torch.stack([2 * x[0], 50 * x[1]]).detach() + torch.randn(2)
        optimizer.step()
    return {"distance": x.norm()}


def valley() -> Sweep:
    recipes = [
        recipe
        for optimizer in ("Adam", "MVNGrad")
        for recipe in grid(Valley(optimizer), lr=(1e-3, 1e-2, 1e-1), beta2=(0.99, 0.999))
    ]
    return Sweep(stages=(recipes,), run=run, metric="distance", higher=False, seconds=0.1, hardware="a CPU core")
