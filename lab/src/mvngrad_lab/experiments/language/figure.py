"""Table 2 on the stand-in, as far as its runs are done, and the time and memory of a training step of GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mvngrad_lab.experiments.language.records import shortened
from mvngrad_lab.report import Row
from mvngrad_lab.report.figures.style import cell_mark, draw_curve, make_axes
from mvngrad_lab.report.figures.svg import Figure, Panel, Table, make_panel
from mvngrad_lab.report.tables import bold_best, format_count, format_mean, format_seconds
from mvngrad_lab.report.verdicts import NOT_REPRODUCED, UNDECIDED, Verdict

STAND_IN = (
    "Trained on a stand-in, English Wikipedia of 2014: compare optimizer with optimizer; no number here is comparable "
    "with the paper's."
)
METRICS = {
    "loss, stand-in held out": "validation_loss",
    "loss, WikiText-103 validation": "wikitext103_loss",
    "train loss, stand-in": "train_loss",
}
COUNTS = {"loss spikes": "loss_spikes", "norm spikes": "norm_spikes", "skipped steps": "nonfinite_steps"}
SPIKES = (
    "A spike is a step whose loss, or gradient norm before clipping, is more than 6 robust deviations above the median "
    "of the 100 steps before it; steps whose loss or gradient is not finite are skipped."
)
LARGE = shortened()[0]
TOPICS = ("signal", "sign collapse", "epsilon floor", "normalizer", "order")
"""Of a diagnosis."""


def draw_tables(result: dict[str, Any]) -> list[Figure]:
    figures = [_draw_small(result), _draw_rates(result), _draw_tuned(result), _draw_large(result)]
    return [*figures, _draw_monitored(result["monitored"])] if result["monitored"] else figures


def _draw_small(result: dict[str, Any]) -> Figure:
    caption = (
        f"{STAND_IN} {result['done']} of {result['of']} runs of all four tables on the stand-in are done; "
        "`docs/results.md` says what they show. 3,000 steps "
        "instead of the paper's 100,000, with coupled weight decay of 10⁻⁶, chosen in a pilot of 1,500 steps on the "
        "same text that compared the four as well. Mean ± standard deviation over seeds; counts for each seed; seconds "
        f"do not include compilation, and are of runs that had the GPU to themselves. {SPIKES} Data: {result['data']}."
    )
    table = _make_table("30M, on the stand-in", result["cells"])
    return Figure("GPT-2 30M on the stand-in", caption, table=table)


def _draw_rates(result: dict[str, Any]) -> Figure:
    rates = list(next(iter(result["rates"].values())))
    rows = []
    for cell, tried in result["rates"].items():
        best = result["best_rate"][cell] or ""
        edge = {rates[0]: ", the lowest tried", rates[-1]: ", the highest tried"}.get(best, "")
        losses = bold_best([format_mean(row, "validation_loss", 4) for row in tried.values()], higher=False)
        rows.append((cell, str(sum(len(row["seeds"]) for row in tried.values())), best + edge, *losses))
    head = ("optimizer", "runs", "best rate", *(f"lr {lr}" for lr in rates))
    caption = (
        f"{STAND_IN} Loss on held-out text, one seed, 1,000 steps: whether the rate that the paper selected for all "
        "four, which the runs above use, suits each of them here. A best rate at the end of the range may not be the "
        "best there is."
    )
    table = Table("30M, loss at each rate on the stand-in", head, tuple(rows))
    return Figure("Learning rates on the stand-in", caption, table=table)


def _draw_tuned(result: dict[str, Any]) -> Figure:
    rates = ", ".join(f"{cell} {rate}" for cell, rate in result["tuned_rate"].items())
    which = (
        "for each its best in the sweep, of 1,000 steps; with 3,000 steps only these and that of the first table ran"
        if result["tuned_rate"] == result["best_rate"]
        else "which are not the best of the sweep for each, or the sweep is not done"
    )
    caption = f"{STAND_IN} As the first table, at other rates: {rates}; {which}."
    table = _make_table("30M, at other rates on the stand-in", result["tuned"])
    return Figure("GPT-2 30M on the stand-in, at other rates", caption, table=table)


def _draw_large(result: dict[str, Any]) -> Figure:
    curves = {cell: row["curve"][0] for cell, row in result["large"].items() if row["seeds"] and not row["diverged"]}
    panels: tuple[Panel, ...] = ()
    if curves:
        at = make_axes("step", f"training loss on the stand-in, mean of {LARGE.epoch_steps} steps")
        for cell, points in curves.items():
            draw_curve(at, cell_mark(cell), *zip(*points, strict=True))
        words = f"Mean training loss of the last {LARGE.epoch_steps} steps, on the stand-in: " + ", ".join(
            f"{cell} {points[-1][1]:.3f}" for cell, points in curves.items()
        )
        panels = (make_panel(at, "Training loss, 124M on the stand-in", words),)
    caption = (
        f"{STAND_IN} One run each of {LARGE.steps} steps instead of the paper's 120,000: they show that each trains "
        f"at full size, not which is better. Decoupled weight decay of 0.1. {SPIKES} "
        f"Here only the last {LARGE.steps - 100} steps have 100 before them."
    )
    table = _make_table("124M, on the stand-in", result["large"])
    return Figure("GPT-2 124M on the stand-in", caption, panels, tuple(map(cell_mark, curves)), table)


def _draw_monitored(monitored: list[dict[str, Any]]) -> Figure:
    caption = (
        f"{STAND_IN} A Monitor recorded the run of each with seed 0. These are its last records of the matrices, and "
        "what the paper's theory concludes from them. Signal is the median over coordinates of |μ| / σ; the two shares "
        "are of coordinates. `mvngrad diagnose` gives the reasons for a whole record."
    )
    rows = [
        (
            *(row["optimizer"], row["model"], "{} to {}".format(*row["steps"])),
            *(_format_statement(topic, *row[topic]) for topic in TOPICS),
        )
        for row in monitored
    ]
    table = Table("Monitors on the stand-in", ("optimizer", "model", "steps", *TOPICS), tuple(rows))
    return Figure("What Monitors saw on the stand-in", caption, table=table)


def _format_statement(topic: str, verdict: str, number: float | None) -> str:
    if number is None:
        return verdict
    return f"{number:.3f}, {verdict}" if topic == "signal" else f"{number:.1%}, {verdict}"


def _make_table(title: str, cells: dict[str, Row]) -> Table:
    rows = []
    columns = [
        bold_best([format_mean(row, name, 4) for row in cells.values()], higher=False) for name in METRICS.values()
    ]
    for (cell, row), *losses in zip(cells.items(), *columns, strict=True):
        counts = [", ".join(map(_format_count, row[name])) for name in COUNTS.values()]
        rows.append((cell, format_count(row), *losses, *counts, format_seconds(row)))
    return Table(title, ("optimizer", "runs", *METRICS, *COUNTS, "seconds"), tuple(rows))


def _format_count(value: list[int] | int | None) -> str:
    """`value` is a list of steps, or their number."""
    return "–" if value is None else str(len(value) if isinstance(value, list) else value)


def draw_throughput(result: dict[str, Any]) -> list[Figure]:
    rows = [
        (model, row["name"], f"{row['tokens_per_second']:,.0f}", f"{row['projected_seconds'] / 3600:.2f}")
        for model, loops in result["throughput"].items()
        for row in loops
    ]
    caption = (
        "Medians over rounds in one run. Ours is a whole step in one CUDA graph; plain is the loop most people write, "
        "with torch's fused AdamW. Hours are for all steps of the recipe, without evaluations. "
        f"Tokens: {result['data']}."
    )
    table = Table("Throughput", ("model", "loop", "tokens a second", "hours of a run"), tuple(rows))
    overheads = [_draw_overhead(model, overhead) for model, overhead in result["overhead"].items()]
    return [Figure("Training GPT-2", caption, table=table), *overheads]


def _draw_overhead(model: str, overhead: dict[str, Any]) -> Figure:
    rows = []
    for row in overhead["rows"]:
        times = f"{1e3 * row['optimizer_seconds']:.3f}", f"{row['step_seconds']:.4f}", f"{row['ratio']:.4f}"
        memory = f"{row['state_bytes']:.2f}", f"{2 + row['state_bytes'] / 4:.2f}"
        peak = f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else ""
        rows.append((row["name"], *times, f"{row['paper']:.3f}" if row["paper"] else "", *memory, peak))
    head = ("optimizer, state", "optimizer, ms", "step, s", "of torch", "paper", "state", "of model", "peak, GiB")
    caption = (
        "One step of the recipe; forward and backward are the same for all. Of torch: the time of the step relative to "
        "torch's fused AdamW; paper: the time of a whole run relative to AdamW. State: bytes for each parameter; of "
        "model: parameters, gradients and state relative to the parameters. Peak: the most memory of all tensors."
    )
    table = Table("One step", head, tuple(rows))
    return Figure(f"Memory and time of an optimizer, {model}", caption, table=table)


def describe(result: dict[str, Any], verdicts: Mapping[str, Verdict]) -> str:
    """The finding on the stand-in, once all four are compared at one rate, or each at its best."""
    order, tuned = (_describe_order(verdicts[f"stand-in-{name}"]) for name in ("order", "tuned-order"))
    if not order:
        return ""
    text = f"On a 30M language model {order} (3,000 steps of a stand-in text)."
    return f"{text} At the best rate of each {tuned}." if tuned else text


def _describe_order(verdict: Verdict) -> str:
    """Which optimizer is ahead, and the range of losses; empty if the four are not compared."""
    if verdict.strip is None:
        return ""
    losses = [row.value for row in verdict.strip.rows]
    words = {NOT_REPRODUCED: "**MVN-Grad is not ahead**", UNDECIDED: "**no optimizer is shown to be ahead**"}
    numbers = f"validation loss {min(losses):.3f} to {max(losses):.3f}, n\u00a0=\u00a0{verdict.strip.rows[0].n}"
    return f"{words.get(verdict.status, '**MVN-Grad is ahead**')}: {numbers}"


FINDINGS = {"table2": (30, describe)}
FIGURES = {"table2": draw_tables, "throughput-gpt2": draw_throughput}
