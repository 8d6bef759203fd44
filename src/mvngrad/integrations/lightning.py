"""A Monitor as a callback of Lightning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("mvngrad.integrations.lightning needs lightning: pip install lightning") from error

from mvngrad.diagnostics import Monitor
from mvngrad.diagnostics.records import Record
from mvngrad.diagnostics.sinks import Sink, check_sink, close_sink, make_sink, named_scalars


class MonitorCallback(Callback):
    """Watch the optimizers of a Trainer with a `mvngrad.diagnostics.Monitor`, and log to the Trainer's loggers.

        trainer = Trainer(callbacks=[MonitorCallback()])

    A Monitor is attached to each optimizer when training starts, and closed when it ends or fails. With several
    optimizers, the logged names begin with `optimizer0/`, `optimizer1/` and so on. A record has the mean of the losses
    that `training_step` returned in this process since the last record, without that of its own step.

    Args:
        every: steps between records.
        sink: also send whole records there: a path, for JSON lines that `mvngrad diagnose` reads, or a callable.
        options: further arguments of `Monitor`.
    """

    def __init__(self, every: int = 100, sink: str | os.PathLike[str] | Sink | None = None, **options: Any) -> None:
        self.every, self.options = every, options
        self.sink = None if sink is None else make_sink(sink)
        self.monitors: list[Monitor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close()
        if trainer.is_global_zero:
            check_sink(self.sink)
        for number, optimizer in enumerate(trainer.optimizers):
            prefix = f"optimizer{number}/" if len(trainer.optimizers) > 1 else ""
            write = partial(self._write, trainer, prefix)
            self.monitors.append(Monitor(optimizer, self.every, write, **self.options))

    def _write(self, trainer: Trainer, prefix: str, record: Record) -> None:
        if trainer.is_global_zero:
            if self.sink is not None:
                self.sink(record)
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
        """Close every Monitor and the sink, at any time, also from another callback. Lightning calls it at the end."""
        while self.monitors:
            self.monitors.pop().close()
        close_sink(self.sink)
