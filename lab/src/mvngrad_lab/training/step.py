"""One training step, from the plan to the new weights: eager on a CPU, one CUDA graph on a GPU."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from mvngrad import convert_state_dict
from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.recipe import TrainingRecipe
from mvngrad_lab.tasks import find_task_class
from mvngrad_lab.training import parallel
from mvngrad_lab.training.checkpoint import MODEL_PREFIX
from mvngrad_lab.training.optimizers import OPTIMIZER_FIELDS, make_optimizer, optimizer_key
from mvngrad_lab.training.task import EpochPlan, StepPlan, Task, build_initial_model

WARM_UP_STEPS = 3
"""Steps taken and undone before a capture: libraries choose their kernels in them, compilers compile."""
OUTSIDE_STEP = ("seed", "lr", "epochs", "eval_every", "clip")
"""Recipe fields that no compiled function depends on; a task adds its own, see `Task.outside_step`."""
BUFFER_PREFIX = "buffer."
"""Prefix of buffers and parameters that are not in the model's own state_dict, and change in training all the same."""
PLAIN = (bool, int, float, str, NoneType)
"""Types of a module's attributes that a new run sets back."""
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Names of attributes that every module has, such as `training`."""
OPTIMIZER_PREFIX = "optimizer."
"""Prefix of the optimizer's tensors in a state dict."""
NOT_SAVED = "not saved"
"""The key in a checkpoint that replaces optimizer state which cannot be saved."""
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""What `torch.load(..., weights_only=True)` reads besides tensors and containers."""


class DeviceTask:
    """A task's model on its device and the functions of its step, which several optimizers share."""

    def __init__(
        self, task: Task, compiled: bool = False, mode: parallel.Mode | None = None, bfloat16: bool = False
    ) -> None:
        if mode is not None and not task.supports_parallel:
            raise InvalidInput(f"parallel={mode!r} is for language models; {type(task).__name__} has one process")
        self.task, self.mode = task, mode
        self.model: nn.Module = build_initial_model(task, 0).to(task.device)
        self.parallel_model = parallel.wrap_model(self.model, mode, bfloat16, compiled)
        self.make_batch: Callable[..., Any] = task.make_batch
        self.loss_and_correct: Callable[..., Any] = task.loss_and_correct
        if compiled and mode is None:
            functions = (task.make_batch, task.loss_and_correct)
            self.make_batch, self.loss_and_correct = (torch.compile(each, dynamic=False) for each in functions)


class TrainingStep:
    """A model, its optimizer and the plan of an epoch at fixed addresses; `step` reads and changes only these.

    The index of the step is on the device too, so a captured step has no input. A checkpoint saves `state_dict`, which
    contains the optimizer's own.
    """

    def __init__(self, recipe: TrainingRecipe, device_task: DeviceTask, captured: bool) -> None:
        task, device = device_task.task, device_task.task.device
        self.device_task, self.task, self.model = device_task, task, device_task.model
        self.is_third_party = recipe.is_third_party
        self.captured = captured and task.capturable and not recipe.is_third_party
        self.autocast = recipe.precision == "bf16" and device_task.mode != "fsdp"
        self.micro_batch_size, self.guarded = recipe.micro_batch_size, is_guarded(recipe)
        self.clip = math.inf if recipe.clip is None else recipe.clip
        self.lr, self.peak_lr = torch.zeros((), device=device), recipe.lr
        self._make_optimizer = partial(make_optimizer, recipe, self.model, self.lr)
        self.optimizer: Any = self._make_optimizer()
        self.group_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.step_index = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.zeros(task.steps_per_epoch, device=device)
        self.norms = torch.zeros(task.steps_per_epoch, device=device)
        self.correct = torch.zeros((), device=device)
        """Samples of the epoch that were classified correctly, if the task counts them."""
        self.indices = torch.arange(task.steps_per_epoch, device=device)
        missing = recipe.batch_size - task.last_batch_size if task.last_batch_size else 0
        self.samples_per_epoch = task.steps_per_epoch * recipe.batch_size - missing
        self.plan: EpochPlan = {}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warmed_up = False

    # State

    def _own_tensors(self) -> dict[str, Tensor]:
        """All tensors that a step changes but the optimizer's, by their names in a checkpoint."""
        norms = {"norms": self.norms} if self.guarded else {}
        correct = {"correct": self.correct} if self.task.train_metric else {}
        saved = self.model.state_dict()
        model = {f"{MODEL_PREFIX}{name}": value for name, value in saved.items()}
        rest = {name: value for name, value in _parameters_and_buffers(self.model).items() if name not in saved}
        buffers = {f"{BUFFER_PREFIX}{name}": value for name, value in rest.items()}
        return {**model, **buffers, "step_index": self.step_index, "losses": self.losses, **norms, **correct}

    def _state_tensors(self, optimizer: Any) -> list[Tensor]:
        """The tensors of an optimizer's state, in the order of this one's."""
        states = [(own, optimizer.state[param]) for param, own in self.optimizer.state.items()]
        return [state[name] for own, state in states for name in own]

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs: `model.NAME` and `optimizer.INDEX.NAME` as in their own state dicts, other
        buffers, and the losses of the epoch. Of a third-party optimizer `optimizer` is what `make_plain_state` returns.
        """
        optimizer = self.optimizer.state_dict()
        if self.is_third_party:
            return {**self._own_tensors(), "optimizer": make_plain_state(optimizer)}
        return self._own_tensors() | flatten_optimizer_state(optimizer)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a `state_dict`. Its tensors may be whole where this process has a shard; ours keep their addresses,
        which a captured step depends on. Raises ValueError if it does not fit.
        """
        self._register_buffers({name: value for name, value in saved.items() if name.startswith(BUFFER_PREFIX)})
        optimizer = self._make_optimizer()
        own = self._own_tensors()
        for name, value in own.items():
            if name not in saved or (saved[name].shape, saved[name].dtype) != (value.shape, value.dtype):
                raise InvalidInput(f"{name} does not fit")
        rest = {name: value for name, value in saved.items() if name not in own}
        pairs = [(value, saved[name]) for name, value in own.items()]
        if self.is_third_party:
            # A checkpoint lacks options that are objects; the new optimizer has them.
            groups = zip(optimizer.state_dict()["param_groups"], rest["optimizer"]["param_groups"], strict=True)
            merged = [{**own_group, **group} for own_group, group in groups]
            optimizer.load_state_dict({**rest["optimizer"], "param_groups": merged})
            self.optimizer = optimizer
        else:
            optimizer.load_state_dict(unflatten_optimizer_state(rest, optimizer.state_dict()))
            pairs += zip(self._state_tensors(self.optimizer), self._state_tensors(optimizer), strict=True)
        with torch.no_grad():
            for target, value in pairs:
                parallel.copy_into(target, value)

    def _register_buffers(self, saved: Mapping[str, Tensor]) -> None:
        """Register those buffers of a checkpoint that a forward pass makes or resizes, in the shape that they had."""
        own, modules = _parameters_and_buffers(self.model), dict(self.model.named_modules())
        for name, value in saved.items():
            buffer = name.removeprefix(BUFFER_PREFIX)
            module, _, last = buffer.rpartition(".")
            if module in modules and (buffer not in own or own[buffer].shape != value.shape):
                modules[module].register_buffer(last, value.to(self.lr.device), persistent=False)

    def reset(self, seed: int) -> None:
        """Go back to the start of a run with this seed: its initial weights, and no state of any step."""
        model = build_initial_model(self.task, seed)
        initial = _parameters_and_buffers(model) | model.state_dict()
        modules = dict(self.model.named_modules())
        for name, value in list_attributes(model):
            module, _, attribute = name.rpartition(".")
            if isinstance(value, PLAIN) and module in modules:
                modules[module].__dict__[attribute] = value
        if self.is_third_party:
            self.optimizer = self._make_optimizer()
        with torch.no_grad():
            for name, value in self._own_tensors().items():
                if name.startswith((MODEL_PREFIX, BUFFER_PREFIX)):
                    of_model = name.partition(".")[2]
                    start = initial.get(of_model)
                    if start is None or start.shape != value.shape:
                        raise InvalidInput(
                            f"the model's buffer {of_model!r} was made or resized by a forward pass, so no second run "
                            "can start in this process; register it in model(), in its final shape"
                        )
                    parallel.copy_into(value, start)
                else:
                    value.zero_()
            for value in [] if self.is_third_party else self._state_tensors(self.optimizer):
                value.zero_()

    # Steps

    def plan_epoch(self, recipe: TrainingRecipe, epoch: int) -> EpochPlan:
        """The task's plan of an epoch, with the learning rates."""
        steps_per_epoch = self.task.steps_per_epoch
        first = epoch * steps_per_epoch
        rates = [recipe.learning_rate(first + index, steps_per_epoch) for index in range(steps_per_epoch)]
        return {**self.task.plan_epoch(recipe, epoch), "lr": torch.tensor(rates)}

    def set_plan(self, plan: EpochPlan, at: int) -> None:
        """Copy the plan of an epoch to the device, without waiting for it, and prepare to take its steps from `at` on.

        The first call also captures the step as a CUDA graph, or warms up DDP.
        """
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
        if self.device_task.mode == "ddp" and not self.warmed_up:
            # DDP rebuilds its buckets after its first step, which changes the order of its sums. A resumed run must
            # reduce in the same order as an uninterrupted one.
            self._warm_up()

    def step(self, samples: int = 0) -> None:
        """Take the next step of the plan; a step with fewer `samples` than the others is not the captured one."""
        if self.graph is not None and not samples:
            self.graph.replay()
        else:
            self._step(samples)

    def run(self, recipe: TrainingRecipe) -> Iterator[Tensor]:
        """Train from the start of a run, without end; yields the loss of each step, after the step."""
        self.reset(recipe.seed)
        for epoch in count():
            self.set_plan(self.plan_epoch(recipe, epoch), at=0)
            for index in range(self.task.steps_per_epoch):
                self.step(self.task.last_batch_size if index + 1 == self.task.steps_per_epoch else 0)
                yield self.losses[index].clone()

    def _step(self, samples: int = 0) -> None:
        functions = self.device_task.make_batch, self.device_task.loss_and_correct
        row = {name: value.index_select(0, self.step_index).squeeze(0) for name, value in self.plan.items()}
        self.lr.copy_(row.pop("lr"))
        if self.is_third_party:
            for group, lr in zip(self.optimizer.param_groups, self.group_lrs, strict=True):
                group["lr"] = lr * (self.lr.item() / self.peak_lr if self.peak_lr else 0.0)
        if samples:
            row = {name: value[:samples] if value.dim() else value for name, value in row.items()}
            functions = self.task.make_batch, self.task.loss_and_correct  # one step per epoch is not worth compiling
        self.optimizer.zero_grad()
        loss = self._backward(row, *functions)
        if self.guarded:
            self._guarded_step(loss)
        else:
            self.optimizer.step()
        self._record(self.losses, loss)
        self.step_index += 1

    def _backward(self, row: StepPlan, make_batch: Callable[..., Any], loss_and_correct: Callable[..., Any]) -> Tensor:
        """Compute gradients of the mean loss over all processes and micro-batches; returns that loss."""
        micro_batches = _split(row, self.micro_batch_size)
        losses = []
        for number, part in enumerate(micro_batches, start=1):
            parallel.set_gradient_sync(self.device_task.parallel_model, last=number == len(micro_batches))
            with torch.autocast(self.lr.device.type, torch.bfloat16, enabled=self.autocast):
                loss, correct = loss_and_correct(self.device_task.parallel_model, make_batch(part))
            if correct is not None:
                self.correct += correct
            (loss if len(micro_batches) == 1 else loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        return parallel.all_reduce_mean(losses[0] if len(micro_batches) == 1 else torch.stack(losses).mean())

    def _guarded_step(self, loss: Tensor) -> None:
        """Clip the gradient and step, unless the loss or the norm of the gradient is not finite."""
        norm = parallel.full_tensor(nn.utils.clip_grad_norm_(self.model.parameters(), self.clip))
        finite = loss.isfinite() & norm.isfinite()
        if not self.is_third_party and self.optimizer._step_supports_amp_scaling:
            self.optimizer.found_inf = (~finite).float()  # as GradScaler passes it, without a synchronization
            self.optimizer.step()
        elif finite:
            self.optimizer.step()
        self._record(self.norms, norm)

    def train_metrics(self) -> dict[str, float]:
        """The share of correct samples in the epoch, in percent, if the task counts them."""
        name, samples = self.task.train_metric, self.samples_per_epoch
        return {name: 100 * self.correct.item() / samples} if name else {}

    def _record(self, values: Tensor, value: Tensor) -> None:
        """Store a value of the current step. Assignment by index would sort in its deterministic form."""
        values.copy_(torch.where(self.indices == self.step_index, value.detach(), values))

    def _warm_up(self) -> None:
        """Take steps and undo them."""
        tensors = [*self._own_tensors().values(), *self._state_tensors(self.optimizer)]
        before = [value.clone() for value in tensors]
        for _ in range(WARM_UP_STEPS):
            self.step_index.zero_()
            self._step()
        with torch.no_grad():
            for value, old in zip(tensors, before, strict=True):
                parallel.copy_into(value, old)
        self.optimizer.zero_grad()  # the gradients of a graph must be allocated in its own memory
        self.warmed_up = True

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = _side_stream(self.step_index.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._warm_up()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for every capture: what libraries allocate per stream, 64 MiB for cuBLAS on Hopper, is never freed."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _parameters_and_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}


def list_attributes(model: nn.Module) -> list[tuple[str, Any]]:
    """The attributes of a model's modules, without those that every module has, with their names in the model."""
    return [
        (f"{prefix}.{name}".removeprefix("."), value)
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in MODULE_ATTRIBUTES
    ]


def is_guarded(recipe: TrainingRecipe) -> bool:
    """Whether every step needs the norm of its gradient: to clip it, or to skip steps that are not finite."""
    return recipe.clip is not None or recipe.nonfinite_limit > 1


def _split(row: StepPlan, size: int) -> list[StepPlan]:
    """Split a step's plan into micro-batches; values without a sample dimension are in each of them."""
    samples = max((len(value) for value in row.values() if value.dim()), default=0)
    if samples <= size:
        return [row]
    return [
        {name: value[first : first + size] if value.dim() else value for name, value in row.items()}
        for first in range(0, samples, size)
    ]


def make_plain_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A third-party optimizer's state dict with tensors and plain values only, which is what a checkpoint can hold.

    Options that are objects are left out: a new optimizer has the same ones. State that has an object cannot be saved;
    the result is then {NOT_SAVED: its type}.
    """
    if kind := _find_object(state_dict["state"]):
        return {NOT_SAVED: kind}
    groups = [
        {name: value for name, value in group.items() if not _find_object(value)}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def _find_object(value: Any) -> str:
    """The type of the first part of a value that is neither a tensor nor plain; "" if there is none."""
    if type(value) in (list, tuple, dict, OrderedDict):
        parts = value.values() if isinstance(value, dict) else value
        return next(filter(None, map(_find_object, parts)), "")
    return "" if isinstance(value, Tensor) or type(value) in PLAIN_TYPES else type(value).__qualname__


def flatten_optimizer_state(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of an optimizer's state dict as `optimizer.INDEX.NAME`, as a checkpoint has them."""
    return {
        f"{OPTIMIZER_PREFIX}{index}.{name}{part and '.'}{part}": value
        for index, state in state_dict["state"].items()
        for name, parts in state.items()
        for part, value in (parts.items() if isinstance(parts, dict) else [("", parts)])
        if isinstance(value, Tensor)
    }


def unflatten_optimizer_state(saved: Mapping[str, Tensor], template: dict[str, Any]) -> dict[str, Any]:
    """A state dict like `template`, sharded as it is, from what `flatten_optimizer_state` returned."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in saved.items():
        index, key, *part = name.removeprefix(OPTIMIZER_PREFIX).split(".")
        entry = state.setdefault(int(index), {})
        if part:  # 8-bit blocks have several parts
            entry, key = entry.setdefault(key, {}), part[0]
        entry[key] = value
    result = {**template, "state": state}
    shards = {
        (index, name): value
        for index, names in template["state"].items()
        for name, value in names.items()
        if parallel.is_sharded(value)
    }
    if shards and any("_scale" in name for name in saved):
        result = convert_state_dict(result, torch.float32)  # 8-bit blocks of whole tensors cannot be split into shards
        result["param_groups"] = template["param_groups"]
    for (index, name), shard in shards.items():
        result["state"][index][name] = parallel.shard_like(result["state"][index][name], shard)
    return result


_device_tasks: dict[Any, DeviceTask] = {}
_training_steps: dict[Any, TrainingStep] = {}


def get_training_step(
    recipe: TrainingRecipe,
    data: Path | None,
    device: torch.device,
    compiled: bool,
    captured: bool,
    task_class: Callable[..., Task] | None = None,
    mode: parallel.Mode | None = None,
) -> TrainingStep:
    """The training step of a recipe: that of the previous run, captured and all, if both depend on the same fields.

    Models and what is compiled of them are cached for the life of the process; of training steps only the last,
    because a captured one holds the memory of a whole step.
    """
    make = find_task_class(recipe) if task_class is None else task_class
    outside = {*OUTSIDE_STEP, *OPTIMIZER_FIELDS, *getattr(make, "outside_step", ())}
    settings = str({name: value for name, value in recipe.settings.items() if name not in outside})
    task_key = recipe.name, settings, data, device, compiled, make, mode
    key = task_key, optimizer_key(recipe), is_guarded(recipe), recipe.clip, captured
    if key not in _training_steps:
        _training_steps.clear()
        for other in _device_tasks.values():
            other.model.zero_grad()  # gradients are in the memory of the graph that computed them
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if task_key not in _device_tasks:
            _device_tasks[task_key] = DeviceTask(make(recipe, data, device), compiled, mode, recipe.precision == "bf16")
        _training_steps[key] = TrainingStep(recipe, _device_tasks[task_key], captured)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # a run's peak excludes what earlier runs have freed
    return _training_steps[key]


def clear_cache() -> None:
    """Free all that `get_training_step` has cached."""
    _training_steps.clear()
    _device_tasks.clear()
