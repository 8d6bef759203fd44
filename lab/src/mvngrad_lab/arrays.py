"""The rule on NumPy arrays in float64, and results as JSON values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvngrad.rule import Arithmetic

Floats = NDArray[np.float64]

NUMPY = Arithmetic(np.sqrt, np.maximum)
"""The arithmetic of the rule on NumPy arrays."""


def to_json(**result: Any) -> dict[str, Any]:
    """A result as JSON values: dataclasses become dicts, arrays and tensors lists or numbers, inf and nan None.

    >>> to_json(sizes=np.array([1.0, np.inf]))
    {'sizes': [1.0, None]}
    """
    return {name: _to_plain(value) for name, value in result.items()}


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _to_plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(part) for part in value]
    if hasattr(value, "tolist"):  # of NumPy or torch
        return _to_plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fit_exponent(x: Iterable[float], y: Iterable[float]) -> float:
    """The k of y = c x^k, by least squares on the logarithms.

    >>> round(fit_exponent([1.0, 10.0, 100.0], [3.0, 300.0, 30000.0]), 12)
    2.0
    """
    slope, _ = np.polyfit(np.log(np.asarray(list(x))), np.log(np.asarray(list(y))), 1)
    return float(slope)
