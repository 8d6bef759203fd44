"""What the paper measures, for anyone's model: variance gap, signal to noise, sign collapse, spikes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mvngrad.diagnostics.diagnosis import Diagnosis as Diagnosis, diagnose as diagnose
    from mvngrad.diagnostics.gap import VarianceGap as VarianceGap, variance_gap as variance_gap
    from mvngrad.diagnostics.monitor import Monitor as Monitor
    from mvngrad.diagnostics.sinks import (
        JSONLines as JSONLines,
        TensorBoard as TensorBoard,
        read_records as read_records,
    )

# By need: a record is read and judged without torch.
_FILES = {
    "Diagnosis": "diagnosis",
    "JSONLines": "sinks",
    "Monitor": "monitor",
    "TensorBoard": "sinks",
    "VarianceGap": "gap",
    "diagnose": "diagnosis",
    "read_records": "sinks",
    "variance_gap": "gap",
}
__all__ = [
    "Diagnosis",
    "JSONLines",
    "Monitor",
    "TensorBoard",
    "VarianceGap",
    "diagnose",
    "read_records",
    "variance_gap",
]


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(import_module(f"mvngrad.diagnostics.{_FILES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
