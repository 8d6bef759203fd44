"""A Monitor as a callback of the Hugging Face Trainer."""

from __future__ import annotations

import os
from typing import Any

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":  # the package is installed, and its own message says what is missing
        raise
    raise ImportError("mvngrad.integrations.transformers needs transformers: pip install transformers") from error

from mvngrad.diagnostics import Monitor
from mvngrad.diagnostics.records import Record
from mvngrad.diagnostics.sinks import Sink, check_sink, close_sink, make_sink, named_scalars


class MonitorCallback(TrainerCallback):
    """Watch the optimizer of a Trainer with a `mvngrad.diagnostics.Monitor`, and log where the Trainer logs.

        trainer.add_callback(MonitorCallback(trainer))

    When training begins, a Monitor is attached to the optimizer inside Accelerate's wrapper, and closed when it ends.
    A loss that the Trainer logs, every `logging_steps`, is in the next record. The Trainer does not tell callbacks if
    training fails: then call `close`, or train again, which closes it first.

    Args:
        trainer: the Trainer that it is added to, whose `log` gets the numbers of each record.
        every: steps between records.
        sink: also send whole records there: a path, for JSON lines that `mvngrad diagnose` reads, or a callable.
        options: further arguments of `Monitor`.
    """

    def __init__(
        self, trainer: Trainer, every: int = 100, sink: str | os.PathLike[str] | Sink | None = None, **options: Any
    ) -> None:
        self.trainer, self.every, self.options = trainer, every, options
        self.sink = None if sink is None else make_sink(sink)
        self.monitor: Monitor | None = None
        self._scalars: dict[str, float] = {}
        """Those of the last record, until the Trainer has counted its step and `on_step_end` logs them."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.close()
        self._scalars = {}  # a training that failed may have left some
        if self.trainer.is_world_process_zero():
            check_sink(self.sink)
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # Accelerate wraps it, and calls the inner step
        self.monitor = Monitor(optimizer, self.every, self._write, **self.options)

    def _write(self, record: Record) -> None:
        if self.trainer.is_world_process_zero():
            if self.sink is not None:
                self.sink(record)
            self._scalars = named_scalars(record)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        scalars, self._scalars = self._scalars, {}
        if scalars:
            should_log = control.should_log
            self.trainer.log(scalars)
            control.should_log = should_log  # log unsets it, and the Trainer would not log its own numbers

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        loss = (logs or {}).get("loss")
        if self.monitor is not None and isinstance(loss, float):
            self.monitor.log(loss=loss)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the Monitor and the sink, at any time, also from another callback."""
        if self.monitor is not None:
            self.monitor.close()
        close_sink(self.sink)
