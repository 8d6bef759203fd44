"""The recipe of a task of your own."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.recipe import COUNT, NOT_NEGATIVE, Bound, Preset, TrainingRecipe, warmup_cosine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(TrainingRecipe):
    """A training of a task of your own. `mvngrad_lab.tasks.own.task.make_recipe` makes one."""

    name: ClassVar[str] = "own"
    bounds: ClassVar[dict[str, Bound]] = {
        **TrainingRecipe.bounds,
        "epochs": COUNT,
        "warmup_epochs": NOT_NEGATIVE,
        "max_norm": Bound("more than 0", lambda value: value > 0),
    }

    task: str
    """package.module:function"""
    code: str
    """Hash of the module's source: after a change it is another run."""
    batch_size: int = 128
    epochs: int = 10
    schedule: Literal["constant", "cosine"] = "constant"
    """Of the learning rate after warm-up; a cosine ends at 0."""
    warmup_epochs: int = 0
    max_norm: float | None = None
    """Gradients with a larger norm are scaled down to it."""
    precision: Literal["bf16", "float32"] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_epochs >= self.epochs:
            raise InvalidInput(
                f"warmup_epochs={self.warmup_epochs} does not fit epochs={self.epochs}; it must be at least 0 and less"
            )

    @property
    def task_name(self) -> str:
        return self.task

    @property
    def clip(self) -> float | None:
        return self.max_norm

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """
        >>> recipe = Own(task="a:b", code="", optimizer="adam", lr=1.0, beta1=0.9, beta2=0.99, epochs=3)
        >>> recipe = dataclasses.replace(recipe, warmup_epochs=1, schedule="cosine")
        >>> [round(recipe.learning_rate(step, 2), 3) for step in range(6)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
        """
        warmup, steps = self.warmup_epochs * steps_per_epoch, self.epochs * steps_per_epoch
        if self.schedule == "constant" and step >= warmup:
            return self.lr
        return warmup_cosine(self.lr, step, warmup, steps)


PRESETS: tuple[Preset, ...] = ()
"""None: `mvngrad train package.module:function` has no name of ours."""
