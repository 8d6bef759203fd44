"""Train a recipe: on a CPU, a GPU or several processes, resumable at any step, in one folder of the store."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from mvngrad.diagnostics import Monitor
from mvngrad.diagnostics.records import add_checksum
from mvngrad_lab.errors import InvalidInput, NotPossible, UserError
from mvngrad_lab.pool import catch_signals
from mvngrad_lab.recipe import TrainingRecipe
from mvngrad_lab.store import MONITOR, RESULTS, ROOT, FinishedRun, MetricsFile, RunFolder, load_runs, timestamp
from mvngrad_lab.store.environment import get_changes, get_environment
from mvngrad_lab.store.lock import lock_folder
from mvngrad_lab.training import parallel as distributed
from mvngrad_lab.training.events import Event, print_event
from mvngrad_lab.training.loop import Interrupted, Observer, Trainer
from mvngrad_lab.training.optimizers import check_optimizer, get_package_version, make_optimizer
from mvngrad_lab.training.step import TrainingStep, clear_cache, get_training_step
from mvngrad_lab.training.task import Task

__all__ = ["Interrupted", "configure_kernels", "train", "train_missing"]

SMALL_IMAGES = "`mvngrad train cifar100 --train-limit 256 --batch-size 32 --epochs 2 --warmup-epochs 1`"
SMALL_TEXT = (
    "`mvngrad train wikitext103 --model tiny --text FOLDER --steps 100 --warmup-steps 10 --batch-size 8 "
    "--micro-batch-size 8`"
)
"""Commands that a CPU can run, for the message of `require_gpu`."""


def train(
    recipe: TrainingRecipe,
    *,
    root: Path = ROOT,
    data: Path | None = None,
    device: str | torch.device = "cpu",
    compile: bool = False,
    capture: bool | None = None,
    parallel: distributed.Mode | None = None,
    checkpoint_every: float = 60.0,
    keep_last: bool = True,
    on_event: Callable[[Event], Any] = print_event,
    observe: Observer | None = None,
    task: Callable[..., Task] | None = None,
) -> FinishedRun:
    """Train a recipe, from the newest checkpoint if there is one; a finished run is returned as it is stored.

    A run whose loss is not finite ends as *diverged*, with the step, and that is its result. With clipping or
    `nonfinite_limit`, a step whose loss or gradient norm is not finite is skipped and reported, and `nonfinite_limit`
    of them in a row end the run as diverged.

    In parallel training every process calls this with the same arguments; rank 0 writes and reports.

    Args:
        recipe: what the run is; everything that decides its numbers.
        root: the store.
        data: folder of the data; None is the loader's default.
        device: "cpu", "cuda" or "cuda:1".
        compile: use torch.compile for the model and the preparation of its batches, once in the life of the process;
            deterministic recipes are never compiled.
        capture: replay the whole step as a CUDA graph; None does so on a GPU with one process.
        parallel: train on all processes that torchrun started, each with its share of every batch: "ddp" with the whole
            model in each, "fsdp" with a shard. The data and its order are those of one process, and so are the
            results, to rounding. A checkpoint can be resumed with a different world size.
        checkpoint_every: seconds between checkpoints; 0 writes one after every step.
        keep_last: write a checkpoint after the last step; otherwise a finished run keeps none.
        on_event: called with an `EpochEnd`, a `StepProgress` or a `Message`.
        observe: called after each epoch, before it is in a checkpoint; its time does not count as training.
        task: the class that trains the recipe, by default that of its folder in `mvngrad_lab.tasks`.

    Raises:
        Interrupted: SIGTERM or SIGINT arrived; a checkpoint of the current step has been written. One that arrives
            after the last evaluation has its usual effect once the run is stored.
        Locked: another process trains this recipe in this store, or took it from this one, which seemed dead.
        OutOfMemory: the step does not fit the device.
    """
    folder = RunFolder(recipe, root)
    with ExitStack() as stack:
        device = distributed.init_process_group(parallel, torch.device(device))
        is_rank0 = distributed.get_rank() == 0
        if (finished := distributed.broadcast_from_rank0(folder.run)) is not None:
            return finished
        check_lock = stack.enter_context(lock_folder(folder.path)) if is_rank0 else lambda: None
        stack.enter_context(configure_kernels(recipe, device))
        stack.enter_context(_explain_out_of_memory(recipe, device))
        signals = stack.enter_context(catch_signals())
        if (finished := distributed.broadcast_from_rank0(folder.run)) is not None:  # just now, by another process
            return finished
        started = time.perf_counter()
        check_optimizer(recipe)
        captured = (device.type == "cuda" and parallel is None) if capture is None else capture
        _check_parallel(recipe, parallel)
        compiled = compile and not recipe.deterministic
        training_step = get_training_step(recipe, data, device, compiled, captured, task, parallel)
        measured_on = _describe_environment(recipe, device, parallel)
        stamped = {**measured_on, "made": distributed.broadcast_from_rank0(timestamp())}
        if is_rank0:
            check_lock()
            folder.start(stamped, get_changes())
        else:
            on_event = lambda event: None  # noqa: E731
        distributed.barrier()
        trainer = Trainer(
            recipe=recipe, training_step=training_step, folder=folder.path, checkpoint_every=checkpoint_every,
            keep_last=keep_last, on_event=on_event, observe=observe, signals=signals, check_lock=check_lock,
            environment=measured_on,
        )  # fmt: skip
        result = {**trainer.train(), "setup_seconds": trainer.started - started}
        if is_rank0:
            check_lock()
            folder.finish(result)
            if not keep_last:
                shutil.rmtree(trainer.checkpoints, ignore_errors=True)
        distributed.barrier()
    for number in signals:  # too late to interrupt this run, but a caller must not begin another
        signal.raise_signal(number)
    return FinishedRun(recipe.key, recipe.name, recipe.settings, stamped, result)


def _describe_environment(
    recipe: TrainingRecipe, device: torch.device, mode: distributed.Mode | None
) -> dict[str, Any]:
    """The machine, versions and code of this process; in parallel training also the mode and the world size."""
    ranks = {} if mode is None else {"parallel": mode, "ranks": distributed.get_world_size()}
    return {**get_environment(device.type), **get_package_version(recipe.optimizer), **ranks}


def _check_parallel(recipe: TrainingRecipe, mode: distributed.Mode | None) -> None:
    """Raise InvalidInput unless our optimizer trains equal shares of a batch, whose mean over processes is its mean."""
    world_size = distributed.get_world_size()
    share, rest = divmod(recipe.batch_size, world_size)
    if rest or share % min(recipe.micro_batch_size, share):
        raise InvalidInput(
            f"batch_size={recipe.batch_size} on {world_size} processes does not make whole micro-batches of "
            f"micro_batch_size={recipe.micro_batch_size}; choose them so that it does"
        )
    if mode is not None and recipe.is_third_party:
        raise InvalidInput(f"optimizer={recipe.optimizer!r}: only ours train on several processes, parallel={mode!r}")


NO_MEMORY = "can't allocate memory|Storage size calculation overflowed|multiplication overflow"
"""What torch says of a tensor that is too large for the memory of the host, or for any."""


class OutOfMemory(UserError, torch.OutOfMemoryError):
    """The step does not fit the device's memory."""


@contextmanager
def _explain_out_of_memory(recipe: TrainingRecipe, device: torch.device) -> Iterator[None]:
    """Name the remedy if the device is too small, and free its memory for another attempt."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not re.search(NO_MEMORY, str(error)):
            raise
        clear_cache()
        name = "micro_batch_size" if "micro_batch_size" in recipe.settings else "batch_size"
        size = f"{name}={min(recipe.micro_batch_size, recipe.batch_size // distributed.get_world_size())}"
        raise OutOfMemory(
            f"{recipe.key} does not fit the memory of {device}; make {size} smaller, or free memory that others hold "
            f"there ({next(iter(str(error).splitlines()), 'MemoryError')})"
        ) from error


@contextmanager
def configure_kernels(recipe: TrainingRecipe, device: torch.device) -> Iterator[None]:
    """Let torch use its fastest kernels, found by trying, or for a deterministic recipe only deterministic ones."""
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


# Many runs


def require_gpu(target: str, what: str, small: str = SMALL_IMAGES) -> None:
    """Raise NotPossible if there is no CUDA device.

    `what` completes the sentence that begins with the `target`, "trains 24 networks"; `small` is a command for a CPU.
    """
    if not torch.cuda.is_available():
        raise NotPossible(f"{target} {what} and needs a CUDA device; on a CPU, try a small one with {small}")


def stored_keys(root: Path) -> set[str]:
    """Keys of the finished runs in `root` and in the repository's results."""
    return {run.key for run in load_runs(root, RESULTS)}


def train_missing(
    recipes: Sequence[TrainingRecipe],
    root: Path,
    data: Path | None,
    tick: Callable[[float], None],
    on_event: Callable[[Event], Any],
    is_monitored: Callable[[TrainingRecipe], bool] = lambda recipe: False,
) -> None:
    """Train on the GPU every recipe that has no stored run, with a Monitor for those that are monitored."""
    finished = stored_keys(root)
    for number, recipe in enumerate(recipes, start=1):
        if recipe.key not in finished:
            observe = make_monitor_observer(root / recipe.key) if is_monitored(recipe) else None
            train(recipe, root=root, data=data, device="cuda", compile=True, on_event=on_event, observe=observe)
        tick(number / len(recipes))


# Observers of a run that write a file


def check_monitorable(recipe: TrainingRecipe) -> None:
    """Raise InvalidInput if a Monitor cannot read the recipe's optimizer."""
    try:
        Monitor(make_optimizer(recipe, torch.nn.Linear(1, 1), torch.zeros(())), sink=print).close()
    except TypeError:
        raise InvalidInput(
            f"optimizer={recipe.optimizer!r} cannot be monitored; ours, torch:Adam and torch:AdamW can"
        ) from None


def make_monitor_observer(folder: Path) -> Observer:
    """The `observe` of `train` that writes monitor.jsonl in the run's folder, a record after each epoch.

    A record has the mean training loss of the epoch's finite steps, and the numbers of losses and gradient norms that
    were not finite. It does not track spikes: a captured step calls no hooks, and the loop records the norm of every
    gradient.
    """

    def write(file: MetricsFile, epoch: int, training_step: TrainingStep) -> None:
        step = epoch * training_step.task.steps_per_epoch
        sink = lambda record: file.add(add_checksum(record))  # noqa: E731
        with Monitor(training_step.optimizer, every=step + 1, sink=sink, follow=False) as monitor:
            monitor.step = step
            losses, norms = training_step.losses.cpu(), training_step.norms.cpu()  # of the whole epoch
            for loss in losses[norms.isfinite() | ~losses.isfinite()]:
                monitor.log(loss=loss)  # which counts those that are not finite
            for norm in norms[~norms.isfinite()]:
                monitor.log(gradient_norm=norm)
            monitor.record()

    return make_file_observer(folder / MONITOR, write)


def make_file_observer(path: Path, write: Callable[[MetricsFile, int, TrainingStep], Any]) -> Observer:
    """The `observe` of `train` that calls `write` after each epoch with the file of rows at `path`.

    At the first call, rows of this epoch and later ones are removed: an interrupted process wrote them.
    """
    files: list[MetricsFile] = []

    def observe(epoch: int, training_step: TrainingStep) -> None:
        if not files:
            files.append(MetricsFile(path, epoch * training_step.task.steps_per_epoch - 1))
        write(files[0], epoch, training_step)

    return observe
