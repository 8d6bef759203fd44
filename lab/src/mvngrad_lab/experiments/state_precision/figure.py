"""State in fewer bits: test accuracy and memory of MVN-Grad, validation loss of AdamW."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from mvngrad_lab.experiments.state_precision.arms import IMAGE_ARMS, INT8, OURS, TORCH
from mvngrad_lab.experiments.state_precision.judge import compute_loss
from mvngrad_lab.report import Row
from mvngrad_lab.report.figures.svg import Figure, Table
from mvngrad_lab.report.statistics import mean_and_deviation, welch, worse_by_at_most
from mvngrad_lab.report.tables import format_count, format_mean, get_values


def draw(result: dict[str, Any]) -> list[Figure]:
    states = result["states"]
    reference, rows = get_values(states["float32"], "test_accuracy"), []
    for state, row in states.items():
        values, compared = get_values(row, "test_accuracy"), ("", "", "")
        if state != "float32" and min(len(values), len(reference)) > 1:
            p = 2 * min(welch(values, reference), welch(reference, values))
            bound = worse_by_at_most(values, reference)
            compared = (f"{fmean(values) - fmean(reference):+.2f}", f"{p:.2g}", f"{bound:.2f}")
        rows.append((state, format_count(row), format_mean(row, "test_accuracy"), *compared, _format_bytes(row)))
    head = ("state", "runs", "test, %", "less float32", "p", "worse by at most", "bytes of state (a parameter)")
    caption = (
        f"{result['done']} of {result['of']} runs of 200 epochs at batch 1024 are done. Mean ± standard deviation over "
        "seeds; p of Welch's two-sided test; the bound is one-sided, of 95%. bf16 and int8 are rounded stochastically. "
        f"Bytes include scales and step counts. {result['data']}."
    )
    return [Figure("MVN-Grad's state in fewer bits", caption, table=Table("Test accuracy", head, tuple(rows)))]


def _format_bytes(row: Row) -> str:
    """Of the first run that counted them; runs of earlier versions did not."""
    for state_bytes, parameters in zip(row["state_bytes"], row["parameters"], strict=True):
        if state_bytes is not None and parameters:
            return f"{state_bytes:,} ({state_bytes / parameters:.2f})"
    return "not counted"


def draw_images(result: dict[str, Any]) -> list[Figure]:
    caption = (
        f"ResNet-18 on CIFAR-100, batch 1024, 30 epochs: {result['done']} of {result['of']} runs are done. Mean ± "
        "standard deviation over seeds. Points lost against float32 with their 95% interval, seeds as blocks, residual "
        f"of the four arms. bf16 and int8 are rounded at random; lean stores no mean. {result['data']}."
    )
    table = _make_table(result, "float32", tuple(IMAGE_ARMS), 1, ("test accuracy, %", "points lost"))
    return [Figure("MVN-Grad's state at 30 epochs", caption, table=table)]


def draw_adamw(result: dict[str, Any]) -> list[Figure]:
    caption = (
        f"GPT-2 30M, 1,000 steps: {result['done']} of {result['of']} runs are done. Mean ± standard deviation over "
        "seeds. Nats lost against torch's fused AdamW with their 95% interval, seeds as blocks, residual of torch's "
        f"and ours; for other packages, of theirs and torch's. {result['data']}."
    )
    table = _make_table(result, TORCH, (TORCH, OURS, INT8), -1, ("validation loss", "nats lost"))
    return [Figure("AdamW in 8 bits", caption, table=table)]


def _make_table(
    result: dict[str, Any], reference: str, compared: tuple[str, ...], sign: int, head: tuple[str, str]
) -> Table:
    """A row for each arm, compared with the reference: with the residual of `compared`, or of the two if not in it."""
    digits, rows = 2 if sign > 0 else 4, []
    for arm, by_seed in result["arms"].items():
        values = [value for value in by_seed.values() if value is not None]
        loss = (
            None
            if arm == reference
            else compute_loss(result["arms"], compared if arm in compared else (reference, arm), arm, reference, sign)
        )
        low, high = loss.interval() if loss else (0.0, 0.0)
        text = f"{loss.estimate:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})" if loss else ""
        diverged = f", {len(by_seed) - len(values)} diverged" if len(values) < len(by_seed) else ""
        mean = mean_and_deviation(values, digits) if values else "to come"
        rows.append((arm, f"{len(by_seed)}{diverged}", mean, text))
    return Table(f"Mean over seeds, and what is lost against {reference}", ("state", "seeds", *head), tuple(rows))


FIGURES = {"state-precision": draw, "state-precision-images": draw_images, "state-precision-adamw": draw_adamw}
