"""The training loop of every recipe: on one GPU or a CPU, resumable at any step, one folder of the store for a run."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mvngrad.lab import checkpoint, task as tasks
from mvngrad.lab.environment import changes, environment
from mvngrad.lab.events import Event, Message, Progress, printed
from mvngrad.lab.lock import held
from mvngrad.lab.metrics import Metrics
from mvngrad.lab.recipes.training import Training
from mvngrad.lab.step import Stepper, forget, ready
from mvngrad.lab.store import ROOT, Run, Slot

Observer: TypeAlias = Callable[[int, Stepper], Any]
"""Called with the number of an epoch that has ended and the stepper after it, which it may read and must not change."""


class Interrupted(Exception):
    """A signal ended the process's part of a run; its checkpoint is written, and `train` goes on from there."""

    def __init__(self, key: str, step: int, signal_number: int) -> None:
        name = signal.Signals(signal_number).name
        super().__init__(f"{key} was stopped by {name} after step {step}; start it again to go on from there")
        self.key, self.step, self.signal_number = key, step, signal_number


def train(
    recipe: Training,
    *,
    root: Path = ROOT,
    data: Path | None = None,
    device: str | torch.device = "cpu",
    compile: bool = False,
    capture: bool | None = None,
    checkpoint_every: float = 60.0,
    keep: int = 2,
    on_event: Callable[[Event], Any] = printed,
    observe: Observer | None = None,
    task: tasks.Factory = tasks.of,
) -> Run:
    """Train a recipe, or go on with it where a process before this one stopped; a finished run is returned as it is.

    A run whose loss is no longer finite ends as *diverged*, with the step, and that is its result.

    Args:
        recipe: what the run is; everything that decides its numbers.
        root: the store.
        data: folder of the data; None is the loader's own.
        device: "cpu", "cuda" or "cuda:1".
        compile: hand the model and the preparation of its batches to torch.compile, once in the life of the process;
            deterministic recipes are never compiled.
        capture: replay the whole step as a CUDA graph; None does so on a GPU.
        checkpoint_every: seconds from one checkpoint to the next; 0 writes one after every step.
        keep: how many checkpoints are kept while training; of a finished run the last is.
        on_event: called with a `Progress` at the end of an epoch and with a `Message` in between.
        observe: called after each epoch, before it can be in a checkpoint; its time is not counted as training.
        task: makes what the recipe trains; the module of its name in `mvngrad.lab.tasks` by default.

    Raises:
        Interrupted: SIGTERM or SIGINT came; a checkpoint of the step at hand has been written.
        Locked: another process trains this recipe in this store.
        torch.OutOfMemoryError: the step does not fit the device.
    """
    slot, where = Slot(recipe, root), torch.device(device)
    if (finished := slot.run) is not None:
        return finished
    with held(slot.folder), kernels(recipe, where), _memory(recipe, where), _signals() as signals:
        if (finished := slot.run) is not None:  # by the process that held it a moment ago
            return finished
        started = time.perf_counter()
        captured = where.type == "cuda" if capture is None else capture
        stepper = ready(recipe, data, where, compile and not recipe.deterministic, captured, task)
        slot.begin(measured_on := environment(where.type), changes())
        sitting = Sitting(recipe, stepper, slot.folder, checkpoint_every, keep, on_event, observe, signals)
        result = {**sitting.train(), "setup_seconds": sitting.started - started}
        slot.finish(result)
    return Run(recipe.key, recipe.name, recipe.settings, measured_on, result)


class Sitting:
    """One process's part of a run, from its beginning or a checkpoint to its end or an interruption."""

    def __init__(
        self,
        recipe: Training,
        stepper: Stepper,
        folder: Path,
        checkpoint_every: float,
        keep: int,
        on_event: Callable[[Event], Any],
        observe: Observer | None,
        signals: list[int],
    ) -> None:
        self.recipe, self.stepper, self.checkpoints, self.keep = recipe, stepper, folder / "checkpoints", keep
        self.every, self.on_event, self.observe, self.signals = checkpoint_every, on_event, observe, signals
        self.per_epoch = stepper.task.steps_per_epoch
        self.steps = recipe.epochs * self.per_epoch
        stepper.begin(recipe.seed)
        self.step, self.seconds_before = 0, 0.0
        saved = checkpoint.newest(self.checkpoints, self._tell)
        if saved is not None:
            stepper.restore(saved["state"])
            self.step, self.seconds_before = saved["step"], saved["seconds"]
            self._tell(f"goes on after step {self.step} of {self.steps}")
        self.first = self.step
        self.metrics = Metrics(folder / "metrics.jsonl", self.step)
        self.plan = self._plan(self.step // self.per_epoch)
        if self.step < self.steps:
            stepper.turn(self.plan, self.step % self.per_epoch)  # and capture it, outside of what is timed
        self.started = self.saved_at = time.perf_counter()
        self.observing = 0.0

    @property
    def seconds(self) -> float:
        """Of all sittings; capture, compilation and what an observer takes are not in it."""
        return self.seconds_before + time.perf_counter() - self.started - self.observing

    def train(self) -> dict[str, Any]:
        """Train to the end; the result."""
        for epoch in range(self.step // self.per_epoch, self.recipe.epochs):
            if epoch > self.first // self.per_epoch:
                self.stepper.turn(self.plan, 0)
            if (bad := self._epoch(epoch)) is not None:
                return self._diverged(bad)
        found = self._evaluate(final=True)
        if None in found.values():
            return self._diverged(self.steps)
        result = {"status": "finished", **found, "steps": self.steps, "seconds": self.seconds}
        self._save(keep=1)
        state = self.stepper.state.items()
        weights = {name: value for name, value in state if name.startswith("model.")}
        result["parameters"] = sum(p.numel() for p in self.stepper.model.parameters())
        result["state_bytes"] = sum(value.nbytes for name, value in state if name.startswith("optimizer."))
        result["data"] = self.stepper.task.source
        if self.stepper.at.is_cuda:
            result["memory_bytes"] = torch.cuda.max_memory_reserved(self.stepper.at.device)
        return {**result, "weights": fingerprint(weights)}

    def _diverged(self, step: int) -> dict[str, Any]:
        return {"status": "diverged", "step": step, "steps": self.steps, "seconds": self.seconds}

    def _epoch(self, epoch: int) -> int | None:
        """The rest of an epoch; the first step whose loss is not finite, if there is one."""
        stepper, start, first = self.stepper, time.perf_counter(), self.step
        for at in range(self.step % self.per_epoch, self.per_epoch):
            last = at + 1 == self.per_epoch
            stepper.step(stepper.task.rest if last else 0)
            self.step += 1
            if not last:  # the last step is saved with its row, below
                self._pause()
        self.plan = self._plan(epoch + 1)  # while the device is still at work
        losses = stepper.losses.tolist()
        missing = self.recipe.batch_size - (stepper.task.rest or self.recipe.batch_size)
        rate = ((self.step - first) * self.recipe.batch_size - missing) / (time.perf_counter() - start)
        for at, loss in enumerate(losses):
            if not math.isfinite(loss):
                return epoch * self.per_epoch + at + 1
        loss = math.fsum(losses) / len(losses)
        due = (epoch + 1) % self.recipe.eval_every == 0 or epoch + 1 == self.recipe.epochs
        found = self._evaluate(final=False) if due else {}
        seconds = self.seconds
        self.metrics.add({"step": self.step, "epoch": epoch + 1, "loss": loss, **found, "seconds": seconds})
        pace = (seconds - self.seconds_before) / (self.step - self.first)
        left = pace * (self.steps - self.step)
        counts = epoch + 1, self.recipe.epochs, self.step, self.steps
        self.on_event(Progress(self.recipe.key, *counts, loss, rate, seconds, left, found))
        if self.observe is not None:
            start = time.perf_counter()
            self.observe(epoch + 1, stepper)
            self.observing += time.perf_counter() - start
        if self.step < self.steps:
            self._pause()
        return None

    def _plan(self, epoch: int) -> tasks.Plan:
        if epoch == self.recipe.epochs:
            return {}
        first, recipe = epoch * self.per_epoch, self.recipe
        rates = [recipe.rate(first + at, self.per_epoch) for at in range(self.per_epoch)]
        return {**self.stepper.task.plan(recipe, epoch), "lr": torch.tensor(rates)}

    def _evaluate(self, final: bool) -> dict[str, float | None]:
        """Metrics by name; what is not finite is missing."""
        self.stepper.model.eval()
        with (
            torch.no_grad(),
            torch.autocast(self.stepper.at.device.type, torch.bfloat16, enabled=self.stepper.autocast),
        ):
            found = self.stepper.task.evaluate(self.stepper.model, final)
        return {name: value if math.isfinite(value) else None for name, value in found.items()}

    def _pause(self) -> None:
        """Between two steps: save where it is time to, stop where a signal asks for it."""
        if self.signals or time.perf_counter() - self.saved_at >= self.every:
            self._save(self.keep)
        if self.signals:
            raise Interrupted(self.recipe.key, self.step, self.signals[0])

    def _save(self, keep: int) -> None:
        state = {name: value.cpu() for name, value in self.stepper.state.items()}
        content = {"step": self.step, "seconds": self.seconds, "state": state}
        checkpoint.save(self.checkpoints, self.step, content, keep)
        self.saved_at = time.perf_counter()

    def _tell(self, text: str) -> None:
        self.on_event(Message(self.recipe.key, text))


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """The sha256 of tensors: equal for equal bits, in whatever order and on whatever device they lie."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The SIGTERM and SIGINT that came so far. A second one of a kind is no longer held back."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came  # only the main thread may ask for signals, and it gets them
        return
    before: dict[int, Any] = {}

    def note(number: int, frame: object) -> None:
        came.append(number)
        signal.signal(number, before[number])

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, note)
    try:
        yield came
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)


@contextmanager
def _memory(recipe: Training, device: torch.device) -> Iterator[None]:
    """Say what to change where the device is too small, and leave its memory to who tries again."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        forget()
        raise torch.OutOfMemoryError(
            f"{recipe.key} does not fit the memory of {device}; make batch_size={recipe.batch_size} smaller, or free "
            f"memory that others hold there ({str(error).splitlines()[0]})"
        ) from error


@contextmanager
def kernels(recipe: Training, device: torch.device) -> Iterator[None]:
    """Which kernels torch may choose: the fastest it finds by trying, or only such as give the same bits each time."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, at the first product of a process
        torch.cuda.set_device(device if device.index is not None else torch.cuda.current_device())
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.benchmark, cudnn.deterministic
    torch.use_deterministic_algorithms(recipe.deterministic)
    cudnn.benchmark, cudnn.deterministic = not recipe.deterministic, recipe.deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        cudnn.benchmark, cudnn.deterministic = before[1:]
