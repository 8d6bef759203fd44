"""What a run is: a frozen dataclass of plain values, and the hash of its content. Standard library only."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

from mvngrad.rule import ADABELIEF, ADAM, LAPROP, MVNGRAD


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Base of all recipes: everything that decides a result is a field, and equal fields are one run.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Small(Recipe):
    ...     name: ClassVar[str] = "small"
    ...     lr: float = 0.1
    >>> Small(), Small().key == Small(lr=0.1).key, Small().key == Small(lr=0.2).key
    (Small(lr=0.1), True, False)
    """

    name: ClassVar[str]
    """Names the run's folder, together with the hash."""

    @property
    def settings(self) -> dict[str, Any]:
        """All fields as JSON knows them."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), allow_nan=False))
        return plain

    @property
    def key(self) -> str:
        """`name`-hash: what the run is called in a store."""
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", self.name):
            raise ValueError(f"name={self.name!r} of {type(self).__name__} is invalid; use a-z, 0-9 and -")
        content = json.dumps([self.name, self.settings], sort_keys=True, separators=(",", ":"))
        return f"{self.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


OptimizerName = Literal[
    "mvngrad", "mvngradw", "adabelief", "adabeliefw", "laprop", "lapropw", "adam", "adamw"
]  # fmt: skip
StateDtype = Literal["float32", "bf16", "int8"]
COUPLED: tuple[OptimizerName, ...] = ("adam", "laprop", "adabelief", "mvngrad")
DECOUPLED: tuple[OptimizerName, ...] = ("adamw", "lapropw", "adabeliefw", "mvngradw")
CELLS = {"mvngrad": MVNGRAD, "adabelief": ADABELIEF, "laprop": LAPROP, "adam": ADAM}


class Bound(NamedTuple):
    """What a number of a recipe must be."""

    valid: str
    holds: Callable[[float], bool]


NOT_NEGATIVE = Bound("at least 0", lambda value: value >= 0)
COUNT = Bound("at least 1", lambda value: value >= 1)
SHARE = Bound("from 0 to 1", lambda value: 0 <= value <= 1)
DECAY = Bound("at least 0 and less than 1", lambda value: 0 <= value < 1)


@cache
def _kinds(recipe: type[Recipe]) -> dict[str, Any]:
    """The types of a recipe's fields, where they are known at run time."""
    try:
        hints = get_type_hints(recipe)
    except NameError:  # imported for type checkers alone
        hints = get_type_hints(TrainingRecipe)
    return {field.name: hints.get(field.name, Any) for field in dataclasses.fields(recipe)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRecipe(Recipe, ABC):
    """The fields that the training loop itself reads; what is trained on what, a subclass adds."""

    optimizer: str
    """A cell of the paper's table: mvngrad, adabelief, laprop or adam, with a w behind it for decoupled decay; or
    somebody else's: torch:NAME, zoo:NAME, with options behind a comma."""
    batch_size: int
    """Samples of one step."""
    lr: float
    """The highest rate of the schedule."""
    beta1: float | None
    """None, as for beta2 and eps: an optimizer of somebody else has its own default, or takes none."""
    beta2: float | None
    eps: float | None = 1e-8
    eps_s: float | None = None
    """Added to s at every step; the variance cells need it, the others have none."""
    weight_decay: float = 0.0
    state_dtype: StateDtype = "float32"
    """How the optimizer keeps its state."""
    eval_every: int = 1
    """Epochs from one evaluation to the next; the last epoch always ends with one."""
    precision: Literal["bf16", "float32"] = "bf16"
    """Of the products in the forward and backward pass; parameters are float32, and float32 convolutions on a GPU are
    torch's default ones, in TF32."""
    seed: int = 0
    """Of the initial weights and of everything drawn while training."""
    deterministic: bool = False
    """Only kernels that give the same bits every time, at some cost; on a CPU they do anyway."""

    trained: ClassVar[str]
    """The module of `mvngrad_lab.tasks` that makes the task."""
    outside_step: ClassVar[tuple[str, ...]] = ("seed", "lr", "epochs", "eval_every")
    """Fields that no captured or compiled step contains, so that runs which differ in these alone share theirs."""
    of_optimizer: ClassVar[tuple[str, ...]] = (
        "optimizer", "beta1", "beta2", "eps", "eps_s", "weight_decay", "state_dtype",
    )  # fmt: skip
    """Fields that the optimizer's step contains, and the model's does not."""
    bounds: ClassVar[dict[str, Bound]] = {
        "batch_size": COUNT,
        "eval_every": COUNT,
        "lr": NOT_NEGATIVE,
        "eps_s": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "seed": Bound("at least 0 and less than 2**32", lambda value: 0 <= value < 2**32),
    }
    """What fields must be, where they are not None; a subclass adds its own."""

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():
            value = getattr(self, name)
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise ValueError(f"{name}={value!r} is invalid; choose of {', '.join(get_args(kind))}")
            if isinstance(value, int) and float in (kind, *get_args(kind)):
                object.__setattr__(self, name, float(value))  # else 1 and 1.0 would be one recipe with two keys
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}={value!r} is invalid; it must be finite")
        for name, bound in self.bounds.items():
            self._demand(name, bound)
        if not self.is_third_party and self.optimizer not in get_args(OptimizerName):
            names = ", ".join(get_args(OptimizerName))
            raise ValueError(f"optimizer={self.optimizer!r} is invalid; choose of {names}, torch:NAME and zoo:NAME")
        if self.is_third_party:
            for name, only in (("eps_s", None), ("state_dtype", "float32")):
                if getattr(self, name) != only:
                    raise ValueError(f"{name}={getattr(self, name)!r} is for our optimizers; with others it is {only}")
            return
        for name, bound in (("beta1", DECAY), ("beta2", DECAY), ("eps", NOT_NEGATIVE)):  # others' are theirs to bound
            if getattr(self, name) is None:
                raise ValueError(f"{name}=None is invalid with optimizer={self.optimizer!r}; name a number")
            self._demand(name, bound)
        variance = CELLS[self.optimizer.removesuffix("w")].centered
        if variance != (self.eps_s is not None):
            remedy = "the paper's is 1e-8 for images, 0 for language" if variance else "leave it None"
            raise ValueError(f"eps_s={self.eps_s!r} does not go with optimizer={self.optimizer!r}; {remedy}")
        if variance:
            self._demand("beta1", Bound(f"more than 0 with optimizer={self.optimizer!r}", lambda value: value > 0))

    def _demand(self, name: str, bound: Bound) -> None:
        value = getattr(self, name)
        if value is not None and not bound.holds(value):
            raise ValueError(f"{name}={value!r} is invalid; it must be {bound.valid}")

    @property
    def is_third_party(self) -> bool:
        """Whether the optimizer is somebody else's."""
        return ":" in self.optimizer

    @property
    @abstractmethod
    def epochs(self) -> int:
        """How long a run is: a field of images' recipes; those of text count steps."""

    @property
    def micro_batch_size(self) -> int:
        """Samples that are on a device at a time; the gradients of a step's micro-batches are added up."""
        return self.batch_size

    @property
    def clip(self) -> float | None:
        """The largest norm of a step's gradient; a larger one is scaled down to it."""
        return None

    @property
    def nonfinite_limit(self) -> int:
        """So many steps in a row without a finite loss and gradient norm end a run as diverged; fewer are left out."""
        return 1

    @property
    def guarded(self) -> bool:
        """Whether the norm of every gradient is asked for: to clip it, to leave a step out, to write it down."""
        return self.clip is not None or self.nonfinite_limit > 1

    def has_weight_decay(self, dimensions: int) -> bool:
        """Whether a parameter of so many dimensions gets weight decay."""
        return True

    @abstractmethod
    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """The learning rate of a step, counted from 0."""

    @property
    def rounding_seed(self) -> int:
        """Rounded state is rounded at random, each seed in its own way; float32 draws nothing."""
        return 0 if self.state_dtype == "float32" else self.seed

    def part(self, *left_out: str) -> str:
        """All fields but some, as text: equal for recipes that have these in common."""
        return json.dumps([self.name, {name: value for name, value in self.settings.items() if name not in left_out}])
