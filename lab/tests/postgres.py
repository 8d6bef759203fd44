"""A PostgreSQL server of its own for a test session, with a password, on a free port."""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from glob import glob
from pathlib import Path

import pytest

USER = "sweeper"


def binaries():
    """The folder of pg_ctl; Debian keeps it out of the path."""
    if found := shutil.which("pg_ctl"):
        return Path(found).parent
    folders = sorted(glob("/usr/lib/postgresql/*/bin"))
    return Path(folders[-1]) if folders else None


class Server:
    def __init__(self, programs):
        self.programs = programs
        self.password = secrets.token_hex(12)
        self.folder = Path(tempfile.mkdtemp(prefix="pg-"))  # short, and open to the server's user: not of pytest
        self.data = self.folder / "data"
        # It refuses to be root's.
        self.options = {}
        if os.getuid() == 0:
            owner = next(entry for name in ("postgres", "nobody") if (entry := _entry(name)))
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
            self.options = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        secret = self.folder / "password"
        secret.write_text(self.password)
        secret.chmod(0o644)
        self._run("initdb", "-D", self.data, "-U", USER, "--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.start()

    @property
    def url(self):
        return f"postgresql://{USER}:{self.password}@127.0.0.1:{self.port}/postgres"

    def start(self):
        settings = f"-p {self.port} -k {self.folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        self._run("pg_ctl", "-D", self.data, "-w", "-l", self.folder / "log", "-o", settings, "start")

    def stop(self):
        self._run("pg_ctl", "-D", self.data, "-w", "-m", "immediate", "stop")

    def remove(self):
        self.stop()
        shutil.rmtree(self.folder)

    def _run(self, program, *arguments):
        done = subprocess.run(
            [self.programs / program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            check=False,
            **self.options,
        )
        assert done.returncode == 0, done.stdout


def _entry(name):
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


@pytest.fixture(scope="session")
def server():
    """Skips where no server or no driver is installed; in CI both are."""
    programs = binaries()
    if programs is None and os.environ.get("CI") != "true":
        pytest.skip("needs PostgreSQL's pg_ctl")
    assert programs is not None, "PostgreSQL's pg_ctl is not installed"
    if os.environ.get("CI") != "true":
        pytest.importorskip("psycopg")
    running = Server(programs)
    yield running
    running.remove()
