"""What a step of GPT-2 124M takes and holds with each optimizer, and tokens a second; what the sweep engine adds."""

from __future__ import annotations

from typing import Any

from mvngrad_lab.report.figures.svg import Figure, Table


def draw(result: dict[str, Any]) -> list[Figure]:
    loops = [
        (model, row["name"], f"{row['tokens_per_second']:,.0f}", f"{row['projected_seconds'] / 3600:.2f}")
        for model, rows in result["throughput"].items()
        for row in rows
    ]
    caption = (
        "Medians over rounds in one run. Ours is a whole step in one CUDA graph; plain, the loop most people write, "
        "with torch's fused AdamW. Hours are for the recipe's steps, evaluations not counted. "
        f"Tokens: {result['data']}."
    )
    head = ("model", "loop", "tokens a second", "hours of a run")
    found = [Figure("Training GPT-2", caption, (), (), Table("Throughput", head, tuple(loops)))]
    for model, each in result["overhead"].items():
        found.append(_overhead(model, each))
    return found


def _overhead(model: str, each: dict[str, Any]) -> Figure:
    rows = []
    for row in each["rows"]:
        times = f"{1e3 * row['optimizer_seconds']:.3f}", f"{row['step_seconds']:.4f}", f"{row['ratio']:.4f}"
        kept = f"{row['state_bytes']:.2f}", f"{2 + row['state_bytes'] / 4:.2f}"
        peak = f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else ""
        rows.append((row["name"], *times, f"{row['paper']:.3f}" if row["paper"] else "", *kept, peak))
    head = ("optimizer, state", "optimizer, ms", "step, s", "of torch", "paper", "state", "of model", "peak, GiB")
    caption = (
        "One step of the recipe, forward and backward shared by all. Of torch: its time over that with torch's fused "
        "AdamW; paper: the time of a whole run over that with AdamW. State: bytes for each parameter; of model: "
        "parameters, gradients and state over the parameters. Peak: the most memory that tensors held."
    )
    return Figure(f"Memory and time of an optimizer, {model}", caption, (), (), Table("One step", head, tuple(rows)))


def engine(result: dict[str, Any]) -> list[Figure]:
    rows = []
    for row in result["rows"]:
        times = f"{row['milliseconds']:.0f}", f"{row['milliseconds_95']:.0f}", f"{row['runs_per_second']:.0f}"
        rows.append((row["store"], str(row["workers"]), str(row["runs"]), *times, str(row["errors"])))
    caption = "Runs that return at once: what passes in a worker from the end of one to the start of the next."
    head = ("store", "workers", "runs", "of a run, ms", "95% below, ms", "runs a second", "errors")
    return [Figure("What the sweep engine adds to a run", caption, (), (), Table("Engine", head, tuple(rows)))]
