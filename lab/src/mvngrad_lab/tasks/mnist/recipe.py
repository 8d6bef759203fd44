"""A small network on MNIST, for sweeps on a CPU."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from mvngrad_lab.recipe import COUNT, Bound, OptimizerName, Preset, TrainingRecipe, has_eps_s

Digits = Literal["mnist", "mnist-5k", "auto"]
HIDDEN = 128
"""Width of a hidden layer. The paper does not give one; at 128 an epoch takes about a second on one CPU core, and
98% of the test digits are still reached."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mnist(TrainingRecipe):
    """The two-layer MLP of fig:loss_smallbatch at a constant rate. One training digit in six is for validation.

    >>> Mnist(optimizer="adam", lr=1e-3, beta1=0.9, beta2=0.999).learning_rate(7, 100)
    0.001
    """

    name: ClassVar[str] = "mnist"
    bounds: ClassVar[dict[str, Bound]] = {**TrainingRecipe.bounds, "epochs": COUNT, "hidden": COUNT}

    batch_size: int = 128
    epochs: int = 3
    precision: Literal["bf16", "float32"] = "float32"
    hidden: int = HIDDEN
    digits: Digits = "mnist"
    """All of MNIST, or the 5,000 digits in this package; auto: all if they are here, else the 5,000."""

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        return self.lr


def _preset(optimizer: OptimizerName, batch_size: int | None) -> Mnist:
    """Common settings; the paper tuned nothing on MNIST."""
    eps_s = 1e-16 if has_eps_s(optimizer) else None
    return Mnist(optimizer=optimizer, lr=1e-3, beta1=0.9, beta2=0.999, eps_s=eps_s, digits="auto")


HELP = "A two-layer network on MNIST, for a CPU; without a download on 5,000 digits."
PRESETS = (Preset(Mnist, _preset, "mvngrad", HELP),)
