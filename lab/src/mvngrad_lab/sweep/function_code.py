"""The code of a sweep's function, so that results of another version are not taken for its own."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from mvngrad_lab.recipe import Recipe

DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
"""Statements that define a name and have a body."""


def describe_function(run: Callable[..., Any]) -> dict[str, str]:
    """The name of a sweep's function, and a hash of its code: its source, what that uses of its module, and the plain
    values that it is bound to. It is computed at the first call for a worker.
    """
    if id(run) not in _descriptions:
        _descriptions[id(run)] = run, _describe_function(run)
    return _descriptions[id(run)][1]


_descriptions: dict[int, tuple[Callable[..., Any], dict[str, str]]] = {}
"""By id, because not all functions are hashable. They are kept, so that no other gets the id."""


def forget_descriptions() -> None:
    """Make `describe_function` compute again."""
    _descriptions.clear()


def _describe_function(run: Callable[..., Any]) -> dict[str, str]:
    function = run.func if isinstance(run, partial) else run
    named: Any = function if hasattr(function, "__qualname__") else type(function)  # an object has none
    bound = [*run.args, *sorted(run.keywords.items())] if isinstance(run, partial) else []
    bound += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    owner = function.__self__ if inspect.ismethod(function) else function
    bound += [] if isinstance(owner, type | FunctionType) else sorted(getattr(owner, "__dict__", {}).items())
    code = _read_source(named) + "".join(map(_describe_value, bound))
    return {"name": f"{named.__module__}:{named.__qualname__}", "code": hashlib.sha256(code.encode()).hexdigest()[:16]}


@cache  # its file may be edited while this process still runs what it imported
def _read_source(function: Any) -> str:
    """The source of a function or class and of what it uses of its module; "" if there is none."""
    source = ""
    with suppress(OSError, TypeError, SyntaxError):
        lines, first = inspect.getsourcelines(function)
        source = "".join(lines)
        return source + _read_used_code(first, sys.modules[function.__module__])
    return source


def _read_used_code(line: int, module: ModuleType) -> str:
    """The top-level statement of a module that contains a line, and those that define what it uses, also indirectly.

    Recipes are left out: their settings are in the key of a run.
    """
    text = inspect.getsource(module)
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    definitions: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for name in _find_defined_names(statement):
            if not _is_recipe(getattr(module, name, None)):
                definitions.setdefault(name, []).append(statement)
    used = [statement for statement in tree.body if _get_first_line(statement) <= line <= (statement.end_lineno or 0)]
    for statement in used:  # which grows
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        used += [each for name in sorted(names) for each in definitions.get(name, ()) if each not in used]
    spans = sorted((_get_first_line(statement) - 1, statement.end_lineno) for statement in used)
    return "".join("".join(lines[start:end]) for start, end in spans)


def _find_defined_names(statement: ast.stmt) -> set[str]:
    """What a top-level statement defines, also under `if` and `try`."""
    if isinstance(statement, DEFINITIONS):
        return {statement.name}
    nodes = [*ast.walk(statement)]
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.name for node in nodes if isinstance(node, DEFINITIONS)}


def _get_first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(node.lineno for node in decorators)])


def _is_recipe(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Recipe)


def _describe_value(value: Any) -> str:
    """A plain value as text, and a function as its source; of others, which may change, the name of their type."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe_value, value))})"
    if isinstance(value, FunctionType | MethodType):
        return _read_source(value)
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__qualname__
