"""Workers end with what started them."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from mvngrad_lab.pool import run_jobs

PATIENCE = 600
"""Seconds until a test gives up on an event, however slow the machine is."""


def nothing():
    pass


def square(number):
    return number**2


def fail(number):
    raise ValueError(f"no {number}")


def die(number):
    os.kill(os.getpid(), signal.SIGKILL)


def wait(path):
    Path(path).write_text(str(os.getpid()))
    time.sleep(2 * PATIENCE)


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def eventually(condition):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_every_job_is_yielded_with_its_result():
    for workers in (1, 2):
        assert sorted(run_jobs(square, range(5), workers, nothing)) == [(n, n * n) for n in range(5)]


def test_an_exception_of_a_job_is_raised():
    with pytest.raises(ValueError, match="no 1"):
        list(run_jobs(fail, [1], 2, nothing))


def test_a_dead_worker_is_an_error():
    with pytest.raises(BrokenProcessPool):
        list(run_jobs(die, [1], 2, nothing))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_the_process_that_started_it(tmp_path, how):
    path = tmp_path / "pid"
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]\nfrom test_pool import *\n"
        "if __name__ == '__main__':\n    list(run_jobs(wait, [sys.argv[2]], 2, nothing))"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    first = subprocess.Popen(
        [sys.executable, str(script), str(Path(__file__).parent), str(path)], stderr=subprocess.DEVNULL
    )
    try:
        assert eventually(lambda: path.exists() and path.read_text())
        first.send_signal(how)
        first.wait(PATIENCE)
        assert eventually(lambda: not alive(int(path.read_text())))
    finally:
        first.kill()
        first.wait()
