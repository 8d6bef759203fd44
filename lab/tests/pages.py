"""The pages whose numbers are compared with the stored runs."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def read(name):
    """A page of the docs, on one line."""
    return " ".join((ROOT / "docs" / name).read_text().split())
