"""Every claim of the paper that has a number or a direction, with our rule for a verdict.

They are in the claims.toml of each experiment's folder, in groups, which are headings of the report. A field of a group
holds for each of its claims. `order` sorts the groups of all files.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from mvngrad_lab import experiments

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Claim:
    id: str
    group: str
    where: tuple[str, ...]
    """Labels of the paper; none if the claim is ours."""
    says: str
    value: str
    """The paper's number or direction."""
    rule: str
    target: str
    """The name of the experiment, table, sweep or benchmark that decides it."""
    needs: str = ""
    """What it takes to decide it, if `mvngrad reproduce` cannot."""
    known: bool = False
    """Whether the rule was written after a first look at the numbers; else before."""
    values: dict[str, float] = field(default_factory=dict)
    """The paper's numbers by optimizer, if it has a column of them."""


@cache
def load_claims() -> tuple[Claim, ...]:
    """All claims, sorted by the order of their groups."""
    groups = sorted((group for topic in experiments.find_topics() for group in _read(topic)), key=_order)
    claims = []
    for group in groups:
        shared = {name: value for name, value in group.items() if name not in ("name", "order", "claim")}
        for entry in group["claim"]:
            fields = {"where": (), **shared, **entry, "group": group["name"]}
            claims.append(Claim(**{**fields, "where": tuple(fields["where"])}))
    return tuple(claims)


def _read(topic: str) -> list[dict[str, Any]]:
    path = files(f"{experiments.__name__}.{topic}").joinpath("claims.toml")
    return list(tomllib.loads(path.read_text(encoding="utf-8"))["group"]) if path.is_file() else []


def _order(group: dict[str, Any]) -> float:
    return float(group.get("order", 1e6))
