"""What a run is: a frozen dataclass of plain values, and the hash of its content. Standard library only."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from mvngrad.rule import CELLS
from mvngrad_lab.errors import InvalidInput

_INTRODUCED = "introduced"


def added_field(default: Any, *, introduced: Any = ...) -> Any:
    """Declare a field of a recipe class that has stored runs already: `name: type = added_field(default)`.

    While the field has the value that it was introduced with, it is left out of the key, so the stored runs keep
    theirs. To change the default later, keep the old one: `added_field(new, introduced=old)`.
    """
    value = default if introduced is ... else introduced
    return dataclasses.field(default=default, metadata={_INTRODUCED: value})


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Base of all recipes: everything that decides a result is a field, and equal fields are one run.

    A run is identified by its `key`, a hash of the recipe's name and fields. Fields declared with `added_field` are
    hashed only where they differ from the value they were introduced with.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Small(Recipe):
    ...     name: ClassVar[str] = "small"
    ...     lr: float = 0.1
    >>> @dataclasses.dataclass(frozen=True)
    ... class Grown(Small):
    ...     decay: float = added_field(0.0)
    >>> Small().key == Small(lr=0.1).key == Grown().key, Small(lr=0.2).key == Small().key, Grown(decay=0.1) == Grown()
    (True, False, False)
    """

    name: ClassVar[str]
    """Names the run's folder, together with the hash; by default the name of the class in lower case."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls, "name"):
            cls.name = cls.__name__.lower()

    @property
    def settings(self) -> dict[str, Any]:
        """All fields as JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), allow_nan=False))
        return values

    @functools.cached_property
    def key(self) -> str:
        """`name`-hash: the name of the run in a store."""
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", self.name):
            raise InvalidInput(f"name={self.name!r} of {type(self).__name__} is invalid; use a-z, 0-9 and -")
        try:
            content = json.dumps([self.name, _content(self)], sort_keys=True, separators=(",", ":"), allow_nan=False)
        except ValueError:
            raise InvalidInput(f"{self} has a number that is not finite; use None or a finite number") from None
        return f"{self.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def _content(value: Any) -> Any:
    """What is hashed of a recipe, also of one inside another."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: _content(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if _INTRODUCED not in field.metadata or getattr(value, field.name) != field.metadata[_INTRODUCED]
        }
    return [_content(part) for part in value] if isinstance(value, (list, tuple)) else value


OptimizerName = Literal[
    "mvngrad", "mvngradw", "adabelief", "adabeliefw", "laprop", "lapropw", "adam", "adamw"
]  # fmt: skip
StateDtype = Literal["float32", "bf16", "int8"]
COUPLED: tuple[OptimizerName, ...] = ("adam", "laprop", "adabelief", "mvngrad")
DECOUPLED: tuple[OptimizerName, ...] = ("adamw", "lapropw", "adabeliefw", "mvngradw")
RULES = {rule.name.replace("-", "").lower(): rule for rule in CELLS}
"""The rule of each optimizer by its name in recipes, without the w of decoupled weight decay."""
NAMES = {name: rule.name for name, rule in RULES.items()}
"""The optimizer's name in the paper by its name in recipes."""


def get_cell(optimizer: str) -> str:
    """The name of an optimizer without the w of decoupled weight decay.

    >>> get_cell("mvngradw")
    'mvngrad'
    """
    return optimizer.removesuffix("w")


def parse_optimizer(name: str) -> str:
    """An optimizer as recipes write it: the names of our classes, such as MVNGradW, in lower case.

    >>> parse_optimizer("MVNGradW"), parse_optimizer("torch:SGD")
    ('mvngradw', 'torch:SGD')
    """
    return name.lower() if name.lower() in get_args(OptimizerName) else name


def has_eps_s(optimizer: str) -> bool:
    """Whether an optimizer normalizes by the variance, and so needs an eps_s."""
    return RULES[get_cell(optimizer)].centered


def hash_code(path: str) -> str:
    """Hash of the source of `package.module:name`, whose module is imported, and of the module that defines the name,
    if it is another; "" if there is no source.
    """
    module, _, name = path.partition(":")
    value = getattr(sys.modules.get(module), name, None)
    defined_in = value.__module__ if hasattr(value, "__qualname__") else module
    files = [getattr(sys.modules.get(each), "__file__", None) for each in dict.fromkeys((module, defined_in))]
    key = (*filter(None, files), id(value))
    if key not in _hashes:
        source = b"".join(Path(file).read_bytes() for file in files if file)
        _hashes[key] = value, hashlib.sha256(source).hexdigest()[:12] if any(files) else ""
    return _hashes[key][1]


_hashes: dict[tuple[str | int, ...], tuple[Any, str]] = {}
"""For what was imported, because its files may be edited while this process has it. It is kept, so that no other value
gets its id."""


def add_code(optimizer: str) -> str:
    """The name of a user's optimizer with the hash of its code, package.module:CLASS@HASH: changed code is another run.

    Other names are returned as they are, and so are those of modules that are not imported, which cannot be trained.
    """
    path, comma, options = optimizer.partition(",")
    module, _, name = path.partition(":")
    if module in ("torch", "zoo") or "@" in name or module not in sys.modules:
        return optimizer
    return f"{path}@{hash_code(path)}{comma}{options}"


def warmup_cosine(lr: float, step: int, warmup: int, steps: int, end: float = 0.0) -> float:
    """The learning rate of a step: up to `lr` in equal steps, then down along a half cosine to `end` of it.

    >>> [round(warmup_cosine(1.0, step, warmup=4, steps=8, end=0.1), 3) for step in range(9)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    height = (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2
    return lr * (end + (1 - end) * height)


class Bound(NamedTuple):
    """The valid values of a number in a recipe."""

    valid: str
    holds: Callable[[float], bool]


NOT_NEGATIVE = Bound("at least 0", lambda value: value >= 0)
COUNT = Bound("at least 1", lambda value: value >= 1)
SHARE = Bound("from 0 to 1", lambda value: 0 <= value <= 1)
DECAY = Bound("at least 0 and less than 1", lambda value: 0 <= value < 1)


@cache
def _field_types(recipe: type[Recipe]) -> dict[str, Any]:
    hints = get_type_hints(recipe)
    return {field.name: hints[field.name] for field in dataclasses.fields(recipe)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRecipe(Recipe, ABC):
    """The fields that the training loop reads. A task's recipe adds those of its data, model and schedule."""

    optimizer: str
    """mvngrad, adabelief, laprop or adam, followed by w for decoupled weight decay;
    torch:NAME, zoo:NAME or package.module:CLASS for another, options after a comma: torch:SGD,momentum=0.9"""
    batch_size: int
    """Samples per step."""
    lr: float
    """Peak learning rate of the schedule."""
    beta1: float | None
    """None, as for beta2 and eps: the third-party optimizer's default, or it has no such option."""
    beta2: float | None
    eps: float | None = 1e-8
    eps_s: float | None = None
    """Added to s at every step; required by AdaBelief and MVN-Grad, None for all others."""
    weight_decay: float = 0.0
    """Decoupled with the names that end in w; the default is the same for both."""
    state_dtype: StateDtype = "float32"
    """Data type of the optimizer's state."""
    eval_every: int = 1
    """Epochs between evaluations; the last epoch always ends with one."""
    precision: Literal["bf16", "float32"] = "bf16"
    """Of matrix products in forward and backward passes; parameters are float32, and float32 convolutions on a GPU use
    TF32, torch's default."""
    seed: int = 0
    """Of the initial weights and of all random numbers in training."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time, which are slower on a GPU; on a CPU all do."""
    beta_mean: float | None = added_field(None)
    """Decay of MVN-Grad's mean m; None is beta1, as in the paper."""
    z_clip: float | None = added_field(None)
    """Bound on the normalized gradient of LaProp and MVN-Grad; None is no bound."""
    lean: bool = added_field(False)
    """Rebuild m instead of storing it (MVN-Grad only)."""

    bounds: ClassVar[dict[str, Bound]] = {
        "batch_size": COUNT,
        "eval_every": COUNT,
        "lr": NOT_NEGATIVE,
        "eps_s": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "beta_mean": Bound("more than 0 and less than 1", lambda value: 0 < value < 1),
        "z_clip": Bound("more than 0", lambda value: value > 0),
        "seed": Bound("at least 0 and less than 2**32", lambda value: 0 <= value < 2**32),
    }
    """Valid values of fields that are not None; a subclass adds its own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", parse_optimizer(str(self.optimizer)))
        self._check_values()
        if self.is_third_party:
            object.__setattr__(self, "optimizer", add_code(self.optimizer))
            self._check_third_party()
        else:
            self._check_name()
            self._check_hyper_parameters()

    def _check_values(self) -> None:
        """Make whole numbers in float fields floats; raise InvalidInput if a value is invalid with every optimizer."""
        for name, kind in _field_types(type(self)).items():
            value = getattr(self, name)
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise InvalidInput(f"{name}={value!r} is invalid; choose from {', '.join(get_args(kind))}")
            types = {*get_args(kind)} if get_origin(kind) in (Union, UnionType) else {kind}
            if float in types:
                types.add(int)
            if types <= {int, float, NoneType} and (not isinstance(value, tuple(types)) or isinstance(value, bool)):
                wanted = "a number" if float in types else "an integer"
                raise InvalidInput(f"{name}={value!r} is invalid; it must be {wanted}")
            if isinstance(value, int) and float in types:
                object.__setattr__(self, name, float(value))  # 1 and 1.0 are equal and must have the same key
            if isinstance(value, int) and abs(value) >= 2**31 and name != "seed":
                raise InvalidInput(f"{name}={value!r} is invalid; it must be less than 2**31")
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidInput(f"{name}={value!r} is invalid; it must be finite")
        for name, bound in self.bounds.items():
            self._check_bound(name, bound)

    def _check_third_party(self) -> None:
        ours = {"eps_s": None, "beta_mean": None, "z_clip": None, "lean": False, "state_dtype": "float32"}
        for name, only in ours.items():
            if getattr(self, name) != only:
                raise InvalidInput(f"{name}={getattr(self, name)!r} is for our optimizers; others have {only}")
        if (self.beta1 is None) != (self.beta2 is None):  # they are one option, betas
            raise InvalidInput(
                f"beta1={self.beta1!r} and beta2={self.beta2!r} do not go together with optimizer={self.optimizer!r}; "
                "name both, or neither for its defaults"
            )

    def _check_name(self) -> None:
        names = get_args(OptimizerName)
        if self.optimizer in names:
            return
        if self.optimizer.partition(",")[0] in names:
            raise InvalidInput(f"optimizer={self.optimizer!r}: options of ours are settings of their own, as --lean")
        raise InvalidInput(
            f"optimizer={self.optimizer!r} is invalid; choose from {', '.join(names)}, torch:NAME such as torch:SGD, "
            "zoo:NAME and package.module:CLASS"
        )

    def _check_hyper_parameters(self) -> None:
        """Raise InvalidInput for a hyper-parameter that is invalid with this optimizer, by its name in a recipe.

        `Rule.check` has the same bounds and names betas[0] and betas[1], which no recipe has.
        """
        for name, bound in (("beta1", DECAY), ("beta2", DECAY), ("eps", NOT_NEGATIVE)):
            if getattr(self, name) is None:
                raise InvalidInput(f"{name}=None is invalid with optimizer={self.optimizer!r}; name a number")
            self._check_bound(name, bound)
        centered = has_eps_s(self.optimizer)
        if centered != (self.eps_s is not None):
            owners = ", ".join(cell for cell, rule in RULES.items() if rule.centered)
            others = f"it belongs to {owners}: leave it None, and set eps instead"
            remedy = "the paper's is 1e-8 for images, 0 for language" if centered else others
            raise InvalidInput(f"eps_s={self.eps_s!r} does not go with optimizer={self.optimizer!r}; {remedy}")
        for name, off in (("beta_mean", None), ("z_clip", None), ("lean", False)):
            if getattr(self, name) != off and name not in RULES[get_cell(self.optimizer)].options:
                owners = ", ".join(cell for cell, rule in RULES.items() if name in rule.options)
                raise InvalidInput(
                    f"{name}={getattr(self, name)!r} does not go with optimizer={self.optimizer!r}; it belongs to "
                    f"{owners}: leave it {off}"
                )
        if self.lean and self.beta_mean is not None:
            raise InvalidInput(f"beta_mean={self.beta_mean!r} does not go with lean, which stores no mean")
        if centered and self.beta_mean is None:
            self._check_bound("beta1", Bound(f"more than 0 with optimizer={self.optimizer!r}", lambda value: value > 0))

    def _check_bound(self, name: str, bound: Bound) -> None:
        value = getattr(self, name)
        if value is not None and not bound.holds(value):
            raise InvalidInput(f"{name}={value!r} is invalid; it must be {bound.valid}")

    @property
    def task_name(self) -> str:
        """What the recipe trains: the name of the recipe, or package.module:function of a user's task."""
        return self.name

    @property
    def is_third_party(self) -> bool:
        """Whether the optimizer is not one of ours: of torch, of pytorch-optimizer or of the user."""
        return ":" in self.optimizer

    @property
    @abstractmethod
    def epochs(self) -> int:
        """Length of a run: a field of image recipes; language recipes count steps."""

    @property
    def micro_batch_size(self) -> int:
        """Samples per forward and backward pass; the gradients of a step's micro-batches are averaged."""
        return self.batch_size

    @property
    def clip(self) -> float | None:
        """The largest gradient norm; larger gradients are scaled down to it."""
        return None

    @property
    def nonfinite_limit(self) -> int:
        """A run diverges after this many consecutive steps with a non-finite loss or gradient; fewer are skipped."""
        return 1

    def has_weight_decay(self, dimensions: int) -> bool:
        """Whether parameters with this number of dimensions get weight decay."""
        return True

    @abstractmethod
    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """The learning rate of a step, counted from 0."""


class Preset(NamedTuple):
    """A subcommand of `mvngrad train`, named after the recipe class; its options default to what `make` returns."""

    recipe: type[TrainingRecipe]
    make: Callable[[Any, int | None], TrainingRecipe]
    """Called with the name of one of our optimizers and the batch size on the command line, if there is one."""
    optimizer: OptimizerName
    """Trained if the command line names none. Its suffix w or none is also that of the settings for others."""
    help: str
