"""The training loop of every recipe: on one GPU or a CPU, resumable at any step, one folder of the store for a run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from mvngrad.diagnostics import Monitor
from mvngrad_lab.recipe import TrainingRecipe
from mvngrad_lab.store import MONITOR, RESULTS, ROOT, FinishedRun, RunFolder, load_runs
from mvngrad_lab.store.environment import changes, environment
from mvngrad_lab.store.lock import lock_folder
from mvngrad_lab.store.metrics import MetricsFile
from mvngrad_lab.training import parallel as processes, task as tasks
from mvngrad_lab.training.events import Event, print_event
from mvngrad_lab.training.optimizers import make_optimizer
from mvngrad_lab.training.sitting import Interrupted, Observer, Sitting
from mvngrad_lab.training.step import TrainingStep, clear_cache, get_training_step

__all__ = ["Interrupted", "configure_kernels", "train"]

SMALL_IMAGES = "`mvngrad train cifar100 --train-limit 256 --batch-size 32 --epochs 2 --warmup-epochs 1`"
SMALL_TEXT = (
    "`mvngrad train wikitext103 --model tiny --text FOLDER --steps 100 --warmup-steps 10 --batch-size 8 "
    "--micro-batch-size 8`"
)


def train(
    recipe: TrainingRecipe,
    *,
    root: Path = ROOT,
    data: Path | None = None,
    device: str | torch.device = "cpu",
    compile: bool = False,
    capture: bool | None = None,
    parallel: processes.Mode | None = None,
    checkpoint_every: float = 60.0,
    on_event: Callable[[Event], Any] = print_event,
    observe: Observer | None = None,
    task: tasks.TaskFactory = tasks.make_task,
) -> FinishedRun:
    """Train a recipe, or go on with it where a process before this one stopped; a finished run is returned as it is.

    A run whose loss is no longer finite ends as *diverged*, with the step, and that is its result. A `guarded` recipe
    leaves out a step whose loss or gradient norm is not finite, says so, and diverges at `nonfinite_limit` in a row.

    Of several processes, all call this with the same arguments; the first one writes and tells.

    Args:
        recipe: what the run is; everything that decides its numbers.
        root: the store.
        data: folder of the data; None is the loader's own.
        device: "cpu", "cuda" or "cuda:1".
        compile: hand the model and the preparation of its batches to torch.compile, once in the life of the process;
            deterministic recipes are never compiled.
        capture: replay the whole step as a CUDA graph; None does so on a GPU of one process.
        parallel: train on all processes that torchrun started, each with its share of every batch: "ddp" with the whole
            model in each, "fsdp" with a part. The data and its order are those of one process, and so is the run, to
            rounding; a checkpoint may be gone on with on another number of processes.
        checkpoint_every: seconds from one checkpoint to the next; 0 writes one after every step.
        on_event: called with a `Progress` at the end of an epoch and with a `Message` in between.
        observe: called after each epoch, before it can be in a checkpoint; its time is not counted as training.
        task: makes what the recipe trains; the module of its name in `mvngrad_lab.tasks` by default.

    Raises:
        Interrupted: SIGTERM or SIGINT came; a checkpoint of the step at hand has been written.
        Locked: another process trains this recipe in this store, or took it from this one, which was thought dead.
        torch.OutOfMemoryError: the step does not fit the device.
    """
    folder = RunFolder(recipe, root)
    with ExitStack() as stack:
        where = processes.init_process_group(parallel, torch.device(device))
        first = processes.get_rank() == 0
        if (finished := processes.broadcast_from_rank0(folder.run)) is not None:
            return cast(FinishedRun, finished)
        check = stack.enter_context(lock_folder(folder.path)) if first else lambda: None
        stack.enter_context(configure_kernels(recipe, where))
        stack.enter_context(_memory(recipe, where))
        signals = stack.enter_context(_signals())
        if (
            finished := processes.broadcast_from_rank0(folder.run)
        ) is not None:  # by the process that held it a moment ago
            return cast(FinishedRun, finished)
        started = time.perf_counter()
        captured = where.type == "cuda" and parallel is None if capture is None else capture
        _spreadable(recipe, parallel)
        stepper = get_training_step(recipe, data, where, compile and not recipe.deterministic, captured, task, parallel)
        measured_on = environment(where.type)
        if parallel is not None:
            measured_on |= {"parallel": parallel, "ranks": processes.get_world_size()}
        if first:
            check()
            folder.start(measured_on, changes())
        else:
            on_event = _nobody
        processes.barrier()
        sitting = Sitting(recipe, stepper, folder.path, checkpoint_every, on_event, observe, signals, check)
        result = {**sitting.train(), "setup_seconds": sitting.started - started}
        if first:
            check()
            folder.finish(result)
        processes.barrier()
    return FinishedRun(recipe.key, recipe.name, recipe.settings, measured_on, result)


def _spreadable(recipe: TrainingRecipe, mode: processes.Mode | None) -> None:
    """Whether shares are equal, so that the mean over processes is the mean of the batch, and state can be cut."""
    share, rest = divmod(recipe.batch_size, processes.get_world_size())
    if rest or share % min(recipe.micro_batch_size, share):
        raise ValueError(
            f"batch_size={recipe.batch_size} on {processes.get_world_size()} processes does not make whole "
            f"micro-batches of micro_batch_size={recipe.micro_batch_size}; choose them so that it does"
        )
    if mode is not None and recipe.is_third_party:
        raise ValueError(f"optimizer={recipe.optimizer!r}: only ours train on several processes, parallel={mode!r}")
    if mode == "fsdp" and recipe.state_dtype == "int8":
        raise ValueError("state_dtype='int8' cannot be cut into shards; with parallel='fsdp' take bf16, or take ddp")


def _nobody(event: Event) -> None:
    """Whom all processes but the first tell."""


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
def _memory(recipe: TrainingRecipe, device: torch.device) -> Iterator[None]:
    """Say what to change where the device is too small, and leave its memory to who tries again."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        clear_cache()
        name = "micro_batch_size" if "micro_batch_size" in recipe.settings else "batch_size"
        size = f"{name}={min(recipe.micro_batch_size, recipe.batch_size // processes.get_world_size())}"
        raise torch.OutOfMemoryError(
            f"{recipe.key} does not fit the memory of {device}; make {size} smaller, or free memory that others hold "
            f"there ({str(error).splitlines()[0]})"
        ) from error


@contextmanager
def configure_kernels(recipe: TrainingRecipe, device: torch.device) -> Iterator[None]:
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


def require_gpu(target: str, what: str, small: str = SMALL_IMAGES) -> None:
    """Raise RuntimeError if there is no CUDA device."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"{target} {what} and needs a CUDA device; on a CPU, try a small one with {small}")


def stored_keys(root: Path) -> set[str]:
    """Keys of the finished runs in `root` and in the repository's results."""
    return {run.key for run in load_runs(root, RESULTS)}


def train_missing(
    recipes: Sequence[TrainingRecipe],
    root: Path,
    data: Path | None,
    tick: Callable[[float], None],
    on_event: Callable[[Event], Any],
    watched: Callable[[TrainingRecipe], bool] = lambda recipe: False,
) -> None:
    """Train on the GPU every recipe that has no stored run, with a Monitor for those that are `watched`."""
    finished = stored_keys(root)
    for number, recipe in enumerate(recipes, start=1):
        if recipe.key not in finished:
            try:
                observe = make_monitor_observer(root / recipe.key) if watched(recipe) else None
                train(recipe, root=root, data=data, device="cuda", compile=True, on_event=on_event, observe=observe)
            except Interrupted as stop:
                raise KeyboardInterrupt from stop
        tick(number / len(recipes))


def check_monitorable(recipe: TrainingRecipe) -> None:
    """Refuse an optimizer that a Monitor cannot read, before anything is trained with it."""
    try:
        Monitor(make_optimizer(recipe, torch.nn.Linear(1, 1), torch.zeros(())), sink=print).detach()
    except TypeError:
        raise ValueError(
            f"optimizer={recipe.optimizer!r} cannot be monitored; ours, torch:Adam and torch:AdamW can"
        ) from None


def make_monitor_observer(folder: Path) -> Observer:
    """The `observe` of `train` that writes a Monitor's records, each once, however often the run was interrupted.

    It samples and does not follow spikes: a captured step calls no hook, and the loop has the norm of every gradient.
    """
    kept: list[MetricsFile] = []

    def observe(epoch: int, stepper: TrainingStep) -> None:
        step = epoch * stepper.task.steps_per_epoch
        if not kept:
            kept.append(MetricsFile(folder / MONITOR, step - 1))
        with Monitor(stepper.optimizer, every=step + 1, sink=kept[0].add, follow=False) as monitor:
            monitor.step = step
            monitor.record()

    return observe
