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


def to_json(result: Any) -> Any:
    """A result as JSON values: dataclasses become dicts, arrays lists, NumPy's numbers Python's, inf and nan None.

    >>> to_json({"sizes": np.array([1.0, np.inf])})
    {'sizes': [1.0, None]}
    """
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {field.name: to_json(getattr(result, field.name)) for field in dataclasses.fields(result)}
    if isinstance(result, dict):
        return {key: to_json(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [to_json(value) for value in result]
    if isinstance(result, (np.ndarray, np.generic)):
        return to_json(result.tolist())
    return None if isinstance(result, float) and not math.isfinite(result) else result


def fit_exponent(x: Iterable[float], y: Iterable[float]) -> float:
    """The k of y = c x^k, by least squares on the logarithms.

    >>> round(fit_exponent([1.0, 10.0, 100.0], [3.0, 300.0, 30000.0]), 12)
    2.0
    """
    slope, _ = np.polyfit(np.log(np.asarray(list(x))), np.log(np.asarray(list(y))), 1)
    return float(slope)
