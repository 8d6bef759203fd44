"""What a run is: a frozen dataclass of plain values, and the hash of its content. Standard library only."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Base of all recipes: everything that decides a result is a field, and equal fields are one run.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Small(Recipe):
    ...     name: ClassVar[str] = "small"
    ...     lr: float = 0.1
    >>> Small(), Small().key == Small(lr=0.1).key, Small().key == Small(lr=0.2).key
    (Small(lr=0.1), True, False)
    """

    name: ClassVar[str]
    """Names the run's folder, together with the hash."""

    @property
    def settings(self) -> dict[str, Any]:
        """All fields as JSON knows them."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), allow_nan=False))
        return plain

    @property
    def key(self) -> str:
        """`name`-hash: what the run is called in a store."""
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", self.name):
            raise ValueError(f"name={self.name!r} of {type(self).__name__} is invalid; use a-z, 0-9 and -")
        content = json.dumps([self.name, self.settings], sort_keys=True, separators=(",", ":"))
        return f"{self.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
