"""Measure on any model what the paper measures: variance gap, signal to noise, sign collapse, spikes."""

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
    from mvngrad.diagnostics.spikes import SpikeRule as SpikeRule, find_spikes as find_spikes

# Imported on first use: records are read and judged, and spikes found, without torch.
_MODULES = {
    "Diagnosis": "diagnosis",
    "JSONLines": "sinks",
    "Monitor": "monitor",
    "SpikeRule": "spikes",
    "TensorBoard": "sinks",
    "VarianceGap": "gap",
    "diagnose": "diagnosis",
    "find_spikes": "spikes",
    "read_records": "sinks",
    "variance_gap": "gap",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"mvngrad.diagnostics.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
