"""Errors that the user can fix."""

from __future__ import annotations


class UserError(Exception):
    """The cause is an argument, a file or the machine, and the message names the remedy.

    The command prints the message alone and exits with 2. Any other exception is a bug and keeps its traceback.
    """


class InvalidInput(UserError, ValueError):
    """An argument, or the content of a file, is invalid."""


class MissingFile(UserError, FileNotFoundError):
    """A file or folder is missing."""


class NotPossible(UserError, RuntimeError):
    """The machine, the environment or the store does not allow what was asked, for now."""


class NotFound(UserError, LookupError):
    """There is nothing with this name."""
