"""Measure on any model what the paper measures: variance gap, signal to noise, sign collapse, spikes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mvngrad.diagnostics.diagnosis import diagnose
from mvngrad.diagnostics.records import read_records
from mvngrad.diagnostics.sinks import JSONLines, TensorBoard
from mvngrad.diagnostics.spikes import SpikeRule, find_spikes
from mvngrad.diagnostics.statements import Diagnosis

if TYPE_CHECKING:
    from mvngrad.diagnostics.gap import VarianceGap as VarianceGap, variance_gap as variance_gap
    from mvngrad.diagnostics.monitor import Monitor as Monitor

# Imported on first use, because they import torch: records can be read and judged without it.
_LAZY = {"Monitor": "monitor", "VarianceGap": "gap", "variance_gap": "gap"}
__all__ = ["Diagnosis", "JSONLines", "SpikeRule", "TensorBoard", "diagnose", "find_spikes", "read_records", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"mvngrad.diagnostics.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
