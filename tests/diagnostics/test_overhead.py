"""The benchmark of the monitor writes what it measured."""

import json

from benchmarks import monitor


def test_a_run_writes_every_arm_of_every_optimizer(tmp_path):
    monitor.main(["--rounds", "2", "--every", "2", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "monitor-cpu.json").read_text())
    assert [(row["network"], row["optimizer"], row["monitor"]) for row in result["rows"]] == [
        ("-".join(map(str, widths)), optimizer, arm)
        for widths in monitor.NETWORKS
        for optimizer in monitor.OPTIMIZERS
        for arm in monitor.ARMS
    ]
    assert all(row["ratio"] == 1 for row in result["rows"] if row["monitor"] == "without")
    page = (tmp_path / "monitor-cpu.md").read_text()
    assert page.count("| mvngrad.MVNGradW |") == 6
