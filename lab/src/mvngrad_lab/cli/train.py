"""`mvngrad train NAME`: one subcommand for each preset of a task; its options default to the paper's settings."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, cast, get_args

import tyro
from tyro.conf import arg, subcommand
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from mvngrad_lab import store
from mvngrad_lab.cli.options import Data, Runs, make_runs_folder
from mvngrad_lab.errors import InvalidInput, NotPossible
from mvngrad_lab.recipe import DECOUPLED, RULES, Preset, TrainingRecipe, get_cell, parse_optimizer
from mvngrad_lab.tasks import find_presets, find_task_class
from mvngrad_lab.tasks.own.recipe import Own

R = TypeVar("R", bound=TrainingRecipe)
SECONDS = ("seconds", "setup_seconds")
"""Numbers of a result that are not metrics."""


@dataclass
class Train(Generic[R]):
    """Train a network; an interrupted run is resumed, a finished one is not repeated."""

    recipe: Annotated[R, arg(name="")]
    data: Data = None
    runs: Runs = store.ROOT
    device: Annotated[Literal["auto", "cpu", "cuda"], arg(help="where to train")] = "auto"
    compile: Annotated[bool, arg(help="compile the model first: takes a minute, pays off in long runs")] = False
    parallel: Annotated[
        Literal["ddp", "fsdp"] | None,
        arg(
            help="train on all processes of torchrun: each has the whole model (ddp) or a shard (fsdp)",
            help_behavior_hint="(default: one process)",
        ),
    ] = None
    checkpoint_every: Annotated[float, arg(metavar="SECONDS", help="between checkpoints")] = 60.0
    monitored: Annotated[
        bool, arg(help="also record the optimizer's regime after each epoch, for `mvngrad diagnose`")
    ] = False
    tensorboard: Annotated[
        Path | None, arg(metavar="FOLDER", help="also write TensorBoard files there", help_behavior_hint="")
    ] = None
    wandb: Annotated[str | None, arg(metavar="PROJECT", help="also log to Weights & Biases", help_behavior_hint="")] = (
        None
    )

    def __call__(self) -> int:
        from mvngrad_lab.cli.data import progress
        from mvngrad_lab.training.train import Interrupted, make_monitor_observer, train

        self._check()
        first = os.environ.get("RANK", "0") == "0"
        with progress() as bar:
            recipe: Any = find_task_class(self.recipe).prepare_recipe(self.recipe, self.data, bar)
        if first:
            make_runs_folder(self.runs)
            self._say_if_finished(recipe)
            self._say_if_partly_monitored(recipe)
            if recipe.optimizer in DECOUPLED and recipe.weight_decay == 0:
                name = recipe.optimizer
                print(f"weight_decay=0: {name} is the same as {name.removesuffix('w')}; set --weight-decay")
        with self._open_listeners(recipe, first) as listeners:
            try:
                run = train(
                    recipe,
                    root=self.runs,
                    data=self.data,
                    device=self._choose_device(),
                    compile=self.compile,
                    parallel=self.parallel,
                    checkpoint_every=self.checkpoint_every,
                    on_event=lambda event: [listen(event) for listen in listeners],
                    observe=make_monitor_observer(self.runs / recipe.key) if first and self.monitored else None,
                )
            except Interrupted as stop:
                if first:
                    print(f"mvngrad: {stop}", file=sys.stderr)
                return 128 + stop.signal_number
        if first:
            print(format_result(run))
            print(f"results: {self.runs / run.key}")
        return int(run.result["status"] != "finished")

    def _check(self) -> None:
        """Raise InvalidInput if an option is invalid, or not possible on this machine."""
        import torch

        from mvngrad_lab.training.optimizers import check_optimizer
        from mvngrad_lab.training.train import check_monitorable

        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size > 1 and self.parallel is None:
            raise InvalidInput(
                f"{world_size} processes would each train the whole; add --parallel ddp or --parallel fsdp"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InvalidInput("--device cuda: this torch sees no GPU; use --device cpu")
        if not self.checkpoint_every >= 0:
            raise InvalidInput(f"--checkpoint-every {self.checkpoint_every} is invalid; it must be at least 0")
        check_optimizer(self.recipe)
        if self.monitored:
            check_monitorable(self.recipe)

    def _choose_device(self) -> str:
        import torch

        return ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device

    def _say_if_finished(self, recipe: TrainingRecipe) -> None:
        """Say so if the run is in the store; raise NotPossible if it lacks the monitor file that is asked for."""
        if store.RunFolder(recipe, self.runs).run is None:
            return
        folder = self.runs / recipe.key
        if self.monitored and not (folder / store.MONITOR).exists():
            raise NotPossible(
                f"{folder} is finished, without {store.MONITOR}; train it again with another --runs FOLDER"
            )
        print(f"{recipe.key}  already finished")

    def _say_if_partly_monitored(self, recipe: TrainingRecipe) -> None:
        """Say so if the run was started without a Monitor: its file will lack the first epochs."""
        folder = self.runs / recipe.key
        if self.monitored and (folder / "metrics.jsonl").exists() and not (folder / store.MONITOR).exists():
            print(f"{recipe.key}  was started without --monitored: {store.MONITOR} will lack its epochs so far")

    @contextmanager
    def _open_listeners(self, recipe: TrainingRecipe, first: bool) -> Iterator[list[Any]]:
        """What the first process calls with each event of the training, closed at the end; the others call nothing."""
        from rich.console import Console

        from mvngrad_lab.cli.progress import TrainingBar
        from mvngrad_lab.training import events

        with ExitStack() as stack:
            listeners: list[Any] = []
            if first and self.tensorboard is not None:
                listeners.append(stack.enter_context(closing(events.TensorBoard(self.tensorboard, recipe))))
            if first and self.wandb is not None:
                listeners.append(stack.enter_context(closing(events.WandB(self.wandb, recipe))))
            if first:
                listeners.append(stack.enter_context(TrainingBar(Console())))
            yield listeners


def format_result(run: store.FinishedRun) -> str:
    """How a run ended, in one line; result.json has the rest."""
    from mvngrad_lab.training.events import format_metrics, format_minutes

    result = run.result
    if result["status"] != "finished":
        reason = f", {', '.join(names)} not finite" if (names := result.get("nonfinite_metrics")) else ""
        return f"{run.key}  {result['status']} at step {result['step']} of {result['steps']}{reason}"
    metrics = {name: value for name, value in result.items() if isinstance(value, float) and name not in SECONDS}
    return f"{run.key}  finished in {format_minutes(result['seconds'])}: {', '.join(format_metrics(run.key, metrics))}"


def _parse_optional_float(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[float | None] | None:
    """Show `float | None` as FLOAT; `None` is still a valid value."""
    if set(get_args(info.type)) != {float, NoneType}:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="FLOAT",
        instance_from_str=lambda words: None if words[0] == "None" else float(words[0]),
        is_instance=lambda value: value is None or isinstance(value, int | float),
        str_from_instance=lambda value: [str(value)],
    )


TYPES = ConstructorRegistry()
TYPES.primitive_rule(_parse_optional_float)


def parse_training(arguments: list[str], description: str, config: Any) -> Train[Any]:
    """The training that the arguments name: a preset of ours, or `package.module:function`."""
    sys.path.insert(0, "")  # tasks and optimizers in the current folder are importable
    name = arguments[0] if arguments else ""
    if ":" in name:
        from mvngrad_lab.tasks.own.task import load_preset

        presets = {name: load_preset(name)}
    else:
        presets = find_presets()
    if name and not name.startswith("-") and name not in presets:
        raise InvalidInput(f"there is no task {name!r}; choose from {', '.join(presets)}, or package.module:function")
    if name not in presets:  # --help
        arguments = arguments or ["--help"]
        kinds = tuple(
            Annotated[Train[each.recipe], subcommand(name, default=Train(_default_recipe(each)), description=each.help)]  # type: ignore[name-defined]
            for name, each in presets.items()
        )
        kind: Any = Union[kinds]  # noqa: UP007 (made at run time)
        return cast(
            Train[Any],
            tyro.cli(
                kind, prog="mvngrad train", description=description, args=arguments, config=config, registry=TYPES
            ),
        )
    preset = presets[name]
    recipe, kind = make_default(preset, arguments), preset.recipe
    if ":" in name:
        kind = _HiddenName
        recipe = kind(**vars(recipe))
    options: Any = {"prog": f"mvngrad train {name}", "description": preset.help, "default": Train(recipe)}
    return cast(Train[Any], tyro.cli(Train[kind], args=arguments[1:], config=config, registry=TYPES, **options))


@dataclass(frozen=True, kw_only=True)
class _HiddenName(Own):
    """A recipe of a user's task, whose name is no option: it is the command's first argument."""

    task: Annotated[str, tyro.conf.Suppress]
    code: Annotated[str, tyro.conf.Suppress]


def make_default(preset: Preset, arguments: Sequence[str]) -> TrainingRecipe:
    """The recipe with the defaults for the optimizer and batch size among the arguments."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--optimizer")
    parser.add_argument("--batch-size", default="")
    options, _ = parser.parse_known_args([re.sub("^--[^=]*", _write_with_hyphens, part) for part in arguments])
    if ":" in (options.optimizer or ""):
        from mvngrad_lab.training.optimizers import import_module_of

        import_module_of(options.optimizer)
    try:
        batch_size = int(options.batch_size)
    except ValueError:  # refused later
        batch_size = None
    return _default_recipe(preset, options.optimizer or "", batch_size)


def _write_with_hyphens(name: re.Match[str]) -> str:
    """The name of an option, as --batch_size; not its value, which may follow it after =."""
    return name[0].replace("_", "-")


def _default_recipe(preset: Preset, optimizer: str = "", batch_size: int | None = None) -> TrainingRecipe:
    """The preset's settings for an optimizer. An unknown name is left for the recipe to refuse."""
    optimizer = parse_optimizer(optimizer or preset.optimizer)
    cell = get_cell(optimizer)
    if ":" in optimizer and optimizer == preset.optimizer:  # a user's task sets the options of its own optimizer
        return preset.make(optimizer, batch_size)
    if ":" in optimizer:
        recipe = preset.make(preset.optimizer, batch_size)
        return replace(recipe, optimizer=optimizer, beta1=None, beta2=None, eps=None, eps_s=None)
    if cell not in RULES:
        return preset.make(preset.optimizer, batch_size)
    suffix = "w" if preset.optimizer.endswith("w") else ""
    return replace(preset.make(cell + suffix, batch_size), optimizer=optimizer)
