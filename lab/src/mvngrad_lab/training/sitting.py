"""One process's part of a run: from its beginning, or a checkpoint, to its end or an interruption."""

from __future__ import annotations

import hashlib
import math
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mvngrad_lab.recipe import TrainingRecipe
from mvngrad_lab.store.lock import Check, Locked
from mvngrad_lab.store.metrics import MetricsFile, read_rows
from mvngrad_lab.training import checkpoint, history, parallel, task as tasks
from mvngrad_lab.training.events import EpochEnd, Event, Message, StepProgress
from mvngrad_lab.training.step import TrainingStep

Observer: TypeAlias = Callable[[int, TrainingStep], Any]
"""Called with the number of an epoch that has ended and the stepper after it, which it may read and must not change."""


SIGN_OF_LIFE = 1.0
"""Seconds after which a step is told, where no epoch has ended meanwhile."""
KEPT = 2
"""Checkpoints that are kept while training, in case the newest is damaged; of a finished run the last is."""


class Interrupted(Exception):
    """A signal ended the process's part of a run; its checkpoint is written, and `train` goes on from there."""

    def __init__(self, key: str, step: int, signal_number: int) -> None:
        name = signal.Signals(signal_number).name
        super().__init__(f"{key} was stopped by {name} after step {step}; start it again to go on from there")
        self.key, self.step, self.signal_number = key, step, signal_number


class Sitting:
    """The loop. Of several processes each has one, and all of them take the same steps."""

    def __init__(
        self,
        recipe: TrainingRecipe,
        stepper: TrainingStep,
        folder: Path,
        checkpoint_every: float,
        on_event: Callable[[Event], Any],
        observe: Observer | None,
        signals: list[int],
        check: Check,
    ) -> None:
        self.recipe, self.stepper, self.checkpoints = recipe, stepper, folder / checkpoint.FOLDER
        self.every, self.on_event, self.observe, self.signals = checkpoint_every, on_event, observe, signals
        self.check = check
        self.per_epoch = stepper.task.steps_per_epoch
        self.steps = recipe.epochs * self.per_epoch
        stepper.reset(recipe.seed)
        self.step, self.seconds_before, self.missed = 0, 0.0, 0
        self.untold = False
        """Whether the epoch that the last step ended still lacks its evaluation and its row."""
        saved = parallel.broadcast_from_rank0(
            checkpoint.find_newest(self.checkpoints, self._tell) if parallel.get_rank() == 0 else None
        )
        if saved is not None:
            notes = checkpoint.load(saved, stepper.state)
            if stepper.is_third_party:
                stepper.optimizer.load_state_dict(notes["optimizer"])
            self.step, self.seconds_before, self.missed = notes["step"], notes["seconds"], notes.get("missed", 0)
            self.untold = notes.get("untold", False)
            self._tell(f"goes on after step {self.step} of {self.steps}")
        else:
            self._tell(f"begins: {self.steps} steps of {recipe.batch_size}, in {folder}")
        self.first = self.step
        self.found: dict[str, float | None] | None = None
        """The last evaluation of the run, once it is made."""
        self.metrics = MetricsFile(folder / "metrics.jsonl", self.step, check) if parallel.get_rank() == 0 else None
        self.epoch = self.step // self.per_epoch - self.untold
        self.plan = self._plan(self.step // self.per_epoch)
        if self.step < self.steps and not self.untold:
            stepper.set_plan(self.plan, self.step % self.per_epoch)  # and capture it, outside of what is timed
        self.started = self.saved_at = self.told_at = time.perf_counter()
        self.observing = 0.0

    @property
    def seconds(self) -> float:
        """Of all sittings; capture, compilation and what an observer takes are not in it."""
        return self.seconds_before + time.perf_counter() - self.started - self.observing

    def train(self) -> dict[str, Any]:
        """Train to the end; the result."""
        for epoch in range(self.epoch, self.recipe.epochs):
            if epoch > self.epoch:
                self.stepper.set_plan(self.plan, 0)
            if (bad := self._epoch(epoch)) is not None:
                return self._diverged(bad)
        found = self._evaluate(final=True) if self.found is None else self.found
        if None in found.values():
            return self._diverged(self.steps)
        result = {"status": "finished", **found, "steps": self.steps, "seconds": self.seconds}
        self._save(keep=1)
        state = self.stepper.state.items()
        weights = {name: parallel.full_tensor(value) for name, value in state if name.startswith(checkpoint.MODEL)}
        result["parameters"] = sum(p.numel() for p in self.stepper.model.parameters())
        kept = [value for each in self.stepper.optimizer.state.values() for value in each.values()]
        result["state_bytes"] = sum(value.nbytes for value in kept if isinstance(value, Tensor))
        result |= self._history()
        result["data"] = self.stepper.task.source
        if self.stepper.step_index.is_cuda:
            result["memory_bytes"] = torch.cuda.max_memory_reserved(self.stepper.step_index.device)
        return {**result, "weights": fingerprint(weights)}

    def _diverged(self, step: int) -> dict[str, Any]:
        known = {"steps": self.steps, "seconds": self.seconds, **self._history()}
        return {"status": "diverged", "step": step, **known}

    def _history(self) -> dict[str, Any]:
        """What the steps of a guarded run looked like."""
        return history.summary(read_rows(self.metrics.path)) if self.metrics is not None and self.recipe.guarded else {}

    def _epoch(self, epoch: int) -> int | None:
        """The rest of an epoch; the first step whose loss is not finite, if there is one."""
        stepper, start, first = self.stepper, time.perf_counter(), self.step
        for at in range(self.step - epoch * self.per_epoch, self.per_epoch):
            last = at + 1 == self.per_epoch
            stepper.step(stepper.task.last_batch_size if last else 0)
            self.step += 1
            if not last:  # the last step is saved with its row, below
                self._pause()
        self.plan = self._plan(epoch + 1)  # while the device is still at work
        losses, norms = stepper.losses.tolist(), stepper.norms.tolist()
        missing = self.recipe.batch_size - (stepper.task.last_batch_size or self.recipe.batch_size)
        rate = max(0, (self.step - first) * self.recipe.batch_size - missing) / (time.perf_counter() - start)
        bad = [at for at, pair in enumerate(zip(losses, norms, strict=True)) if not all(map(math.isfinite, pair))]
        end, missed = self._diverges(epoch, bad)
        if end is not None:  # what the device did after it is no part of the run
            self.step, over = end, end - epoch * self.per_epoch
            losses, norms, bad = losses[:over], norms[:over], [at for at in bad if at < over]
        finite = [losses[at] for at in range(len(losses)) if at not in bad]
        loss = math.fsum(finite) / len(finite) if finite else None
        row = {"step": self.step, "epoch": epoch + 1, "loss": loss}
        every = {"losses": _plain(losses), "norms": _plain(norms), "nonfinite": len(bad)} if self.recipe.guarded else {}
        if end is not None:
            if self.metrics is not None and every:
                self.metrics.add({**row, "seconds": self.seconds, **every})
            return end
        if bad:
            count, number = f"{len(bad)} of {self.per_epoch}", epoch * self.per_epoch + bad[-1] + 1
            self._tell(f"left out, for a loss or gradient norm that was not finite: {count}, the last {number}")
        final, self.untold = epoch + 1 == self.recipe.epochs, True
        found = self._evaluate(final) if final or (epoch + 1) % self.recipe.eval_every == 0 else {}
        self.found = found if final else None
        seconds = self.seconds
        if self.metrics is not None:
            self.metrics.add({**row, **found, "seconds": seconds, **every})
        self.missed, self.untold = missed, False
        counts = epoch + 1, self.recipe.epochs, self.step, self.steps
        self.on_event(EpochEnd(self.recipe.key, *counts, loss, rate, seconds, self._left(), found))
        self.told_at = time.perf_counter()
        if self.observe is not None:
            start = time.perf_counter()
            self.observe(epoch + 1, stepper)
            self.observing += time.perf_counter() - start
        if self.step < self.steps:
            self._pause()
        return None

    def _diverges(self, epoch: int, bad: list[int]) -> tuple[int | None, int]:
        """The step with which `nonfinite_limit` of them in a row were not finite, if one did, and how many are so at
        the end of the epoch; counted across epochs.
        """
        row, limit = self.missed, self.recipe.nonfinite_limit
        for at in range(self.per_epoch):
            row = row + 1 if at in bad else 0
            if row == limit:
                return epoch * self.per_epoch + at + 1, row
        return None, row

    def _plan(self, epoch: int) -> tasks.EpochPlan:
        if epoch == self.recipe.epochs:
            return {}
        first, recipe = epoch * self.per_epoch, self.recipe
        rates = [recipe.learning_rate(first + at, self.per_epoch) for at in range(self.per_epoch)]
        return {**self.stepper.task.plan_epoch(recipe, epoch), "lr": torch.tensor(rates)}

    def _left(self) -> float:
        """Seconds to the end, at the pace so far."""
        seconds, taken = self.seconds - self.seconds_before, self.step - self.first
        if not taken:  # in this sitting
            seconds, taken = self.seconds, self.step
        return seconds / taken * (self.steps - self.step)

    def _evaluate(self, final: bool) -> dict[str, float | None]:
        """Metrics by name; None is not finite."""
        self.stepper.model.eval()
        with (
            torch.no_grad(),
            torch.autocast(self.stepper.step_index.device.type, torch.bfloat16, enabled=self.stepper.autocast),
        ):
            found = self.stepper.task.evaluate(self._evaluated, final) | self.stepper.train_metrics()
        return {name: value if math.isfinite(value) else None for name, value in found.items()}

    def _evaluated(self, *batch: Tensor) -> Tensor:
        """What the model makes of a batch. One process need not go through all of them where a signal asks it to stop;
        several would have to agree on one.
        """
        if self.signals and parallel.get_world_size() == 1:
            self._pause()
        found: Tensor = self.stepper.model(*batch)
        return found

    def _pause(self) -> None:
        """Between two steps: tell and save where it is time to, stop where a signal asks for it."""
        now, stop = time.perf_counter(), bool(self.signals)
        if now - self.told_at >= SIGN_OF_LIFE:
            self.told_at = now
            self.on_event(StepProgress(self.recipe.key, self.step, self.steps, self._left()))
        due, stop = parallel.any_rank(stop or now - self.saved_at >= self.every, stop)
        if due:
            with suppress(Locked) if stop else nullcontext():  # who was asked to stop does so in any case
                self._save(KEPT)
        if stop:
            raise Interrupted(self.recipe.key, self.step, self.signals[0] if self.signals else signal.SIGTERM)

    def _save(self, keep: int) -> None:
        notes: dict[str, Any] = {"seconds": self.seconds, "missed": self.missed, "untold": self.untold}
        if self.stepper.is_third_party:
            notes["optimizer"] = self.stepper.optimizer.state_dict()
        checkpoint.save(self.checkpoints, self.step, notes, self.stepper.state, keep, self.check)
        self.saved_at = time.perf_counter()

    def _tell(self, text: str) -> None:
        self.on_event(Message(self.recipe.key, text))


def _plain(values: list[float]) -> list[float | None]:
    """As JSON knows them, to seven digits: about what float32 has."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """The sha256 of tensors: equal for equal bits, in whatever order and on whatever device they lie."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
