"""One training step, from the plan to the new weights: as it stands on a CPU, one CUDA graph on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mvngrad_lab.recipe import TrainingRecipe
from mvngrad_lab.training import checkpoint, parallel
from mvngrad_lab.training.optimizers import make_optimizer
from mvngrad_lab.training.task import EpochPlan, StepPlan, Task, TaskFactory, build_initial_model

WARM_UP = 3
"""Steps that are taken and undone before the first: libraries choose their kernels in them, compilers compile."""


class CompiledTask:
    """A task's model on its device and the functions of its step, compiled or not: what optimizers may share."""

    def __init__(
        self, task: Task, compiled: bool = False, mode: parallel.Mode | None = None, bfloat16: bool = False
    ) -> None:
        if mode is not None and not task.supports_parallel:
            raise ValueError(f"parallel={mode!r} is for language models; {type(task).__name__} has one process")
        self.task, self.mode = task, mode
        self.model: nn.Module = build_initial_model(task, 0).to(task.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.spread = parallel.wrap_model(self.model, mode, bfloat16, compiled)
        self.batch: Callable[..., Any] = task.make_batch
        self.loss: Callable[..., Any] = task.loss_and_correct
        if compiled and mode is None:
            self.batch, self.loss = (torch.compile(part, dynamic=False) for part in (self.batch, self.loss))


class TrainingStep:
    """A model, its optimizer and the plan of an epoch at fixed addresses; `step` reads and changes only these.

    The step number lies on the device beside them, so that the captured step has no input. Everything that a step
    changes is in `state`: a checkpoint saves that, a resumed run loads it, and the steps that warm up a capture are
    undone by it.
    """

    def __init__(self, recipe: TrainingRecipe, compiled: CompiledTask, captured: bool) -> None:
        task, device = compiled.task, compiled.task.device
        self.compiled, self.task, self.model = compiled, task, compiled.model
        self.captured = captured and not recipe.is_third_party
        self.autocast = recipe.precision == "bf16" and compiled.mode != "fsdp"
        self.micro_batch_size, self.guarded = recipe.micro_batch_size, recipe.guarded
        self.clip = math.inf if recipe.clip is None else recipe.clip
        self.lr = torch.zeros((), device=device)
        self.peak = recipe.lr
        self._new_optimizer = partial(make_optimizer, recipe, self.model, self.lr)
        self.optimizer: Any = self._new_optimizer()
        self.is_third_party = recipe.is_third_party
        """Somebody else's optimizer is made anew for a run; of its state nothing is known but its `state_dict`."""
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.step_index = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.zeros(task.steps_per_epoch, device=device)
        self.norms = torch.zeros(task.steps_per_epoch, device=device)
        self.correct = torch.zeros((), device=device)
        """Training samples of the epoch that were classified correctly, if the task counts them."""
        self.samples = task.steps_per_epoch * recipe.batch_size
        if task.last_batch_size:
            self.samples += task.last_batch_size - recipe.batch_size
        self.numbers = torch.arange(task.steps_per_epoch, device=device)
        self.plan: EpochPlan = {}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.rehearsed = False
        self.state: dict[str, Tensor] = {
            **{f"{checkpoint.MODEL}{name}": value for name, value in self.model.state_dict().items()},
            **{
                f"optimizer.{index}.{name}": value
                for index, kept in enumerate(self.optimizer.state.values() if not self.is_third_party else ())
                for name, value in kept.items()
            },
            "at": self.step_index,
            "losses": self.losses,
            **({"norms": self.norms} if self.guarded else {}),
            **({"correct": self.correct} if task.train_metric else {}),
        }

    def reset(self, seed: int) -> None:
        """Become as a run with this seed starts: its weights, and no memory of any step."""
        start = {
            f"{checkpoint.MODEL}{name}": value
            for name, value in build_initial_model(self.task, seed).state_dict().items()
        }
        if self.is_third_party:
            self.optimizer = self._new_optimizer()
        with torch.no_grad():
            for name, value in self.state.items():
                parallel.copy_into(value, start[name]) if name in start else value.zero_()

    def set_plan(self, plan: EpochPlan, at: int) -> None:
        """Lay the plan of an epoch where `step` reads it, to go on from its step `at`; nothing waits for the device."""
        if not self.plan:
            self.plan = {name: torch.empty_like(value, device=self.task.device) for name, value in plan.items()}
        for name, value in plan.items():
            self.plan[name].copy_(value.pin_memory() if self.step_index.is_cuda else value, non_blocking=True)
        self.step_index.fill_(at)
        self.model.train()
        if at == 0:
            self.losses.zero_()
            self.norms.zero_()
            self.correct.zero_()
        if self.captured and self.graph is None:
            self.graph = self._capture()
        if self.compiled.mode == "ddp" and not self.rehearsed:
            # DDP lays its buckets anew after its first step, and then adds in another order. Who goes on with a run
            # must add in the order of who never stopped.
            self._rehearse()

    def step(self, samples: int = 0) -> None:
        """Take the next step of the plan; one with fewer `samples` than the others is not the captured one."""
        if self.graph is not None and not samples:
            self.graph.replay()
        else:
            self._step(samples)

    def _step(self, samples: int = 0) -> None:
        batch, loss_of = self.compiled.batch, self.compiled.loss
        row = {name: value.index_select(0, self.step_index).squeeze(0) for name, value in self.plan.items()}
        self.lr.copy_(row.pop("lr"))
        if self.is_third_party:
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * (self.lr.item() / self.peak if self.peak else 0.0)
        if samples:
            row = {name: value[:samples] if value.dim() else value for name, value in row.items()}
            batch, loss_of = self.task.make_batch, self.task.loss_and_correct  # not worth a compilation
        self.optimizer.zero_grad()
        loss = self._gradients(row, batch, loss_of)
        if self.guarded:
            self._guarded_step(loss)
        else:
            self.optimizer.step()
        self._note(self.losses, loss)
        self.step_index += 1

    def _gradients(self, row: StepPlan, batch: Callable[..., Any], loss_of: Callable[..., Any]) -> Tensor:
        """Of the mean loss of a batch, on all processes and in micro-batches; that loss."""
        micro = _micro_batches(row, self.micro_batch_size)
        losses = []
        for number, part in enumerate(micro, start=1):
            parallel.set_gradient_sync(self.compiled.spread, last=number == len(micro))
            with torch.autocast(self.lr.device.type, torch.bfloat16, enabled=self.autocast):
                loss, correct = loss_of(self.compiled.spread, batch(part))
            if correct is not None:
                self.correct += correct
            (loss if len(micro) == 1 else loss / len(micro)).backward()
            losses.append(loss.detach())
        return parallel.all_reduce_mean(losses[0] if len(micro) == 1 else torch.stack(losses).mean())

    def train_metrics(self) -> dict[str, float]:
        """The share of correct training samples in the epoch so far, in percent, if the task counts them."""
        name = self.task.train_metric
        return {name: 100 * self.correct.item() / self.samples} if name else {}

    def _guarded_step(self, loss: Tensor) -> None:
        """Step with a gradient whose norm is `clip` at most, or not at all where loss or norm is not finite."""
        norm = parallel.full_tensor(nn.utils.clip_grad_norm_(self.model.parameters(), self.clip))
        finite = loss.isfinite() & norm.isfinite()
        if not self.is_third_party and self.optimizer._step_supports_amp_scaling:
            self.optimizer.found_inf = (~finite).float()  # as GradScaler tells it; nothing is read back
            self.optimizer.step()
        elif finite:
            self.optimizer.step()
        self._note(self.norms, norm)

    def _note(self, numbers: Tensor, number: Tensor) -> None:
        """Write down a number of the step at hand; not by index: the deterministic form of that sorts."""
        numbers.copy_(torch.where(self.numbers == self.step_index, number.detach(), numbers))

    def _rehearse(self) -> None:
        """Take steps and undo them."""
        before = {name: value.clone() for name, value in self.state.items()}
        for _ in range(WARM_UP):
            self.step_index.zero_()
            self._step()
        checkpoint.copy_tensors(before, self.state)
        self.optimizer.zero_grad()  # a graph's own gradients are to lie in its memory
        self.rehearsed = True

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = _side_stream(self.step_index.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._rehearse()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The same one for every capture: what libraries keep for a stream, 64 MiB of cuBLAS on Hopper, is never freed."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _micro_batches(row: StepPlan, size: int) -> list[StepPlan]:
    """A row cut along its samples; numbers that all of them share go with every part."""
    samples = max((len(value) for value in row.values() if value.dim()), default=0)
    if samples <= size:
        return [row]
    return [
        {name: value[first : first + size] if value.dim() else value for name, value in row.items()}
        for first in range(0, samples, size)
    ]


_benches: dict[Any, CompiledTask] = {}
_steppers: dict[Any, TrainingStep] = {}


def get_training_step(
    recipe: TrainingRecipe,
    data: Path | None,
    device: torch.device,
    compiled: bool,
    captured: bool,
    make: TaskFactory,
    mode: parallel.Mode | None = None,
) -> TrainingStep:
    """A stepper for a recipe: that of the run before, captured and all, where the two differ outside the step alone.

    Models and what is compiled of them are kept for the life of the process; of steppers only the last, because a
    captured one holds the memory of a whole step.
    """
    shared = recipe.part(*recipe.outside_step, *recipe.of_optimizer), data, device, compiled, make, mode
    outside = [name for name in recipe.outside_step if not (name == "lr" and recipe.is_third_party)]
    whole = shared, recipe.part(*outside), recipe.rounding_seed, captured
    if whole not in _steppers:
        _steppers.clear()
        for other in _benches.values():
            other.model.zero_grad()  # gradients lie in the memory of the graph that made them
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if shared not in _benches:
            _benches[shared] = CompiledTask(make(recipe, data, device), compiled, mode, recipe.precision == "bf16")
        _steppers[whole] = TrainingStep(recipe, _benches[shared], captured)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # the peak of a run counts what is kept, not what is gone
    return _steppers[whole]


def clear_cache() -> None:
    """Give back the memory of all that `ready` keeps."""
    _steppers.clear()
    _benches.clear()
