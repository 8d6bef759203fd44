"""MVN-Grad, momentum on variance-normalized gradients, and the three related optimizers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mvngrad.optim import *  # noqa: F403

__version__ = "0.1.0"
__all__ = [  # noqa: F405
    "AdaBelief", "AdaBeliefW", "Adam", "AdamW", "LaProp", "LaPropW", "MVNGrad", "MVNGradW", "convert_state_dict",
    "from_adamw", "get_master_state_dict", "load_master_state_dict", "release_gradients", "to_adamw",
]  # fmt: skip
_SUBPACKAGES = ("diagnostics", "optim")


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("mvngrad.optim"), name)
    if name in _SUBPACKAGES:
        return import_module(f"mvngrad.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_SUBPACKAGES, "__version__"]
