"""Being asked to stop, at a time when it does no harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ASKING = (signal.SIGTERM, signal.SIGINT)


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler that makes SIGTERM what Ctrl-C is."""
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back what asks to stop until the end of a block; a second signal of a kind is no longer held back."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals come to the main thread alone
        return
    came: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(number, before[number])

    for number in ASKING:
        before[number] = signal.signal(number, note)
    try:
        yield
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
    for asked in came:
        signal.raise_signal(asked)
