"""Sweeps of toy runs, without torch and as long as a test needs, and workers as processes to kill."""

import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

from sqlalchemy import text

from mvngrad_lab.recipe import Recipe
from mvngrad_lab.store import FinishedRun, RunFolder, write_atomic
from mvngrad_lab.store.lock import lock_folder
from mvngrad_lab.sweep import Results, Sweep, grid
from mvngrad_lab.sweep.database import parse_address
from mvngrad_lab.sweep.queue import Queue
from mvngrad_lab.sweep.records import latest_by_key
from mvngrad_lab.sweep.stages import init_sweep
from mvngrad_lab.sweep.worker import run_worker

HERE = Path(__file__).parent
OPTIMIZERS = ("adam", "laprop", "adabelief", "mvngrad")
PATIENCE = 1200.0
"""Seconds until a test gives up on an event. No test passes or fails by how fast the machine is before that."""
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
    pause: float = 0.0
    """Seconds of a step; after each there is a checkpoint."""
    fate: str = ""
    """diverges, raises, prints its steps, or waits: the last for a file "gate" in the folder of runs."""
    betas: tuple[float, ...] = (0.9, 0.999)


def run(recipe, *, root, data, device, compile):
    """Log the process and its first step; continue from the last step."""
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
        if recipe.fate == "waits":
            wait_for((root / "gate").exists)
        while step < recipe.steps:
            time.sleep(recipe.pause)
            step += 1
            check()
            write_atomic(reached, str(step))
            if recipe.fate == "prints":
                print("step", step, flush=True)
        folder.start({"commit": "toy"})
        end = {"status": "diverged", "step": 3} if recipe.fate == "diverges" else {"status": "finished"}
        folder.finish(
            {**end, "validation_loss": loss(recipe), "test_loss": 0.0, "seconds": recipe.steps * recipe.pause}
        )
    return FinishedRun(recipe.key, recipe.name, recipe.settings, {}, folder.run.result)


def loss(recipe):
    """Least at lr = 3, and different for each seed."""
    return (recipe.lr - 3) ** 2 + OPTIMIZERS.index(recipe.optimizer) + recipe.seed / 8


def make_sweep(*stages, **options):
    options = {"metric": "validation_loss", "higher": False, "seconds": 360.0, "hardware": "a toy", **options}
    return Sweep(**{"stages": stages, "run": run, **options})


def toys(optimizers=OPTIMIZERS, **values):
    """A grid of each optimizer."""
    return [recipe for optimizer in optimizers for recipe in grid(Toy(optimizer=optimizer), **values)]


# Sweeps that other processes find by name


def talkative():
    return make_sweep(toys(lr=range(4), pause=(0.02,), fate=("prints",)))


def crowd():
    """64 configurations of 0.4 s."""
    return make_sweep(toys(lr=range(16), pause=(0.05,)))


def quick():
    return make_sweep(toys(lr=range(16)))


def gated():
    return make_sweep(toys(lr=range(4), fate=("waits",)))


def small():
    return make_sweep(toys(lr=(1.0, 2.0, 5.0)))


def second(results: Results):
    return [r for best in results.best.values() for r in grid(best.recipe, steps=(1, 2))]


def staged():
    return make_sweep(toys(lr=(1.0, 2.0)), second)


def leave():
    sys.exit(3)


def fail_in_a_stage():
    return make_sweep(toys(), lambda results: 1 / 0)


def numbers():
    return make_sweep([1, 2])


def unlucky():
    recipes = toys(lr=(1.0,)) + toys(lr=(2.0,), fate=("diverges",)) + toys(lr=(3.0,), fate=("raises",))[:2]
    return make_sweep(recipes, seeds=2)


# A store with one sweep, and a worker in this process


class Bench:
    def __init__(self, folder, url=None):
        self.address, self.root = parse_address(url or f"sqlite:///{folder}/sweeps.db"), folder / "runs"
        self.name, self.sweep, self.queue, self.messages = "toy", None, None, []

    def init(self, sweep=None, name=None, **options):
        """Write the sweep to the store, and open it; the new keys."""
        self.sweep, self.name = sweep or self.sweep, name or self.name
        new = init_sweep(self.address, self.name, self.sweep, say=self.messages.append, **options)
        self.queue = self.queue or Queue(self.address, self.name, say=self.messages.append)
        return new

    def work(self, **options):
        options = {"root": self.root, "say": self.messages.append, **options}
        return dict(run_worker(self.address, self.name, self.sweep, **options))

    def start_worker(self, *options, **environment):
        """`mvngrad sweep work` as a process."""
        url = self.address.url.render_as_string(hide_password=False)
        options = ("--runs", self.root, "--device", "cpu", *options)
        return command("work", self.name, *options, MVNGRAD_STORAGE=url, **environment)

    def statuses(self):
        return sorted(record.status for record in latest_by_key(self.queue.records()).values())

    def close(self):
        if self.queue is not None:
            self.queue.close()


def silence(queue, key):
    """Set the last heartbeat of a running configuration to long ago, as if its worker had been silent since."""
    (number,) = (r.number for r in queue.records() if (r.key, r.status) == (key, "running"))
    trial = queue.storage.get_trial_id_from_study_id_trial_number(queue.study._study_id, number)
    with queue.storage.engine.begin() as connection:
        statement = "UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00' WHERE trial_id = :trial"
        connection.execute(text(statement), {"trial": trial})
    queue.requeue_from = 0.0


# Processes


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


def read_output(process):
    """Wait for the end of a process; what it printed."""
    return process.communicate(timeout=PATIENCE)[0]


def wait_for(condition):
    """The first true value of a condition."""
    until = time.monotonic() + PATIENCE
    while not (value := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"{condition} did not become true")
        time.sleep(0.02)
    return value


def find_current_run(root, pid):
    """The folder of the run that a process is in the middle of, with a checkpoint or two; else None."""
    for log in root.glob("*/log"):
        folder, lines = log.parent, log.read_text().splitlines()
        begun = lines and int(lines[-1].split()[0]) == pid and not (folder / "result.json").exists()
        if begun and (folder / "step").exists() and int((folder / "step").read_text()) >= 2:
            return folder
    return None


def kill(process, number=signal.SIGKILL):
    os.kill(process.pid, number)


def freeze(process, condition):
    """Stop a process at a moment when a condition holds; its value."""
    while True:
        kill(process, signal.SIGSTOP)
        if value := condition():
            return value
        kill(process, signal.SIGCONT)
        time.sleep(0.02)


def is_unlocked(path):
    """Whether no process is in a transaction: a process that is frozen in one holds SQLite's lock."""
    connection = sqlite3.connect(path, timeout=1.0, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return False
    finally:
        connection.close()
    return True
