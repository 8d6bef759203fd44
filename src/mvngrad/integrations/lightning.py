"""A Monitor as a callback of Lightning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("lightning"):  # it is installed, and its own message says what is missing
        raise
    raise ImportError("mvngrad.integrations.lightning needs lightning: pip install lightning") from error

from mvngrad.diagnostics import Monitor
from mvngrad.diagnostics.records import Record
from mvngrad.diagnostics.sinks import JSONLines, Sink, check_sink, close_sink, make_sink, named_scalars


class MonitorCallback(Callback):
    """Watch the optimizers of a Trainer with a `mvngrad.diagnostics.Monitor`, and log to the Trainer's loggers.

        trainer = Trainer(callbacks=[MonitorCallback()])

    A Monitor is attached to each optimizer when training starts, and closed when it ends or fails. With several
    optimizers, the logged names begin with `optimizer0/`, `optimizer1/` and so on, and a path `monitor.jsonl` becomes
    `monitor.optimizer0.jsonl` and so on, because the records of a file must be of one optimizer. A record has the mean
    of the losses that `training_step` returned in this process since the last record, without that of its own step.

    Args:
        every: steps between records.
        sink: also send whole records there: a path, for JSON lines that `mvngrad diagnose` reads, or a callable.
        options: further arguments of `Monitor`.
    """

    def __init__(self, every: int = 100, sink: str | os.PathLike[str] | Sink | None = None, **options: Any) -> None:
        self.every, self.options = every, options
        self.sink = None if sink is None else make_sink(sink)
        self.monitors: list[Monitor] = []
        self._sinks: list[Sink | None] = []
        """One for each optimizer."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close()
        several = len(trainer.optimizers) > 1
        for number, optimizer in enumerate(trainer.optimizers):
            sink = self.sink
            if several and isinstance(sink, JSONLines):
                sink = JSONLines(sink.path.with_suffix(f".optimizer{number}{sink.path.suffix}"))
            if trainer.is_global_zero:
                check_sink(sink)
            self._sinks.append(sink)
            write = partial(self._write, trainer, sink, f"optimizer{number}/" if several else "")
            self.monitors.append(Monitor(optimizer, self.every, write, **self.options))

    def _write(self, trainer: Trainer, sink: Sink | None, prefix: str, record: Record) -> None:
        if trainer.is_global_zero:
            if sink is not None:
                sink(record)
            numbers = {prefix + name: value for name, value in named_scalars(record).items()}
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=record["step"])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if isinstance(loss, Tensor) and loss.numel() == 1:
            for monitor in self.monitors:
                monitor.log(loss=loss.detach() * trainer.accumulate_grad_batches)  # Lightning divided it

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """Close every Monitor and sink, at any time, also from another callback. Lightning calls it at the end."""
        while self.monitors:
            self.monitors.pop().close()
        while self._sinks:
            close_sink(self._sinks.pop())
