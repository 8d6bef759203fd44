"""Generated runs of the floor experiment, and the verdicts on them."""

import json

import pytest

from mvngrad_lab.experiments.floor import records
from mvngrad_lab.report import Sources
from mvngrad_lab.report.verdicts import find_judges

JUDGES = find_judges()
NOISE = 0.2
"""Deviation over seeds of the generated runs."""


def write_runs(folder, results):
    """Recipes and their results, as `export` writes them."""
    rows = [
        {
            "key": recipe.key,
            "status": "finished",
            "settings": {},
            "metrics": {"steps": 1, **metrics},
            "gradient_rms": [1e-3],
        }
        for recipe, metrics in results
    ]
    (folder / records.get_file_name("made-up")).write_text(json.dumps({"runs": rows}))


def collect(folder):
    return {table.name: table for table in records.collect(Sources((folder,), {}, warn=pytest.fail))}


def judge(folder, claim, target):
    return JUDGES[claim](collect(folder)[target].result)
