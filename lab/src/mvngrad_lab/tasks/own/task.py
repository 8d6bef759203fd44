"""A task of your own: a function without arguments that returns an `OwnTask`.

`mvngrad train package.module:function` trains it; in a sweep, `make_recipe(function)` is its recipe.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.recipe import RULES, Preset, get_cell, has_eps_s, hash_code, parse_optimizer
from mvngrad_lab.tasks.own.recipe import Own
from mvngrad_lab.training.loop import hash_tensors
from mvngrad_lab.training.step import PLAIN, list_attributes
from mvngrad_lab.training.task import EpochPlan, StepPlan, Task, make_generators, seed_generators


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnTask:
    """A model and its data, for `mvngrad train package.module:function` and for sweeps."""

    model: Callable[[], Any]
    """Makes the torch.nn.Module; the seed of the run is set before it is called."""
    loss: Callable[..., Any]
    """`loss(model, *batch)` is the mean loss of a batch, a tensor."""
    train: Any
    """A tuple of tensors, whose first dimension counts samples; or a torch Dataset with a length."""
    validation: Any
    """Of the same form; `validation_loss` is its mean loss."""
    test: Any = None
    """Of the same form; evaluated once, at the end."""
    metrics: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    """Functions by name, called as `loss` is. Their means are `validation_NAME` and `test_NAME` in the result."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Defaults of the options of `mvngrad train`, such as `epochs` and `lr`."""

    def __post_init__(self) -> None:
        if "loss" in self.metrics:
            raise InvalidInput("metrics has 'loss', which names the mean of `loss` in the result; use another name")


_functions: dict[str, Callable[[], OwnTask]] = {}
"""The tasks that this process may train, by their name in a recipe.

A recipe may come from the store of a sweep, which must not choose code: only a function that the command line named, or
that the sweep's own code gave to `make_recipe`, is called.
"""


def make_recipe(function: Callable[[], OwnTask], optimizer: str | None = None, **settings: Any) -> Own:
    """The recipe of a task: its own settings, and those given here in their place.

    Args:
        function: at the top level of a module, without arguments; returns an `OwnTask`.
        optimizer: as in `mvngrad train --optimizer`; None is that of the task's settings, else mvngrad.
        settings: fields of `Own`, such as lr and epochs.

    Raises:
        InvalidInput: a setting is invalid, or the function has no name at the top level of its module, as one made by
            another function or by `partial`: several of these would be one run.
    """
    module, name = function.__module__, getattr(function, "__qualname__", "")
    if getattr(sys.modules.get(module), name, None) is not function:
        raise InvalidInput(f"{function!r} is not a function at the top level of a module; define one for each task")
    return _make(f"{module}:{name}", function, optimizer, settings)


def load_preset(path: str) -> Preset:
    """The preset of `package.module:function`, as `mvngrad train` has for its own tasks.

    Raises:
        InvalidInput: there is no such function, it raises, or it returns something else.
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(import_module(module), name)
        optimizer = _make(path, function, None, {}).optimizer
    except InvalidInput:
        raise
    except Exception as error:  # the user's code: anything
        raise InvalidInput(f"the task {path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    summary = (function.__doc__ or "").strip().partition("\n")[0] or f"The task {path}."
    return Preset(Own, lambda name, _: _make(path, function, name, {}), optimizer, summary)  # type: ignore[arg-type]


def get_own_task(path: str) -> OwnTask:
    """The task of a recipe. Imports nothing, and calls only what was named in this process."""
    if path not in _functions:
        raise InvalidInput(
            f"task={path!r} is not of this command or sweep; name it in `mvngrad train`, or give the function to "
            "make_recipe in the module of your sweep"
        )
    with seed_generators(0):  # random data is the same after a resume
        task = _functions[path]()
    if not isinstance(task, OwnTask):
        raise InvalidInput(f"{path!r} returned a {type(task).__name__}; it must return an OwnTask")
    return task


def _make(path: str, function: Callable[[], OwnTask], optimizer: str | None, settings: dict[str, Any]) -> Own:
    if getattr(_functions.get(path), "__wrapped__", None) is not function:  # new, or its module was loaded again
        _functions[path] = cache(function)
    defaults = {"optimizer": "mvngrad", "lr": 1e-3, **get_own_task(path).settings}
    defaults["optimizer"] = parse_optimizer(defaults["optimizer"])
    if optimizer is not None and (optimizer := parse_optimizer(optimizer)) != defaults["optimizer"]:
        defaults = {name: value for name, value in defaults.items() if name != "eps_s"} | {"optimizer": optimizer}
    if (cell := get_cell(defaults["optimizer"])) in RULES:
        defaults = {"beta1": 0.9, "beta2": 0.999, "eps_s": 1e-16 if has_eps_s(cell) else None, **defaults}
    else:
        defaults = {"beta1": None, "beta2": None, "eps": None, **defaults}
    given = {**defaults, **settings}
    unknown = given.keys() - {field.name for field in dataclasses.fields(Own)}
    if unknown:
        raise InvalidInput(
            f"{path!r}: {', '.join(sorted(unknown))} is no setting; `mvngrad train {path} --help` lists them"
        )
    return Own(task=path, code=hash_code(path), **given)


# Training


class Samples:
    """A set of data: batches by index, on a device."""

    def __init__(self, name: str, data: Any, device: torch.device) -> None:
        self.device, self.data = device, data
        self.in_memory = isinstance(data, (tuple, list)) and all(isinstance(part, Tensor) for part in data)
        if isinstance(data, tuple) and not self.in_memory and any(hasattr(part, "__array__") for part in data):
            raise InvalidInput(f"{name} has an array that is no tensor; convert each with torch.from_numpy")
        if self.in_memory:
            lengths = sorted({len(part) for part in data})
            if len(lengths) != 1:
                raise InvalidInput(f"the tensors of {name} have {lengths} samples; all must have the same number")
            self.length, self.data = lengths[0], tuple(part.to(device) for part in data)
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping):
            self.length = len(data)
        else:
            raise InvalidInput(f"{name} is a {type(data).__name__}; it must be a tuple of tensors, or a Dataset")
        if not self.length:
            raise InvalidInput(f"{name} has no samples")

    def read(self, indices: Tensor) -> tuple[Any, ...]:
        if self.in_memory:
            return tuple(part[indices] for part in self.data)
        batch = default_collate([self.data[index] for index in indices.tolist()])
        moved = _move(batch, self.device)
        return tuple(moved) if isinstance(moved, (tuple, list)) else (moved,)

    def batches(self, size: int) -> Iterator[tuple[Any, ...]]:
        """All samples in order; the last batch may be smaller."""
        where = self.device if self.in_memory else torch.device("cpu")
        for start in range(0, self.length, size):
            yield self.read(torch.arange(start, min(start + size, self.length), device=where))


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _move(part, device) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_move(part, device) for part in value)
    return value.to(device) if isinstance(value, Tensor) else value


def _hash_plain_tensors(model: nn.Module) -> dict[str, str]:
    """Hashes of the dense tensors of a model that are neither parameters nor buffers, nor views of one, by name."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    return {
        name: hash_tensors({name: value})
        for name, value in list_attributes(model)
        if isinstance(value, Tensor) and value.layout == torch.strided
        # weight_norm, spectral_norm and pruning keep the weight that they compute from parameters as such a tensor.
        if value.grad_fn is None and value.data_ptr() not in parameters
    }


def _describe_attributes(model: nn.Module) -> dict[str, str]:
    """What training may change in a model and no checkpoint has, by name."""
    plain = {name: repr(value) for name, value in list_attributes(model) if isinstance(value, PLAIN)}
    return plain | _hash_plain_tensors(model)


class OwnTaskTraining(Task):
    """Batches in a new order each epoch, without the last partial one."""

    outside_step = ("schedule", "warmup_epochs")

    def __init__(self, recipe: Own, folder: Path | None, device: torch.device) -> None:
        if folder is not None:
            raise InvalidInput(f"--data {folder}: {recipe.task} reads its data itself; leave --data out")
        own = get_own_task(recipe.task)
        if recipe.code != hash_code(recipe.task):
            raise InvalidInput(f"task={recipe.task!r}: its module has changed since; make the recipe again")
        self.own, self.device, self.source = own, device, f"{recipe.task}, code {recipe.code}"
        self.path = recipe.task
        self.first_model: nn.Module | None = None
        """What `build_model` made first: all runs of this process train it, each from the values of a new model."""
        self.train = Samples("train", self.own.train, device)
        self.sets = {"validation": Samples("validation", self.own.validation, device)}
        if self.own.test is not None:
            self.sets["test"] = Samples("test", self.own.test, device)
        self.capturable, self.batch_size = self.train.in_memory, recipe.batch_size
        self.steps_per_epoch = self.train.length // recipe.batch_size
        if not self.steps_per_epoch:
            raise InvalidInput(
                f"batch_size={recipe.batch_size} is more than the {self.train.length} training samples; make it smaller"
            )

    def build_model(self) -> nn.Module:
        model = self.own.model()
        if not isinstance(model, nn.Module):
            raise InvalidInput(
                f"model() of {self.path!r} returned a {type(model).__name__}; it must return a torch.nn.Module"
            )
        if next(model.parameters(), None) is None:
            raise InvalidInput(
                f"model() of {self.path!r} returned a {type(model).__name__} without parameters, so there is nothing "
                "to train; register its weights as torch.nn.Parameter"
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InvalidInput(
                f"model() of {self.path!r} returned a model whose parameters are all frozen; at least "
                "one must have requires_grad=True"
            )
        if any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
            raise InvalidInput(
                f"model() of {self.path!r} returned a lazy module; call it with a batch in model() first"
            )
        for name, value in model.state_dict().items():
            if not isinstance(value, Tensor):
                raise InvalidInput(f"the model of {self.path!r} has {name}, which is not a tensor, in its state_dict")
        self._check_what_runs_share(model)
        return model

    def _check_what_runs_share(self, model: nn.Module) -> None:
        """Raise if a new model has parameters of the first one, or other plain tensors than that has by now."""
        if self.first_model is None:
            self.first_model, self.first_attributes = model, _describe_attributes(model)
            return
        before = {id(parameter) for parameter in self.first_model.parameters()}
        if any(id(parameter) in before for parameter in model.parameters() if parameter.requires_grad):
            raise InvalidInput(
                f"model() of {self.path!r} returned parameters that it had returned before, so that all runs and seeds "
                "would share them; make a new model at each call, as in model=lambda: Net()"
            )
        shared = _hash_plain_tensors(self.first_model)
        if changed := [name for name, value in _hash_plain_tensors(model).items() if shared.get(name) != value]:
            raise InvalidInput(
                f"the model of {self.path!r} has a tensor {changed[0]}, which is random or changes in training; all "
                "runs of this process would share it: make it a buffer with register_buffer, or a parameter"
            )

    def find_unsaved(self) -> list[str]:
        assert self.first_model is not None
        before, now = self.first_attributes, _describe_attributes(self.first_model)
        return [name for name in {**before, **now} if before.get(name) != now.get(name)]

    def plan_epoch(self, recipe: Own, epoch: int) -> EpochPlan:
        draw, generator = make_generators(recipe.seed, epoch)
        steps, size = self.steps_per_epoch, recipe.batch_size
        order = torch.randperm(self.train.length, generator=generator)[: steps * size].view(steps, size)
        seeds = {} if self.train.in_memory else {"seed": torch.tensor([draw.getrandbits(31) for _ in range(steps)])}
        return {"order": order, **seeds}

    def make_batch(self, row: StepPlan) -> tuple[Any, ...]:
        if self.train.in_memory:
            return self.train.read(row["order"])
        with seed_generators(int(row["seed"])):  # what a Dataset draws is the same after a resume
            return self.train.read(row["order"])

    def loss(self, model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
        loss = self.own.loss(model, *batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise InvalidInput(
                f"loss() of {self.path!r} returned {_describe(loss)}; it must return the mean loss of the batch, a "
                "tensor with one number"
            )
        if not loss.requires_grad:
            raise InvalidInput(
                f"loss() of {self.path!r} does not depend on a parameter that requires a gradient; compute it from the "
                "output of the model, without detach() or item()"
            )
        return loss

    def evaluate(self, model: Callable[..., Any], final: bool) -> dict[str, float]:
        """Mean loss and metrics of the validation samples and, at the end, of the test samples."""
        functions = {"loss": self.own.loss, **self.own.metrics}
        totals: dict[str, float] = {}
        for name, samples in self.sets.items():
            if name == "test" and not final:
                continue
            done = 0
            for batch in samples.batches(self.batch_size):
                size = min(self.batch_size, samples.length - done)
                done += size
                for metric, function in functions.items():
                    key, value = f"{name}_{metric}", self._make_number(metric, function(model, *batch))
                    totals[key] = totals.get(key, 0.0) + value * size / samples.length
        return totals

    def _make_number(self, metric: str, value: Any) -> float:
        """What a metric returned, as a number; raises InvalidInput if it is none."""
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            name = "loss()" if metric == "loss" else f"metrics[{metric!r}]"
            raise InvalidInput(
                f"{name} of {self.path!r} returned {_describe(value)}; it must return one number, the mean over the "
                "batch"
            ) from None


def _describe(value: Any) -> str:
    """The type of a value, and of a tensor also the shape."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


TASK = OwnTaskTraining
