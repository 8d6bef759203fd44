"""The figures of a run, drawn by the figure.py of its experiment."""

from __future__ import annotations

from fnmatch import fnmatchcase

import matplotlib

from mvngrad_lab.experiments import import_all
from mvngrad_lab.report.figures.style import RC
from mvngrad_lab.report.figures.svg import Figure
from mvngrad_lab.store import FinishedRun


def draw(run: FinishedRun) -> list[Figure]:
    """All figures of a run; none if no figure.py has its name among its FIGURES, whose keys may be patterns."""
    for module in import_all("figure"):
        for pattern, draw_figures in module.FIGURES.items():
            if fnmatchcase(run.name, pattern):
                with matplotlib.rc_context(RC | {"svg.hashsalt": run.key}):
                    return list(draw_figures(run.result))
    return []
