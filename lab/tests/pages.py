"""The pages whose numbers are compared with the stored runs."""

from functools import cache
from pathlib import Path

import pytest

from mvngrad_lab.report import load_records

ROOT = Path(__file__).parents[2]


def read(name):
    """A page of the docs, on one line."""
    return " ".join((ROOT / "docs" / name).read_text().split())


@cache
def load_results():
    """All records of results/, read once: a test must not change them."""
    return load_records(ROOT / "results", warn=pytest.fail)
