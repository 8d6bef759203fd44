"""The training loop: from the start of a run, or its newest checkpoint, to its end or an interruption."""

from __future__ import annotations

import hashlib
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mvngrad.diagnostics import find_spikes
from mvngrad_lab.errors import InvalidInput, NotPossible
from mvngrad_lab.recipe import TrainingRecipe
from mvngrad_lab.store import MetricsFile, read_rows
from mvngrad_lab.store.lock import Check, Locked
from mvngrad_lab.training import checkpoint, parallel
from mvngrad_lab.training.events import EpochEnd, Event, Message, StepProgress
from mvngrad_lab.training.step import NOT_SAVED, TrainingStep
from mvngrad_lab.training.task import EpochPlan, seed_evaluation, seed_generators, seed_step

Observer: TypeAlias = Callable[[int, TrainingStep], Any]
"""Called with the number of epochs done and the training step, which it may read and must not change."""
PROGRESS_EVERY = 1.0
"""Seconds between `StepProgress` events."""
CHECKPOINTS = 2
"""Checkpoints kept while training, in case the newest is damaged; a finished run keeps one."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped the training after a checkpoint was written; `train` resumes it from there."""

    def __init__(self, key: str, step: int, signal_number: int) -> None:
        name = signal.Signals(signal_number).name
        super().__init__(f"{key} was stopped by {name} after step {step}; start it again to resume from there")
        self.key, self.step, self.signal_number = key, step, signal_number


class EpochSteps(NamedTuple):
    """The steps of an epoch, up to the one at which the run diverged."""

    row: dict[str, Any]
    """Number of the last step, number of the epoch, and mean loss of the finite steps."""
    per_step: dict[str, Any]
    """Losses, norms and the number of steps that were not finite, if the run records every step."""
    nonfinite: list[int]
    """Their indices in the epoch."""
    nonfinite_in_a_row: int
    """At the end of the epoch."""
    diverged_at: int | None


class Trainer:
    """Trains one run in one process. In parallel training every process has one, and all take the same steps."""

    def __init__(
        self,
        *,
        recipe: TrainingRecipe,
        training_step: TrainingStep,
        folder: Path,
        checkpoint_every: float,
        keep_last: bool,
        on_event: Callable[[Event], Any],
        observe: Observer | None,
        signals: list[int],
        check_lock: Check,
        environment: dict[str, Any],
    ) -> None:
        self.recipe, self.training_step, self.checkpoints = recipe, training_step, folder / checkpoint.FOLDER
        self.checkpoint_every, self.keep_last = checkpoint_every, keep_last
        self.on_event, self.observe = on_event, observe
        self.signals, self.check_lock = signals, check_lock
        self.steps_per_epoch = training_step.task.steps_per_epoch
        self.total_steps = recipe.epochs * self.steps_per_epoch
        training_step.reset(recipe.seed)
        self.step_count, self.seconds_before, self.nonfinite_in_a_row = 0, 0.0, 0
        self.warned_not_saved = self.warned_unsaved = False
        self.evaluation_pending = False
        """Whether the epoch that the last step ended still lacks its evaluation and its row of metrics."""
        environment = {**environment, "data": training_step.task.source}
        self.environments = [{"from_step": 0, **environment}]
        """The machine, versions, code and data of each part of the run, and the step after which it begins."""
        self._resume(folder, environment)
        self.first_step = self.step_count
        self.final_metrics: dict[str, float | None] | None = None
        self.epoch = self.step_count // self.steps_per_epoch - self.evaluation_pending
        # Not the checkpoint's step: a process may have died after it wrote the row of an evaluation, or of a
        # divergence, at that step.
        recorded = self.epoch * self.steps_per_epoch
        is_rank0 = parallel.get_rank() == 0
        self.metrics = MetricsFile(folder / "metrics.jsonl", recorded, check_lock) if is_rank0 else None
        self.missing_rows = self.epoch - len(read_rows(self.metrics.path)) if self.metrics is not None else 0
        if self.missing_rows:
            self._send(f"metrics.jsonl lacks {self.missing_rows} of {self.epoch} rows, so the result lacks them too")
        self.plan = self._plan_epoch(self.step_count // self.steps_per_epoch)
        if self.step_count < self.total_steps and not self.evaluation_pending:
            # Before the clock starts, because it captures the step.
            training_step.set_plan(self.plan, self.step_count % self.steps_per_epoch)
        self.started = self.saved_at = self.reported_at = time.perf_counter()
        self.observer_seconds = 0.0

    def _resume(self, folder: Path, environment: dict[str, Any]) -> None:
        """Load the newest checkpoint, if there is one; `environment` is that of this process."""
        newest = checkpoint.find_newest(self.checkpoints, self._send) if parallel.get_rank() == 0 else None
        path = parallel.broadcast_from_rank0(newest)
        if path is None:
            recipe = self.recipe
            what = f"{recipe.task_name} with {recipe.optimizer}, lr {recipe.lr:g}"
            self._send(f"starts: {what}; {self.total_steps} steps of {recipe.batch_size}, in {folder}")
            return
        state, notes = checkpoint.load(path, self.training_step.state_dict())
        if kind := state.get("optimizer", {}).get(NOT_SAVED):
            raise NotPossible(f"{self._describe_not_saved(kind)}; delete {folder} to train it from its start")
        try:
            self.training_step.load_state_dict(state)
            self.step_count, self.seconds_before = notes["step"], notes["seconds"]
            self.nonfinite_in_a_row = notes["nonfinite_in_a_row"]
            self.evaluation_pending = notes["evaluation_pending"]
            self.environments = notes["environments"]
        except (ValueError, KeyError) as error:
            raise InvalidInput(
                f"the checkpoint {path.name} is of another version of the lab, the model or the optimizer ({error}); "
                f"delete {folder} to train it again"
            ) from error
        before = self.environments[-1]
        changed = {name: value for name, value in environment.items() if before.get(name) != value}
        if changed or before.keys() - {"from_step"} != environment.keys():
            self.environments.append({"from_step": self.step_count, **environment})
        others = "".join(f"; {name} was {before.get(name)}, is {value}" for name, value in changed.items())
        self._send(f"resumes after step {self.step_count} of {self.total_steps}{others}")

    @property
    def seconds(self) -> float:
        """Training time of the run in all processes that worked on it, without capture, compilation and observers."""
        return self.seconds_before + time.perf_counter() - self.started - self.observer_seconds

    def train(self) -> dict[str, Any]:
        """Train to the end; returns the result. torch's generators are as before then."""
        with seed_generators(self.recipe.seed):
            return self._train()

    def _train(self) -> dict[str, Any]:
        for epoch in range(self.epoch, self.recipe.epochs):
            if epoch > self.epoch:
                self.training_step.set_plan(self.plan, 0)
            diverged_at = self._train_epoch(epoch)
            if diverged_at is not None:
                return self._diverged_result(diverged_at)
        metrics = self._evaluate(final=True) if self.final_metrics is None else self.final_metrics
        if nonfinite := [name for name, value in metrics.items() if value is None]:
            return {**self._diverged_result(self.total_steps), "nonfinite_metrics": nonfinite}
        seconds = self.seconds  # without the last checkpoint
        if self.keep_last:
            self._save(keep=1)
        return self._finished_result(metrics, seconds)

    def _finished_result(self, metrics: dict[str, float | None], seconds: float) -> dict[str, Any]:
        """The result of a finished run. A collective if the model is sharded."""
        model, optimizer = self.training_step.model, self.training_step.optimizer
        device = self.training_step.step_index.device
        memory = {"memory_bytes": torch.cuda.max_memory_reserved(device)} if device.type == "cuda" else {}
        weights = {
            f"{checkpoint.MODEL_PREFIX}{name}": parallel.full_tensor(value)
            for name, value in model.state_dict().items()
        }
        return {
            "status": "finished",
            **metrics,
            "steps": self.total_steps,
            "seconds": seconds,
            "parameters": sum(p.numel() for p in model.parameters()),
            "state_bytes": sum(value.nbytes for value in _find_tensors(list(optimizer.state.values()))),
            **self._common_result(),
            "data": self.training_step.task.source,
            **memory,
            "weights": hash_tensors(weights),
        }

    def _diverged_result(self, step: int) -> dict[str, Any]:
        result = {"status": "diverged", "step": step, "steps": self.total_steps, "seconds": self.seconds}
        return result | self._common_result()

    def _common_result(self) -> dict[str, Any]:
        """What finished and diverged runs both have: the environments if it had several, the number of missing rows of
        metrics, and of a run that records every step the curve and the spikes.
        """
        result: dict[str, Any] = {"environments": self.environments} if len(self.environments) > 1 else {}
        if self.missing_rows:
            result["missing_rows"] = self.missing_rows
        if self.metrics is None or not self.training_step.guarded:
            return result
        rows = read_rows(self.metrics.path)
        return result | {
            "nonfinite_steps": sum(row["nonfinite"] for row in rows),
            "loss_spikes": find_spikes([value for row in rows for value in row["losses"]]),
            "norm_spikes": find_spikes([value for row in rows for value in row["norms"]]),
            "curve": [[row["step"], row["loss"]] for row in rows if row["loss"] is not None],
        }

    def _train_epoch(self, epoch: int) -> int | None:
        """Train the rest of an epoch, evaluate and record it; returns the step at which the run diverged, if it did."""
        losses, norms, samples_per_second = self._take_steps(epoch)
        epoch_steps = self._summarize_steps(epoch, losses, norms)
        if epoch_steps.diverged_at is not None:
            self.step_count = epoch_steps.diverged_at
            if self.metrics is not None and epoch_steps.per_step:
                self.metrics.add({**epoch_steps.row, "seconds": self.seconds, **epoch_steps.per_step})
            return epoch_steps.diverged_at
        if epoch_steps.nonfinite:
            count = f"{len(epoch_steps.nonfinite)} of {self.steps_per_epoch}"
            number = epoch * self.steps_per_epoch + epoch_steps.nonfinite[-1] + 1
            self._send(f"skipped, for a loss or gradient norm that was not finite: {count} steps, the last {number}")
        metrics, seconds = self._evaluate_and_record(epoch, epoch_steps)
        counts = epoch + 1, self.recipe.epochs, self.step_count, self.total_steps
        left = self._seconds_left()
        loss = epoch_steps.row["loss"]
        self.on_event(EpochEnd(self.recipe.key, *counts, loss, samples_per_second, seconds, left, metrics))
        self.reported_at = time.perf_counter()
        if self.observe is not None:
            start = time.perf_counter()
            self.observe(epoch + 1, self.training_step)
            self.observer_seconds += time.perf_counter() - start
        if self.step_count < self.total_steps:
            self._report_save_or_stop()
        return None

    def _take_steps(self, epoch: int) -> tuple[list[float], list[float], float]:
        """Take the rest of an epoch's steps; returns the losses and gradient norms of all, and samples per second."""
        training_step, start, first = self.training_step, time.perf_counter(), self.step_count
        for index in range(self.step_count - epoch * self.steps_per_epoch, self.steps_per_epoch):
            last = index + 1 == self.steps_per_epoch
            seed_step(self.recipe.seed, self.step_count, parallel.get_rank(), training_step.step_index.device)
            training_step.step(training_step.task.last_batch_size if last else 0)
            self.step_count += 1
            if not last:  # a checkpoint after the last step also contains its metrics
                self._report_save_or_stop()
        self.plan = self._plan_epoch(epoch + 1)  # while the device is still busy
        losses, norms = training_step.losses.tolist(), training_step.norms.tolist()
        samples = training_step.samples_per_epoch - (first - epoch * self.steps_per_epoch) * self.recipe.batch_size
        return losses, norms, max(0, samples) / (time.perf_counter() - start)

    def _summarize_steps(self, epoch: int, losses: list[float], norms: list[float]) -> EpochSteps:
        pairs = zip(losses, norms, strict=True)
        nonfinite = [index for index, pair in enumerate(pairs) if not all(map(math.isfinite, pair))]
        diverged_at, in_a_row = self._count_nonfinite(epoch, nonfinite)
        if diverged_at is not None:  # what the device computed after it is not part of the run
            end = diverged_at - epoch * self.steps_per_epoch
            losses, norms, nonfinite = losses[:end], norms[:end], [i for i in nonfinite if i < end]
        finite = [loss for index, loss in enumerate(losses) if index not in nonfinite]
        loss = math.fsum(finite) / len(finite) if finite else None
        row = {"step": self.step_count if diverged_at is None else diverged_at, "epoch": epoch + 1, "loss": loss}
        per_step: dict[str, Any] = {}
        if self.training_step.guarded:
            per_step = {"losses": _round_all(losses), "norms": _round_all(norms), "nonfinite": len(nonfinite)}
        return EpochSteps(row, per_step, nonfinite, in_a_row, diverged_at)

    def _evaluate_and_record(self, epoch: int, epoch_steps: EpochSteps) -> tuple[dict[str, float | None], float]:
        """Evaluate if it is due, and write the epoch's row; returns the metrics and the training time so far."""
        final, self.evaluation_pending = epoch + 1 == self.recipe.epochs, True
        metrics = self._evaluate(final) if final or (epoch + 1) % self.recipe.eval_every == 0 else {}
        self.final_metrics = metrics if final else None
        seconds = self.seconds
        if self.metrics is not None:
            self.metrics.add({**epoch_steps.row, **metrics, "seconds": seconds, **epoch_steps.per_step})
        self.nonfinite_in_a_row, self.evaluation_pending = epoch_steps.nonfinite_in_a_row, False
        return metrics, seconds

    def _count_nonfinite(self, epoch: int, nonfinite: list[int]) -> tuple[int | None, int]:
        """The step at which `nonfinite_limit` steps in a row were not finite, if any, and how many are so at the end of
        the epoch. Steps are counted across epochs.
        """
        in_a_row, limit = self.nonfinite_in_a_row, self.recipe.nonfinite_limit
        for index in range(self.steps_per_epoch):
            in_a_row = in_a_row + 1 if index in nonfinite else 0
            if in_a_row == limit:
                return epoch * self.steps_per_epoch + index + 1, in_a_row
        return None, in_a_row

    def _plan_epoch(self, epoch: int) -> EpochPlan:
        return {} if epoch == self.recipe.epochs else self.training_step.plan_epoch(self.recipe, epoch)

    def _seconds_left(self) -> float:
        """Seconds to the end, at the pace so far."""
        seconds, taken = self.seconds - self.seconds_before, self.step_count - self.first_step
        if not taken:  # in this process
            seconds, taken = self.seconds, self.step_count
        return seconds / taken * (self.total_steps - self.step_count)

    def _evaluate(self, final: bool) -> dict[str, float | None]:
        """Metrics by name; None is not finite."""
        training_step = self.training_step
        training_step.model.eval()
        device = training_step.step_index.device.type
        seeded = seed_evaluation(self.recipe.seed, self.step_count // self.steps_per_epoch)
        autocast = torch.autocast(device, torch.bfloat16, enabled=training_step.autocast)
        with seeded, torch.no_grad(), autocast, self._stop_on_signal(training_step.model):
            metrics = training_step.task.evaluate(training_step.model, final) | training_step.train_metrics()
        return {name: value if math.isfinite(value) else None for name, value in metrics.items()}

    @contextmanager
    def _stop_on_signal(self, model: torch.nn.Module) -> Iterator[None]:
        """Let a signal stop an evaluation before the next call of the model; only in one process, because several would
        have to agree first, and not of a scripted model, which takes no hooks.
        """

        def stop(*inputs: object) -> None:
            if self.signals:
                self._report_save_or_stop()

        unhooked = parallel.get_world_size() > 1 or isinstance(model, torch.jit.ScriptModule)
        with nullcontext() if unhooked else model.register_forward_pre_hook(stop):
            yield

    def _report_save_or_stop(self) -> None:
        """Report progress and save if it is time to; stop if a signal has arrived."""
        now, stop = time.perf_counter(), bool(self.signals)
        if now - self.reported_at >= PROGRESS_EVERY:
            self.reported_at = now
            self.on_event(StepProgress(self.recipe.key, self.step_count, self.total_steps, self._seconds_left()))
        due, stop = parallel.any_rank(stop or now - self.saved_at >= self.checkpoint_every, stop)
        if due:
            with suppress(Locked) if stop else nullcontext():  # stop, even if another process has the lock
                self._save(CHECKPOINTS)
        if stop:
            raise Interrupted(self.recipe.key, self.step_count, self.signals[0] if self.signals else signal.SIGTERM)

    def _save(self, keep: int) -> None:
        notes = {
            "seconds": self.seconds,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
            "evaluation_pending": self.evaluation_pending,
            "environments": self.environments,
        }
        state = self.training_step.state_dict()
        if (kind := state.get("optimizer", {}).get(NOT_SAVED)) and not self.warned_not_saved:
            self.warned_not_saved = True
            self._send(f"{self._describe_not_saved(kind)}; its checkpoints have the weights only")
        if not self.warned_unsaved and (names := self.training_step.task.find_unsaved()):
            self.warned_unsaved = True
            self._send(
                f"training changes {', '.join(names)} of the model, which no checkpoint saves, so a resumed run may "
                "differ; use register_buffer"
            )
        checkpoint.save(self.checkpoints, self.step_count, notes, state, keep, self.check_lock)
        self.saved_at = time.perf_counter()

    def _describe_not_saved(self, kind: str) -> str:
        return f"a run with {self.recipe.optimizer} cannot be resumed: its state has a {kind}, which is not a tensor"

    def _send(self, text: str) -> None:
        self.on_event(Message(self.recipe.key, text))


def _find_tensors(value: Any) -> list[Tensor]:
    """All tensors in an optimizer's state, also those in lists and queues."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, deque)) else ()
    return [tensor for part in parts for tensor in _find_tensors(part)]


def _round_all(values: list[float]) -> list[float | None]:
    """Values for JSON with seven digits, about what float32 has; None is not finite."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """The sha256 of tensors: equal for equal bits, in any order and on any device."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        plain = tensors[name].detach().resolve_conj().resolve_neg().cpu().to_dense()
        digest.update(plain.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
