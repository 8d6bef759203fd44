"""The update rule: four optimizers as the cells of a 2x2 table, written once.

The paper's two axes are *what* normalizes a gradient, its second moment or its variance, and *when* momentum is
applied, before or after normalizing:

                         momentum, then normalize    normalize, then momentum
    second moment v               Adam                       LaProp
    variance s                  AdaBelief                   MVN-Grad

`Rule.update` is all four. It knows no framework: operations that may work in place are methods of an `Arithmetic`, so
the same lines run on Python floats, NumPy arrays (in float64: the oracle of the tests), JAX arrays, torch tensors in
place, and lists of torch tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

Array = Any
"""A number, array, tensor or list of tensors: the type that the `Arithmetic` in use computes with."""


class Hyper(NamedTuple):
    """The hyper-parameters of one step; `lr` may be a 0-d tensor."""

    lr: Any = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    eps_s: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = False
    beta_mean: float | None = None
    z_clip: float | None = None
    maximize: bool = False

    @property
    def mean_decay(self) -> float:
        """The decay of m: `beta_mean`, or beta1 where the paper reuses it."""
        return self.beta1 if self.beta_mean is None else self.beta_mean

    @property
    def floor(self) -> float:
        """The lower bound of the root of the bias-corrected s.

        Algorithm 1 adds eps_s to the stored s at every step, so s contains eps_s (1 - beta2^t) / (1 - beta2).
        """
        return math.sqrt(self.eps_s / (1 - self.beta2))


class Arithmetic:
    """The operations of the rule, here in plain operators: for floats, NumPy, JAX, and torch out of place.

    A method whose name ends in an underscore may overwrite its first argument; the rule uses only its result.
    """

    def __init__(self, sqrt: Callable[[Array], Array], maximum: Callable[[Array, Array], Array]) -> None:
        self.sqrt = sqrt
        self.maximum_ = maximum

    def correction(self, beta: float, t: Any) -> Any:
        """1 - beta^t, the total weight of an average that started at zero, after t steps."""
        return 1 - beta**t

    def add(self, a: Array, b: Array, alpha: float = 1) -> Array:
        return a + alpha * b

    def add_(self, a: Array, b: Array, alpha: Any = 1) -> Array:
        return a + alpha * b

    def mul_(self, a: Array, b: Any) -> Array:
        return a * b

    def div_(self, a: Array, b: Any) -> Array:
        return a / b

    def sqrt_into(self, buffer: Array, a: Array) -> Array:
        """The root of a. Consumes `buffer`, a temporary of the same size: it may hold the result or be freed."""
        return self.sqrt(a)

    def lerp_(self, a: Array, b: Array, weight: float) -> Array:
        return (1 - weight) * a + weight * b

    def addcmul_(self, a: Array, b: Array, c: Array, value: float) -> Array:
        return a + value * b * c

    def addcdiv_(self, a: Array, b: Array, c: Array, value: Any) -> Array:
        """a + value b / c. Consumes c too."""
        return a + value * b / c


SCALAR = Arithmetic(math.sqrt, max)
"""The rule on Python floats."""

TINY = 1e-30
"""Avoids 0/0 at step 1, where 1 - beta^0 = 0; too small to change later steps."""

LOG_OF_ZERO = -1e30
"""For backends that compute 1 - beta^t as -expm1(t log beta): finite, so that its product with 0 steps is 0."""


def get_log(beta: float) -> float:
    """log(beta); `LOG_OF_ZERO` for 0."""
    return math.log(beta) if beta else LOG_OF_ZERO


def may_be_nonzero(number: Any) -> bool:
    """False for the numbers 0 and 0.0 only. The value of a tensor cannot be read under compilation."""
    return not isinstance(number, (int, float)) or number != 0


@dataclass(frozen=True)
class Rule:
    """One cell of the table.

    >>> state = MVNGRAD.init(1.0)
    >>> x, state = MVNGRAD.update(1.0, 0.5, state, t=1, hyper=Hyper(lr=0.1, eps=0.0), ops=SCALAR)
    >>> round(1.0 - x, 12)  # the first step is lr/beta1 for every gradient
    0.111111111111
    """

    name: str
    centered: bool
    """Normalize by the variance s, not by the second moment v."""
    momentum_last: bool
    """Apply momentum after normalizing, not before."""
    lean: bool = False
    """Rebuild m from u and s instead of storing it: MVN-Grad in Adam's memory, exact while s is constant."""
    state_names: tuple[str, ...] = field(init=False)
    """The names of this cell's state, a subset of m, v, s and u."""
    normalizer: str = field(init=False)
    """The name of the average whose root divides: v or s."""
    options: tuple[str, ...] = field(init=False)
    """The hyper-parameters of this cell that not every cell has."""
    missing_options: tuple[str, ...] = field(init=False)
    """The hyper-parameters of other cells that this one does not have."""

    def __post_init__(self) -> None:
        stores_mean = (self.centered or not self.momentum_last) and not self.lean
        names = {"m": stores_mean, "v": not self.centered, "s": self.centered, "u": self.momentum_last}
        options = {
            "eps_s": self.centered,
            "beta_mean": stores_mean and self.momentum_last,
            "lean": self.centered and self.momentum_last,
            "z_clip": self.momentum_last,
        }
        object.__setattr__(self, "normalizer", "s" if self.centered else "v")
        object.__setattr__(self, "state_names", tuple(name for name, exists in names.items() if exists))
        object.__setattr__(self, "options", tuple(option for option, exists in options.items() if exists))
        object.__setattr__(self, "missing_options", tuple(option for option in options if option not in self.options))

    def init(self, x: Array) -> dict[str, Array]:
        """The state before the first step of parameters x: zeros."""
        return {name: 0 * x for name in self.state_names}  # noqa: C420  each name needs its own array

    def update(
        self, x: Array, g: Array, state: Mapping[str, Array], t: Any, hyper: Hyper, ops: Arithmetic
    ) -> tuple[Array, dict[str, Array]]:
        """Step t = 1, 2, ... of Algorithm 1 from parameters x and gradient g: the new parameters and state."""
        lr, beta1, beta2 = hyper.lr, hyper.beta1, hyper.beta2
        new: dict[str, Array] = {}

        if hyper.maximize:
            g = -g
        if may_be_nonzero(hyper.weight_decay) and hyper.decoupled:
            x = ops.mul_(x, 1 - lr * hyper.weight_decay)
        elif may_be_nonzero(hyper.weight_decay):
            g = ops.add(g, x, alpha=hyper.weight_decay)

        if "m" in self.state_names:
            new["m"] = m = ops.lerp_(state["m"], g, 1 - hyper.mean_decay)  # m = b1 m + (1-b1) g
        elif self.lean:
            m = ops.lerp_(self.reconstruct_mean(state, t, hyper, ops), g, 1 - beta1)
        deviation = g - m if self.centered else g  # from the mean m, or from 0
        r = ops.mul_(state[self.normalizer], beta2)  # r is s or v, the average of deviation^2
        r = ops.addcmul_(r, deviation, deviation, 1 - beta2)  # r = b2 r + (1-b2) deviation^2, plus eps_s
        if may_be_nonzero(hyper.eps_s):
            r = ops.add_(r, hyper.eps_s)
        new[self.normalizer] = r
        root = ops.sqrt_into(deviation, r) if self.centered else ops.sqrt(r)

        c_m, c_v = ops.correction(beta1, t), ops.correction(beta2, t)  # bias corrections: of m and u, and of r
        k = c_v**0.5  # sqrt(r) / k = sqrt(r/c_v)
        if not self.momentum_last:
            root = ops.add_(ops.div_(root, k), hyper.eps)  # sqrt(r/c_v) + eps, in torch's order
            return ops.addcdiv_(x, m, root, -lr / c_m), new
        root = ops.add_(root, hyper.eps * k)  # k (sqrt(r/c_v) + eps), which saves one pass over r
        if hyper.z_clip is not None:
            root = ops.maximum_(root, ops.mul_(abs(g), k / hyper.z_clip))  # |z| <= z_clip
        new["u"] = u = ops.addcdiv_(ops.mul_(state["u"], beta1), g, root, (1 - beta1) * k)  # u = b1 u + (1-b1) z
        return ops.add_(x, u, alpha=-lr / c_m), new

    def reconstruct_mean(self, state: Mapping[str, Array], t: Any, hyper: Hyper, ops: Arithmetic) -> Array:
        """An estimate of the last m, u (sqrt(s/c_v) + eps): exact if every gradient was divided by the same root."""
        k = (ops.correction(hyper.beta2, t - 1) + TINY) ** 0.5
        return ops.mul_(ops.add_(ops.div_(ops.sqrt(state["s"]), k), hyper.eps), state["u"])

    def check(self, hyper: Hyper, owner: str | None = None, names: Mapping[str, str] = MappingProxyType({})) -> None:
        """Raise a ValueError that names the first hyper-parameter out of range.

        The message begins with `owner`, by default the cell. `names` replaces names of arguments in torch by others.
        """

        def demand(name: str, value: Any, holds: Callable[[float], bool], valid: str) -> None:
            try:
                number = float(value) if hasattr(value, "__float__") else math.nan
            except (TypeError, ValueError, RuntimeError, OverflowError):  # an array of several, a huge int
                number = math.nan
            if not (math.isfinite(number) and holds(number)):
                name = names.get(name, name)
                raise ValueError(f"{owner or self.name}: {name}={value!r} is invalid; it must be {valid}")

        for name in ("lr", "eps", "eps_s", "weight_decay"):
            demand(name, getattr(hyper, name), lambda number: number >= 0, "finite and >= 0")
        for name, value in (("betas[0]", hyper.beta1), ("betas[1]", hyper.beta2), ("beta_mean", hyper.mean_decay)):
            demand(name, value, lambda number: 0 <= number < 1, "in [0, 1)")
        if self.centered:
            name = "betas[0]" if hyper.beta_mean is None else "beta_mean"
            why = "> 0 here: at 0 the mean m equals the gradient, and no variance is left to normalize by"
            demand(name, hyper.mean_decay, lambda number: number > 0, why)
        if hyper.z_clip is not None:
            demand("z_clip", hyper.z_clip, lambda number: number > 0, "finite and > 0, or None for no bound")


ADAM = Rule("Adam", centered=False, momentum_last=False)
ADABELIEF = Rule("AdaBelief", centered=True, momentum_last=False)
LAPROP = Rule("LaProp", centered=False, momentum_last=True)
MVNGRAD = Rule("MVN-Grad", centered=True, momentum_last=True)
LEAN = Rule("lean MVN-Grad", centered=True, momentum_last=True, lean=True)
CELLS = (ADAM, ADABELIEF, LAPROP, MVNGRAD)
