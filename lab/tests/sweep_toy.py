"""Sweeps of runs that need no torch and take as long as they are told, and workers as processes to kill."""

import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

from mvngrad_lab.experiments.sweeps.plans import Results, Sweep, grid
from mvngrad_lab.recipe import Recipe
from mvngrad_lab.store import FinishedRun, RunFolder, write_atomic
from mvngrad_lab.store.lock import lock_folder

HERE = Path(__file__).parent
OPTIMIZERS = ("adam", "laprop", "adabelief", "mvngrad")
COMMAND = (
    "import os, platform, sys; from mvngrad_lab.cli import main\n"
    "node = os.environ.get('TOY_NODE', platform.node()); platform.node = lambda: node\n"  # as if on another machine
    "sys.exit(main(['sweep', *sys.argv[1:]]))"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toy(Recipe):
    name: ClassVar[str] = "toy"
    optimizer: str
    lr: float = 1.0
    floor: float | None = None
    seed: int = 0
    steps: int = 8
    pause: float = 0.05
    """Seconds of a step; after each there is a checkpoint."""
    fate: str = ""
    betas: tuple[float, ...] = (0.9, 0.999)


def run(recipe, *, root, data, device, compile):
    """Note where each process begins and what it has done; go on from there."""
    folder = RunFolder(recipe, root)
    if folder.run is not None:
        return folder.run
    with lock_folder(folder.path) as check:
        if folder.run is not None:
            return folder.run
        if recipe.fate == "raises":
            raise ZeroDivisionError(f"lr={recipe.lr} is cursed")
        reached = folder.path / "step"
        step = int(reached.read_text()) if reached.exists() else 0
        with (folder.path / "log").open("a") as log:
            log.write(f"{os.getpid()} {step}\n")
        while step < recipe.steps:
            time.sleep(recipe.pause)
            step += 1
            check()
            write_atomic(reached, str(step))
        folder.start({"commit": "toy"})
        end = {"status": "diverged", "step": 3} if recipe.fate == "diverges" else {"status": "finished"}
        folder.finish(
            {**end, "validation_loss": loss(recipe), "test_loss": 0.0, "seconds": recipe.steps * recipe.pause}
        )
    return FinishedRun(recipe.key, recipe.name, recipe.settings, {}, folder.run.result)


def loss(recipe):
    """Least at lr = 3, and different for each seed."""
    return (recipe.lr - 3) ** 2 + OPTIMIZERS.index(recipe.optimizer) + recipe.seed / 8


def sweep(*stages, **options):
    given = {"metric": "validation_loss", "higher": False, "seconds": 360.0, "hardware": "a toy", **options}
    return Sweep(stages=stages, run="sweep_toy:run", **given)


def each(**values):
    return [recipe for optimizer in OPTIMIZERS for recipe in grid(Toy(optimizer=optimizer, pause=0.0), **values)]


def crowd():
    """64 configurations of 0.4 s."""
    return sweep(each(lr=range(16), pause=(0.05,)))


def quick():
    return sweep(each(lr=range(16)))


def small():
    return sweep(each(lr=(1.0, 2.0, 5.0)))


def wider():
    """`small`, changed: one value gone, two new."""
    return sweep(each(lr=(1.0, 2.0, 3.0, 4.0)))


def second(results: Results):
    return [r for best in results.best.values() for r in grid(best.recipe, steps=(1, 2))]


def staged():
    return sweep(each(lr=(1.0, 2.0)), second)


def unlucky():
    return sweep(each(lr=(1.0,)) + each(lr=(2.0,), fate=("diverges",)) + each(lr=(3.0,), fate=("raises",))[:2], seeds=2)


def cursed():
    return sweep(each(lr=range(3), fate=("raises",)))


def unfair():
    return sweep([*each(lr=(1.0,)), Toy(optimizer="mvngrad", lr=2.0)])


def worked(queue, tmp_path, said, **options):
    """A worker in this process; what it did."""
    from mvngrad_lab.sweep.worker import work

    return work(queue.address, queue.name, root=tmp_path / "runs", tell=said.append, **options)


def command(*arguments, **environment):
    """`mvngrad sweep ...` as a process that finds this module."""
    paths = os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", "")))
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
    )


def finished(process, seconds=120):
    """What a process said until its end."""
    said, _ = process.communicate(timeout=seconds)
    return said


def wait_for(condition, seconds=60.0):
    """The first true value of a condition; asked often, because tests wait for what happens and for no clock."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"{condition} did not become true")
        time.sleep(0.02)
    return found


def at_work(root, pid):
    """The folder of the run that a process is in the middle of, if it is, with a checkpoint or two."""
    for log in root.glob("*/log"):
        folder, lines = log.parent, log.read_text().splitlines()
        begun = lines and int(lines[-1].split()[0]) == pid and not (folder / "result.json").exists()
        if begun and (folder / "step").exists() and int((folder / "step").read_text()) >= 2:
            return folder
    return None


def kill(process, number=signal.SIGKILL):
    os.kill(process.pid, number)


def freeze(process, wanted):
    """Stop a process at a time when a condition holds; what this found."""
    while True:
        kill(process, signal.SIGSTOP)
        if found := wanted():
            return found
        kill(process, signal.SIGCONT)
        time.sleep(0.02)


def writable(path):
    """Whether nobody is in a transaction: who is frozen in one holds SQLite's lock."""
    connection = sqlite3.connect(path, timeout=1.0, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return False
    finally:
        connection.close()
    return True
