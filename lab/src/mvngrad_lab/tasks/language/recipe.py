"""GPT-2 on WikiText-103 and OpenWebText: the paper's language models."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.recipe import COUNT, SHARE, Bound, OptimizerName, Preset, TrainingRecipe, warmup_cosine

Model = Literal["30M", "124M", "tiny"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Language(TrainingRecipe):
    """The fields of both language recipes: windows of a text, a length in steps, and a cosine after a warm-up.

    A sample is a window of the model's context plus one token, drawn uniformly and with repetition. The paper leaves
    open the following; both recipes have:

    - a 30M model of 6 layers, width 384 and 6 heads; vocabularies padded to 50,304 rows, whose additional rows are
      never a target;
    - weight decay for matrices, embeddings included, but not for biases and norms, as in nanoGPT. The paper does not
      say what is decayed;
    - a cosine that ends at `lr_end` = 0.1 of its height, after the last step, as in nanoGPT;
    - up to 9 steps in a row whose loss or gradient is not finite are skipped; the tenth ends a run as diverged;
    - no dropout. The paper disables it for OpenWebText and does not mention it for WikiText-103.
    """

    bounds: ClassVar[dict[str, Bound]] = {
        **TrainingRecipe.bounds,
        **dict.fromkeys(("steps", "epoch_steps", "micro_batch_size", "nonfinite_limit", "eval_windows"), COUNT),
        "lr_end": SHARE,
        "clip": Bound("more than 0, or None", lambda value: value > 0),
    }

    text: str
    """The text to train on: wikitext103, openwebtext, wikipedia_en, or NAME-HASH of a folder of your own. The command
    line also takes the folder itself, and prepares it."""
    model: Model
    """30M has a context of 512, 124M of 1,024; tiny, of 64, is for a CPU and for tests."""
    steps: int
    warmup_steps: int
    epoch_steps: int = 100
    """Steps of one epoch, which are planned and logged together."""
    eval_every: int = 10
    lr_end: float = 0.1
    """Share of `lr` at the end of the cosine."""
    micro_batch_size: int = 12
    """Windows on a device at a time; the gradients of a step's micro-batches are added."""
    clip: float | None = 1.0
    """The largest norm of a step's gradient; a larger one is scaled down to it."""
    nonfinite_limit: int = 10
    """Steps in a row without a finite loss and gradient norm that end a run as diverged; fewer are skipped."""
    decayed: Literal["matrices", "all"] = "matrices"
    """Which parameters get weight decay: those of two or more dimensions, or all."""
    eval_windows: int | None = None
    """Evenly spaced windows of a validation text to evaluate; None is all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps % self.epoch_steps:
            raise InvalidInput(
                f"steps={self.steps} is not a multiple of epoch_steps={self.epoch_steps}; "
                f"epoch_steps={math.gcd(self.steps, self.epoch_steps)} would fit"
            )
        if self.batch_size % self.micro_batch_size:
            raise InvalidInput(
                f"batch_size={self.batch_size} is not a multiple of micro_batch_size={self.micro_batch_size}; "
                f"micro_batch_size={math.gcd(self.batch_size, self.micro_batch_size)} would fit"
            )
        if not 0 <= self.warmup_steps < self.steps:
            raise InvalidInput(
                f"warmup_steps={self.warmup_steps} does not fit steps={self.steps}; it must be at least 0 and less"
            )

    @property
    def epochs(self) -> int:
        return self.steps // self.epoch_steps

    def has_weight_decay(self, dimensions: int) -> bool:
        return self.decayed == "all" or dimensions >= 2

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        return warmup_cosine(self.lr, step, self.warmup_steps, self.steps, self.lr_end)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WikiText103(Language):
    """GPT-2 30M for 100,000 steps of 128 x 512 tokens, with coupled decay: tab:GPT-Wiki.

    The paper gives no coefficient of the decay, no warm-up, no clipping and no precision. Ours are 2,000 steps of
    warm-up and clipping at 1, both as for OpenWebText, products and residual stream in bfloat16, and a coefficient of
    1e-6.

    That coefficient matters more than the optimizer (docs/log.md): coupled decay is normalized with the gradient, so
    that weights with small gradients, as those of rare tokens, are moved by nearly `lr` towards 0. 1e-6 is meant to be
    too weak to hide the differences between optimizers, which has not been measured at this size.

    >>> recipe = wikitext103("mvngrad")
    >>> recipe.lr, recipe.beta1, recipe.beta2, recipe.eps_s, recipe.epochs
    (0.001, 0.95, 0.99, 0.0, 1000)
    """

    name: ClassVar[str] = "wikitext103"

    text: str = "wikitext103"
    model: Model = "30M"
    batch_size: int = 128
    micro_batch_size: int = 128
    steps: int = 100_000
    warmup_steps: int = 2_000
    weight_decay: float = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenWebText(Language):
    """GPT-2 124M for 120,000 steps of 480 x 1,024 tokens, with decoupled decay: tab:GPT-Open-loss.

    All numbers are the paper's except those that `Language` lists. A step of 480 windows is 40 micro-batches of 12; any
    other size that divides 480 gives the same gradient up to rounding.

    >>> recipe = openwebtext("mvngradw")
    >>> recipe.lr, recipe.beta1, recipe.beta2, recipe.eps_s, recipe.weight_decay
    (0.0001, 0.6, 0.999, 0.0, 0.1)
    """

    name: ClassVar[str] = "openwebtext"

    text: str = "openwebtext"
    model: Model = "124M"
    batch_size: int = 480
    steps: int = 120_000
    warmup_steps: int = 2_000
    weight_decay: float = 0.1


SELECTED: dict[tuple[str, str], tuple[float, float, float, float | None]] = {
    ("wikitext103", "adam"): (1e-3, 0.95, 0.99, None),
    ("wikitext103", "laprop"): (1e-3, 0.95, 0.99, None),
    ("wikitext103", "adabelief"): (1e-3, 0.95, 0.99, 0.0),
    ("wikitext103", "mvngrad"): (1e-3, 0.95, 0.99, 0.0),
    ("openwebtext", "adamw"): (1e-4, 0.6, 0.99, None),
    ("openwebtext", "lapropw"): (1e-4, 0.6, 0.999, None),
    ("openwebtext", "adabeliefw"): (1e-4, 0.6, 0.999, 0.0),
    ("openwebtext", "mvngradw"): (1e-4, 0.6, 0.999, 0.0),
}
"""lr, beta1, beta2 and eps_s as the paper selected them: tab:hparams-gpt-wiki and tab:hparams-gpt-owt."""

STAND_IN = "wikipedia_en"
"""The text of our runs where the paper's are not available: compare optimizers with each other, not with the paper."""


def wikitext103(optimizer: OptimizerName, seed: int = 0) -> WikiText103:
    """A run of tab:GPT-Wiki."""
    return WikiText103(optimizer=optimizer, seed=seed, **_selected("wikitext103", optimizer))


def openwebtext(optimizer: OptimizerName, seed: int = 0) -> OpenWebText:
    """A run of tab:GPT-Open-loss."""
    return OpenWebText(optimizer=optimizer, seed=seed, **_selected("openwebtext", optimizer))


def _selected(name: str, optimizer: str) -> dict[str, Any]:
    if (name, optimizer) not in SELECTED:
        has = ", ".join(other for text, other in SELECTED if text == name)
        made = {"wikitext103": "a WikiText103", "openwebtext": "an OpenWebText"}[name]
        raise InvalidInput(
            f"the paper selected nothing for optimizer={optimizer!r} on {name}; it has {has}: "
            f"make {made} with lr and betas of your own"
        )
    return dict(zip(("lr", "beta1", "beta2", "eps_s"), SELECTED[name, optimizer], strict=True))


PRESETS = (
    Preset(
        WikiText103,
        lambda optimizer, batch_size: wikitext103(optimizer),
        "mvngrad",
        "GPT-2 30M on WikiText-103 with coupled decay, Table 2.",
    ),
    Preset(
        OpenWebText,
        lambda optimizer, batch_size: openwebtext(optimizer),
        "mvngradw",
        "GPT-2 124M on OpenWebText with decoupled decay, Table 2.",
    ),
)
