"""Table 1, as far as its runs are done, with the paper's numbers beside."""

from __future__ import annotations

from typing import Any

from mvngrad.lab.report.claims import load
from mvngrad.lab.report.figures.svg import Figure, Table
from mvngrad.lab.report.statistics import mean_and_deviation


def draw(result: dict[str, Any]) -> list[Figure]:
    paper = {claim.id: claim.values for claim in load()}
    rows = []
    for batch, cells in result["cells"].items():
        for cell, row in cells.items():
            found = [
                mean_and_deviation([value for value in row[name] if value is not None]) if row["seeds"] else "to come"
                for name in ("test_accuracy", "train_accuracy")
            ]
            known = [f"{paper[f'cifar-{kind}-{batch}'][cell]:.2f}" for kind in ("test", "train")]
            times = [value for value in row["seconds"] if value is not None]
            seconds = f"{sum(times) / len(times):.0f}" if times else ""
            rows.append((batch, cell, str(len(row["seeds"])), found[0], known[0], found[1], known[1], seconds))
    head = ("batch", "optimizer", "seeds", "test", "paper", "train, clean images", "paper", "seconds")
    caption = (
        f"{result['done']} of {result['of']} runs of 200 epochs are done. Mean ± deviation over seeds. The paper does "
        "not say how it measures train accuracy under MixUp; ours is of clean images. Seconds are without compilation, "
        "of runs that had the GPU to themselves. "
        f"{result['data']}"
    )
    return [Figure("ResNet-18 on CIFAR-100", caption, (), (), Table("Accuracy, %", head, tuple(rows)))]
