"""Measure on any model what the paper measures: variance gap, signal to noise, sign collapse, spikes. The files:

    monitor.py, state.py, measures.py, spikes.py   record a training: a hook, what it samples, what it computes
    records.py, sinks.py                           what a record is; read records, write records
    diagnosis.py, signal_to_noise.py, floor.py     judge records, in the words of statements.py
    gap.py                                         the variance gap at one state, without records

Reading and judging records needs no torch.
"""

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

# Imported on first use, because they import torch.
_LAZY = {"Monitor": "monitor", "VarianceGap": "gap", "variance_gap": "gap"}
__all__ = ["Diagnosis", "JSONLines", "SpikeRule", "TensorBoard", "diagnose", "find_spikes", "read_records", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"mvngrad.diagnostics.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
