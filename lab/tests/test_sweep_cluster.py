"""Workers that a cluster starts: submitit's local executor stands for SLURM, whose jobs it writes in the same way."""

import os

import pytest
from sweep_toy import HERE

from mvngrad_lab.sweep import plan
from mvngrad_lab.sweep.address import address
from mvngrad_lab.sweep.cluster import submit
from mvngrad_lab.sweep.queue import Queue

pytest.importorskip("submitit")


def test_jobs_run_a_sweep_to_its_end(tmp_path, monkeypatch):
    """Their files and sweeps are looked for where the command was given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", ""))))
    plan.init(address("sqlite:///sweeps.db"), "sweep_toy:small", heartbeat=1, grace=3, tell=lambda text: None)
    given = {"root": tmp_path / "runs", "data": None, "device": "cpu", "compile": False}
    jobs = submit(2, "sqlite:///sweeps.db", "sweep_toy:small", cluster="local", options=["timeout_min=2"], **given)
    assert [job.result() for job in jobs] == [True, True]
    queue = Queue(address("sqlite:///sweeps.db"), "sweep_toy:small")
    assert {record.status for record in queue.records()} == {"finished"}
    queue.close()


@pytest.mark.parametrize(
    ("storage", "options", "message"),
    [
        *(
            (f"postgresql://{given}", (), "password would be in the files of a job")
            for given in (
                "me:secret@host/runs",
                "me:secret%40!@host/runs",
                "me:secret%2f@host/runs",
                "me@host/runs?password=a&password=secret",
                "me@host/runs?sslpassword=secret",
            )
        ),
        ("sqlite:///sweeps.db", ("timeout",), "slurm_options='timeout' is not KEY=VALUE"),
    ],
)
def test_what_would_be_written_down_or_cannot_be_read_is_refused(tmp_path, storage, options, message):
    with pytest.raises(ValueError, match=message) as refused:
        submit(1, storage, "sweep_toy:small", cluster="local", options=options, root=tmp_path)
    assert "secret" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []
