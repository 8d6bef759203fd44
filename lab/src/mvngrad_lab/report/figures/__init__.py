"""The figures of a record, drawn by the figure.py of its experiment."""

from __future__ import annotations

from fnmatch import fnmatchcase

import matplotlib

from mvngrad_lab.experiments import import_all
from mvngrad_lab.report.figures.style import RC
from mvngrad_lab.report.figures.svg import Figure
from mvngrad_lab.report.records import Record


def draw(record: Record) -> list[Figure]:
    """All figures of a record; none if no figure.py has its name among its FIGURES, whose keys may be patterns."""
    for module in import_all("figure"):
        for pattern, draw_figures in module.FIGURES.items():
            if fnmatchcase(record.name, pattern):
                with matplotlib.rc_context(RC | {"svg.hashsalt": record.key}):
                    return list(draw_figures(record.result))
    return []
