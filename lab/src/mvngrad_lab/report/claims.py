"""Every claim of the paper that has a number or a direction, with our rule for a verdict: claims.toml."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Claim:
    id: str
    group: str
    where: tuple[str, ...]
    """Labels of the paper; none for what is ours."""
    says: str
    value: str
    """The paper's number or direction."""
    rule: str
    target: str
    """What decides it."""
    needs: str = ""
    """Why it is not run, where this version cannot run it."""
    known: bool = False
    """Whether the rule was written after a first look at the numbers; else before."""
    values: dict[str, float] = field(default_factory=dict)
    """The paper's numbers, by optimizer, where it has a column of them."""


@cache
def load() -> tuple[Claim, ...]:
    """All claims, in the order of the file."""
    text = files("mvngrad_lab.report").joinpath("claims.toml").read_text(encoding="utf-8")
    claims = []
    for group in tomllib.loads(text)["group"]:
        shared = {name: value for name, value in group.items() if name not in ("name", "claim")}
        for entry in group["claim"]:
            given = {**shared, **entry, "group": group["name"]}
            claims.append(Claim(**{**given, "where": tuple(given.get("where", ()))}))
    return tuple(claims)
