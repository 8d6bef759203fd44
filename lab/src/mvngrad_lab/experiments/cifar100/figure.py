"""Table 1, as far as its runs are done, with the paper's numbers beside."""

from __future__ import annotations

from typing import Any

from mvngrad_lab.report.claims import load
from mvngrad_lab.report.figures.svg import Figure, Table
from mvngrad_lab.report.seeds import mean, runs, seconds


def draw(result: dict[str, Any]) -> list[Figure]:
    paper = {claim.id: claim.values for claim in load()}
    rows = []
    for batch, cells in result["cells"].items():
        for cell, row in cells.items():
            test, train = (
                (mean(row, f"{kind}_accuracy"), f"{paper[f'cifar-{kind}-{batch}'][cell]:.2f}")
                for kind in ("test", "train")
            )
            rows.append((batch, cell, runs(row), *test, *train, seconds(row)))
    head = ("batch", "optimizer", "seeds", "test", "paper", "train, clean images", "paper", "seconds")
    caption = (
        f"{result['done']} of {result['of']} runs of 200 epochs are done. Mean ± deviation over seeds. The paper does "
        "not say how it measures train accuracy under MixUp; ours is of clean images. Seconds are without compilation, "
        "of runs that had the GPU to themselves. With the paper's ε_s of 1e-8 the root of s has a floor of 0.001, "
        "which is most of what AdaBelief and MVN-Grad divide by here (docs/log.md). "
        f"{result['data']}"
    )
    return [Figure("ResNet-18 on CIFAR-100", caption, (), (), Table("Accuracy, %", head, tuple(rows)))]
