"""What benchmarks measured, in the report."""

import json
from pathlib import Path

import pytest

from mvngrad_lab.cli import main
from mvngrad_lab.report.figures import draw
from mvngrad_lab.report.records import BenchmarkFile, load_records
from mvngrad_lab.report.verdicts import NOT_REPRODUCED, NOT_RUN, REPRODUCED, UNDECIDED, judge

RESULTS = Path(__file__).parents[2] / "results"
GPT2 = "throughput-gpt2"


def benchmarks():
    return [each for each in load_records(RESULTS, warn=pytest.fail) if isinstance(each, BenchmarkFile)]


@pytest.fixture
def measured():
    (found,) = (run for run in benchmarks() if run.name == GPT2)
    return found


def verdicts(run):
    return {claim.id: verdict for claim, verdict in judge([run]) if claim.target == GPT2}


def test_the_times_of_four_optimizers_are_judged_by_the_rule(measured):
    assert verdicts(measured)["time-openwebtext"].status == REPRODUCED
    rows = measured.result["overhead"]["124M"]["rows"]
    slow = next(row for row in rows if row["name"] == "LaPropW float32")
    slow["step_seconds"] *= 1.06
    assert verdicts(measured)["time-openwebtext"].status == NOT_REPRODUCED
    rows.remove(slow)
    assert verdicts(measured)["time-openwebtext"].status == NOT_RUN


def test_the_hours_of_a_run_are_compared(measured):
    (ours,) = (row for row in measured.result["throughput"]["30M"] if row["name"] == "ours")
    found = verdicts(measured)["time-wikitext"]
    assert (found.status, found.measured.split(" h")[0]) == (UNDECIDED, f"{ours['projected_seconds'] / 3600:.2f}")
    del measured.result["throughput"]["30M"]
    assert verdicts(measured)["time-wikitext"].status == NOT_RUN


def test_every_row_is_in_a_table():
    for run in benchmarks():
        shown = [row for figure in draw(run) for row in figure.table.rows]
        rows = run.result.get("rows") or [
            *(row for rows in run.result["throughput"].values() for row in rows),
            *(row for each in run.result["overhead"].values() for row in each["rows"]),
        ]
        assert len(shown) == len(rows) > 4


def test_a_report_has_them_and_tells_of_what_is_damaged(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs", "results"):
        Path(folder).mkdir()
    for name in ("language-cuda.json", "engine.json"):
        Path("results", name).write_text((RESULTS / name).read_text())
    Path("runs/language-cuda.json").write_text("{")
    Path("runs/engine.json").write_text(json.dumps({"environment": {}, "rows": 3}))
    assert main(["report"]) == 0
    page = Path("runs/report.html").read_text()
    assert "torch AdamW fused" in page
    assert "What the sweep engine adds to a run" in page
    said = capsys.readouterr().err
    assert "runs/language-cuda.json is left out" in said
    assert "runs/engine.json is left out, because it is not what a benchmark writes: rows" in said
