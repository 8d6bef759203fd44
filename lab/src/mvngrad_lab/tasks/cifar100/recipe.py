"""ResNet-18 on CIFAR-100: Table 1 of the paper."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.recipe import COUNT, NOT_NEGATIVE, SHARE, Bound, OptimizerName, Preset, TrainingRecipe, warmup_cosine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cifar100(TrainingRecipe):
    """The paper's vision experiment: 200 epochs, warm-up, then a cosine to 0 (subsec:cifar).

    The paper names warm-up, weight decay, RandAugment, MixUp and label smoothing without values. The defaults here are
    ours, fixed once for all optimizers: coupled decay of 5e-4 on every parameter, 5 epochs of linear warm-up,
    RandAugment of 2 operations at magnitude 9, MixUp with Beta(0.2, 0.2) and one draw a step, label smoothing of 0.1,
    crops from a border of 4 and flips, bfloat16 products, and the last partial batch of an epoch dropped.

    "Train accuracy" under MixUp can be read in two ways: on the mixed and augmented images of the last epoch, or on the
    training images as they are. We report both: `train_accuracy_mixed`, with the network as it is in training, and
    `train_accuracy`, with the network in evaluation mode.

    >>> recipe = paper("mvngrad", 1024)
    >>> recipe.lr, recipe.beta1, recipe.beta2, recipe.eps_s
    (0.004, 0.7, 0.99, 1e-08)
    """

    name: ClassVar[str] = "cifar100"
    bounds: ClassVar[dict[str, Bound]] = {
        **TrainingRecipe.bounds,
        "epochs": COUNT,
        "crop": Bound("from 0 to 31: a border of 32 leaves crops without a pixel", lambda value: 0 <= value <= 31),
        "randaugment_operations": Bound("0, 1 or 2", lambda value: 0 <= value <= 2),
        "randaugment_magnitude": Bound("from 0 to 30", lambda value: 0 <= value <= 30),
        "mixup": NOT_NEGATIVE,
        "label_smoothing": SHARE,
        "train_limit": Bound("from 1 to 50000", lambda value: 1 <= value <= 50_000),
    }

    weight_decay: float = 5e-4
    epochs: int = 200
    eval_every: int = 10
    warmup_epochs: int = 5
    crop: int = 4
    """Pixels of border around an image before it is cropped; 0 crops nothing."""
    flip: bool = True
    """Whether half of the images, at random, are flipped horizontally; --no-flip flips none."""
    randaugment_operations: int = 2
    randaugment_magnitude: int = 9
    mixup: float = 0.2
    """Both parameters of the Beta distribution; 0 mixes nothing."""
    label_smoothing: float = 0.1
    drop_last: bool = True
    """Whether an epoch's last batch is skipped if it is smaller than the others; --no-drop-last trains on it."""
    train_limit: int | None = None
    """Number of training images, the first of a fixed shuffle; None is all 50,000."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.warmup_epochs < self.epochs:
            raise InvalidInput(
                f"warmup_epochs={self.warmup_epochs} does not fit epochs={self.epochs}; it must be at least 0 and less"
            )

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        warmup, steps = self.warmup_epochs * steps_per_epoch, self.epochs * steps_per_epoch
        return warmup_cosine(self.lr, step, warmup, steps)


SELECTED: dict[tuple[str, int], tuple[float, float, float, float | None]] = {
    ("laprop", 128): (5e-4, 0.7, 0.999, None),
    ("adabelief", 128): (1e-3, 0.9, 0.99, 1e-8),
    ("adam", 128): (5e-4, 0.8, 0.999, None),
    ("mvngrad", 128): (1e-3, 0.95, 0.99, 1e-8),
    ("adabelief", 1024): (4e-3, 0.7, 0.99, 1e-8),
    ("adam", 1024): (1e-3, 0.8, 0.999, None),
    ("laprop", 1024): (1e-3, 0.95, 0.999, None),
    ("mvngrad", 1024): (4e-3, 0.7, 0.99, 1e-8),
}
"""lr, beta1, beta2 and eps_s selected by the paper: tab:hparams-cifar-bs128 and tab:hparams-cifar-bs1024."""


def paper(optimizer: OptimizerName, batch_size: int, seed: int = 0) -> Cifar100:
    """A run of Table 1."""
    if (optimizer, batch_size) not in SELECTED:
        raise InvalidInput(
            f"the paper selected nothing for optimizer={optimizer!r}, batch_size={batch_size}; it has mvngrad, "
            "adabelief, laprop and adam at 128 and 1024: make a Cifar100 with lr and betas of your own"
        )
    lr, beta1, beta2, eps_s = SELECTED[optimizer, batch_size]
    return Cifar100(optimizer=optimizer, batch_size=batch_size, seed=seed, lr=lr, beta1=beta1, beta2=beta2, eps_s=eps_s)


def _preset(optimizer: OptimizerName, batch_size: int | None) -> Cifar100:
    """The paper's settings for the nearer of its two batch sizes, on a logarithmic scale."""
    return paper(optimizer, 128 if (batch_size or 128) < 362 else 1024)


PRESETS = (Preset(Cifar100, _preset, "mvngrad", "ResNet-18 on CIFAR-100, Table 1."),)
