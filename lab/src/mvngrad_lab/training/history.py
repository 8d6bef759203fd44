"""What a run looked like step by step: its curve, its spikes, and the steps that were left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mvngrad.diagnostics import find_spikes


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the rows of metrics.jsonl that have `losses` and `norms`: what a report needs of them."""
    losses = [value for row in rows for value in row["losses"]]
    norms = [value for row in rows for value in row["norms"]]
    return {
        "nonfinite_steps": sum(row["nonfinite"] for row in rows),
        "loss_spikes": find_spikes(losses),
        "norm_spikes": find_spikes(norms),
        "curve": [[row["step"], row["loss"]] for row in rows if row["loss"] is not None],
    }
