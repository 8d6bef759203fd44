"""The training loss after the switch, against that of AdamW going on."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from mvngrad_lab.experiments.switch.records import ARMS, WINDOW
from mvngrad_lab.report.figures.style import BOUND, MARKS, draw_curve, make_axes
from mvngrad_lab.report.figures.svg import Figure, Table, make_panel
from mvngrad_lab.report.statistics import mean_and_deviation

STYLES = {
    "converted": MARKS["MVN-Grad"].with_label("switched, from_adamw"),
    "fresh": BOUND.with_label("switched, fresh state"),
    "MVN-GradW": MARKS["AdaBelief"].with_label("MVN-GradW from the start"),
}


def draw(result: dict[str, Any]) -> list[Figure]:
    seeds, recipe = result["seeds"], result["recipe"]
    at = make_axes("steps after the switch", f"training loss less AdamW's, mean of {WINDOW} steps and all seeds, nats")
    for arm, mark in STYLES.items():
        curves = [_differences(seed["losses"][arm], seed["losses"]["AdamW"]) for seed in seeds]
        draw_curve(at, mark, *zip(*enumerate(map(fmean, zip(*curves, strict=True)), start=WINDOW), strict=True))
    words = "Largest difference in the mean over seeds: " + ", ".join(
        f"{arm} {fmean(seed['bump'][arm] for seed in seeds):.4f}" for arm in ("converted", "fresh")
    )
    rows: list[tuple[str, ...]] = []
    for arm in ARMS:
        bump = mean_and_deviation([seed["bump"][arm] for seed in seeds], 4) if arm in seeds[0]["bump"] else "–"
        end = mean_and_deviation([seed["validation_loss"][arm] for seed in seeds], 4)
        rows.append((arm, str(len(seeds)), bump, end))
    head = ("arm", "seeds", "bump, nats", "validation loss at the end")
    table = Table("Switch at half of training", head, tuple(rows))
    caption = (
        f"GPT-2 {recipe['model']}, {recipe['steps']} steps on the stand-in, lr {recipe['lr']:g}, switched at half. "
        "All arms of a seed see the same data at every step. Mean ± standard deviation over seeds. "
        f"Data: {result['data']}."
    )
    panel = make_panel(at, "Training loss after the switch", words)
    return [Figure("From AdamW to MVN-GradW at half of training", caption, (panel,), tuple(STYLES.values()), table)]


def _differences(losses: list[float], reference: list[float]) -> list[float]:
    differences = [loss - other for loss, other in zip(losses, reference, strict=True)]
    width = min(WINDOW, len(differences))
    return [fmean(differences[i - width : i]) for i in range(width, len(differences) + 1)]


FIGURES = {"switch": draw}
