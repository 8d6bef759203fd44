"""Exported sweeps in the report: every run counted and drawn, partial ones named so, and verdicts in each direction."""

import json
import math
import re
import statistics
from collections import Counter
from xml.etree import ElementTree

import pytest
import samples

from mvngrad_lab import report
from mvngrad_lab.cli import main
from mvngrad_lab.experiments.sweeps.records import load_exports
from mvngrad_lab.report.page import draw, render, render_own
from mvngrad_lab.report.tables import OPTIMIZERS
from mvngrad_lab.report.verdicts import (
    NOT_RUN,
    find_latest,
    judge,
)
from mvngrad_lab.store import FinishedRun

SCALED = "cifar100-bs1024-scaled"


def page(*runs):
    return render(judge(runs), runs, version="1", made="now")


# Reading


def test_a_made_up_export_has_the_format_of_the_engine(toy, tmp_path):
    from sweep_toy import unlucky

    from mvngrad_lab.sweep.summary import export

    toy.init(unlucky(), "sweep_toy:unlucky", unequal=True)
    toy.work()
    toy.queue.add([toy.queue.records()[0].entry | {"key": "toy-waiting"}])
    export(toy.queue, tmp_path / "sweep-toy.json")
    whole, ours = json.loads((tmp_path / "sweep-toy.json").read_text()), samples.sweep(samples.by(adam="diverged"))
    assert list(whole) == [*ours, "crc32"]
    assert {tuple(row) for row in whole["runs"]} == {tuple(row) for row in ours["runs"]}
    rows = {row["status"]: row for row in whole["runs"]}
    assert rows.keys() == {"finished", "diverged", "raised", "waiting"}
    assert rows["waiting"]["seconds"] is rows["waiting"]["commit"] is rows["waiting"]["value"] is None
    (run,) = load_exports(tmp_path, warn=pytest.fail)
    assert (run.name, run.left, run.grid) == ("sweep-sweep_toy:unlucky", 1, None)
    _, settings, selected, budget = draw(run)
    assert [panel.title for panel in settings.panels] == [f"{cell}, sweep_toy:unlucky" for cell in OPTIMIZERS]
    assert [row[:1] + row[-2:] for row in selected.table.rows] == [
        (cell, str(number), "0") for cell, number in (("Adam", 4), ("LaProp", 5), ("AdaBelief", 6), ("MVN-Grad", 7))
    ]
    assert budget.table.rows[-1][:6] == ("all", "11", "4", "4", "2", "1")


def test_a_sweep_of_one_setting_is_drawn(toy, tmp_path):
    from sweep_toy import make_sweep, toys

    from mvngrad_lab.sweep.summary import export

    toy.init(make_sweep(toys(("adam",), lr=(1.0, 2.0, 3.0))))
    toy.work()
    export(toy.queue, tmp_path / "sweep-toy.json")
    (run,) = load_exports(tmp_path, warn=pytest.fail)
    _, settings, *_ = draw(run)
    assert [panel.title for panel in settings.panels] == ["Adam, toy"]


GOOD = samples.sweep()


def bad(**changes):
    """An export of one run, with changes of the run."""
    return json.dumps(GOOD | {"selected": {}, "runs": [GOOD["runs"][0] | changes]})


BAD = {
    "cut short": (json.dumps(GOOD)[:-40], "Expecting|Unterminated"),
    "no text": ("\udcff", "codec"),
    "a list": ("[1]", "the file is not an object"),
    "too deep": ("[" * 200_000, "recursion|depth"),
    "a huge number": (bad(settings={"lr": 10**400}), "a number of 401 digits"),
    "changed": (json.dumps(GOOD | {"crc32": 1}), "its content is not what was written"),
    "another file": ('{"metric": "x"}', "no sweep that is a str"),
    "empty": (json.dumps(GOOD | {"runs": []}), "no runs"),
    "a run without settings": (json.dumps(GOOD | {"runs": [{"key": "a"}]}), "run 0 has no stage"),
    "an unknown status": (bad(status="odd"), "status 'odd'"),
    "a value that is not finite": (bad(value=math.nan), "value nan"),
    "a list for a commit": (bad(commit=[]), "has commit"),
    "a word for seconds": (bad(seconds="9"), "has seconds"),
    "a word for a share": (json.dumps(GOOD | {"occupied": "half"}), "has occupied"),
    "a run twice": (json.dumps(GOOD | {"runs": GOOD["runs"] + GOOD["runs"][:1]}), "one key"),
    "seeds alone": (bad(stage="seeds"), "no run of a grid"),
    "a selection of nothing": (json.dumps(GOOD | {"selected": {"adam": ["x"]}}), "none of its finished runs"),
    "a selection of a failed run": (
        json.dumps(json.loads(bad(status="diverged", value=None)) | {"selected": {"adam": GOOD["runs"][0]["key"]}}),
        "none of its finished runs",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_or_foreign_file_is_one_line_and_the_others_are_read(tmp_path, name):
    (content, reason), warnings = BAD[name], []
    path = tmp_path / "sweep-bad.json"
    path.write_text(content, errors="surrogateescape")
    (tmp_path / "sweep-mnist.json").write_text(json.dumps(GOOD))
    (run,) = load_exports(tmp_path, tmp_path / "missing", warn=warnings.append)
    assert run.name == "sweep-mnist"
    (line,) = warnings
    assert re.search(rf"sweep-bad\.json is left out, .*({reason})", line)
    assert "\n" not in line


def test_the_command_finds_sweeps_among_runs_and_results_and_warns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder, whole in (("results", GOOD), ("runs", samples.sweep(sweep="mine:small", selected={}))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"sweep-{folder}.json").write_text(json.dumps(whole))
    (tmp_path / "runs" / "sweep-broken.json").write_text("{")
    assert main(["report"]) == 0
    output, errors = capsys.readouterr()
    page, report = output.splitlines()[-2:]
    assert page == f"sweep-mine:small: {tmp_path / 'runs' / 'sweep-mine-small.html'}"
    assert report == f"report: {tmp_path / 'runs' / 'report.html'}"
    assert errors.count("\n") == 1
    assert errors.startswith("warning: runs/sweep-broken.json is left out")
    text = (tmp_path / "runs" / "report.html").read_text()
    assert '<section class="group" id="group-mnist-a-sweep-of-ours">' in text
    assert 'href="sweep-mine-small.html"' in text
    assert text.count("mine:small") == 1, "a sweep of one's own is not on the paper's page"
    own = (tmp_path / "runs" / "sweep-mine-small.html").read_text()
    assert "<h1>Sweep mine:small</h1>" in own
    assert own.count("<figure") == 4


def test_sweeps_with_names_that_are_one_as_a_file_get_a_page_each(tmp_path):
    names = ("mine:small", "mine_small:", "日本:実験", "東京:実験")
    for number, name in enumerate(names):
        (tmp_path / f"sweep-{number}.json").write_text(json.dumps(samples.sweep(sweep=name, selected={})))
    page = report.build(tmp_path, out=tmp_path / "report.html").read_text()
    titles = {}
    for path in tmp_path.glob("sweep*.html"):
        (titles[path.name],) = re.findall("<h1>Sweep (.*)</h1>", path.read_text())
        assert f'href="{path.name}"' in page
    assert sorted(titles.values()) == sorted(names)


def test_the_run_behind_claims_is_of_all_data_then_the_fullest_then_the_newest(read_export):
    whole, part = samples.sweep(), samples.sweep(samples.by(adam="waiting"), made="2026-02-01")
    sample, later = samples.sweep(name="mnist-5k", made="2026-03-01"), samples.sweep(made="2026-02-01")
    runs = [read_export(each) for each in (whole, part, sample, later)]
    assert {run.name for run in runs} == {"sweep-mnist"}
    assert find_latest(runs)["sweep-mnist"] is runs[3]
    assert find_latest(runs[:3])["sweep-mnist"] is runs[0]
    assert find_latest(runs[1:3])["sweep-mnist"] is runs[1]
    assert "mnist-5k" in samples.judge_by_claim(runs[2])["sweep-mnist-best"].strip.what


def test_runs_of_a_sweep_are_not_listed_again(read_export):
    run = read_export(GOOD)
    inside = FinishedRun(GOOD["runs"][0]["key"], "mnist", {}, {}, {})
    outside = FinishedRun("mnist-other", "mnist", {}, {}, {})
    text = page(run, inside, outside)
    assert "mnist-other" in text
    assert inside.key not in text


# Boxes, lines and tables


def boxes(run):
    return draw(run)[0]


def count_marks(panel):
    """How many marks of each kind a panel has."""
    return Counter(use.get("href") for use in ElementTree.fromstring(panel.svg).iter("{http://www.w3.org/2000/svg}use"))


def read_texts(panel):
    return [text.text for text in ElementTree.fromstring(panel.svg).iter("{http://www.w3.org/2000/svg}text")]


def test_boxes_have_the_quartiles_of_all_runs(read_export):
    run = read_export(samples.sweep(samples.by(adam=0.3, mvngrad=-0.02)))
    figure = boxes(run)
    assert [panel.title for panel in figure.panels] == [
        "Validation loss, all runs of mnist",
        "Train loss, all runs of mnist",
    ]
    rows = {row[:2]: row[2:] for row in figure.table.rows}
    for metric in ("validation_loss", "train_loss"):
        for cell, optimizer in (("Adam", "adam"), ("MVN-Grad", "mvngrad")):
            tried = [row for row in run.rows if (row["optimizer"], row["stage"]) == (optimizer, "1")]
            values = [row["metrics"][metric] for row in tried]
            quartiles = statistics.quantiles(values, n=4, method="inclusive")
            expected = [min(values), *quartiles, max(values), quartiles[2] - quartiles[0]]
            row = rows[metric.replace("_", " "), cell]
            assert row[:2] == ("24", "0")
            assert [float(number) for number in row[2:]] == pytest.approx(expected, rel=1e-3)
    medians = {row[1]: row[6] for row in figure.table.rows if row[0] == "validation loss"}
    for cell, median in medians.items():
        assert f"{cell}: median {median}, quartiles" in figure.panels[0].svg


def test_every_run_is_a_mark_and_a_lost_one_a_cross(read_export):
    marks = count_marks(boxes(read_export(samples.sweep())).panels[0])
    assert sorted(marks.values())[-4:] == [24] * 4

    def change(optimizer, settings):
        lost = {"adam": "diverged", "laprop": "raised" if settings["beta1"] == 0.9 else "diverged"}
        return lost.get(optimizer, 0.0) if (settings["lr"], settings["beta2"]) == (1e-2, 0.99) else 0.0

    figure = boxes(read_export(samples.sweep(change)))
    for panel in figure.panels:
        marks = count_marks(panel)
        assert sorted(marks.values())[-4:] == [21, 21, 24, 24]
        assert list(marks.values()).count(3) == 2, "three crosses of each colour"
        assert "3 diverged" in panel.svg
        assert "1 failed" in panel.svg
        assert "MVN-Grad: median" in panel.svg
    assert [row[3] for row in figure.table.rows[:4]] == ["3 diverged", "2 diverged, 1 failed", "0", "0"]
    assert [row[8] for row in figure.table.rows[:2]] == ["failed", "failed"]


@pytest.mark.parametrize("name", ["mnist", SCALED])
def test_a_lost_run_pulls_the_box_to_the_worse_end(read_export, name):
    """Of 24 or 16 runs a quarter diverged: the quartile on the bad side is lost, whichever that is."""
    figure = boxes(read_export(samples.sweep(samples.at_large_rates("diverged", "adam"), name=name)))
    row = dict(zip(figure.table.head, figure.table.rows[0], strict=True))
    worse, other = ("lower quartile", "upper quartile") if name == SCALED else ("upper quartile", "lower quartile")
    assert (row[worse], row["worst"], row["IQR"]) == ("failed", "failed", "not finite")
    assert float(row[other]) > 0
    assert float(row["median"]) > 0


def test_where_all_runs_are_lost_the_others_are_drawn(read_export):
    figure, settings, selected, _ = draw(read_export(samples.sweep(samples.by(adam="diverged"))))
    assert "Adam: median failed, quartiles failed and failed, 24 runs, 24 diverged" in figure.panels[0].svg
    assert read_texts(settings.panels[0]).count("×") == 24
    assert selected.table.rows[0][4] == "no run has a result"
    nothing = draw(read_export(samples.sweep(lambda *_: "raised", sweep="nothing")))
    assert [len(figure.panels) for figure in nothing] == [0, 4, 0, 0]
    assert [row[-4:-2] for row in nothing[3].table.rows] == [("24", "0")] * 4 + [("96", "0")]


def test_every_run_is_shown_at_its_settings_and_no_setting_stands_for_another(read_export):
    """beta1 decides beta2 in the scaled sweep: a line over beta1 alone would show what beta2 does."""
    run = read_export(samples.sweep(samples.at_large_rates("diverged", "laprop"), name=SCALED))
    settings = draw(run)[1]
    assert [panel.title.split(",")[0] for panel in settings.panels] == list(OPTIMIZERS)
    texts = read_texts(settings.panels[3])
    assert {"β₁, β₂", "learning rate", "0.7, 0.99", "0.95, 0.999", "0.004"} <= set(texts)
    assert "β₁" not in texts
    for row in run.rows_of("MVN-Grad"):
        assert f"{row['value']:.2f}" in texts
    assert read_texts(settings.panels[1]).count("×") == 4


def test_a_sweep_of_too_many_combinations_has_no_table_of_settings(read_export):
    whole = samples.sweep(sweep="mine:random")
    for number, row in enumerate(whole["runs"]):
        row["settings"] = {**row["settings"], "dropout": number}
    assert [figure.title for figure in draw(read_export(whole))] == [
        f"Sweep mine:random: {part}" for part in ("all runs", "selected", "budget")
    ]


def test_the_selected_configuration_and_its_seeds(read_export):
    whole = samples.sweep(samples.by(mvngrad=-0.05))
    whole["runs"][-1] |= {"status": "diverged", "value": None}
    run = read_export(whole)
    table = draw(run)[2].table
    best = next(row for row in whole["runs"] if row["key"] == whole["selected"]["adabelief"])
    row = dict(zip(table.head, table.rows[2], strict=True))
    assert [row[name] for name in ("learning rate", "β₁", "β₂")] == [
        str(best["settings"][name]) for name in ("lr", "beta1", "beta2")
    ]
    mean = best["value"] + 0.01
    assert (row["seeds"], row["validation loss"]) == ("3", f"{mean:.4g} ± 0.01")
    assert row["test loss"] == row["validation loss"]
    assert table.rows[3][4] == "2, 1 diverged"


def test_the_budget_counts_runs_times_and_versions(read_export):
    whole = samples.sweep(samples.at_large_rates("diverged", "adam"))
    for row in whole["runs"][:5]:
        row["commit"] = "fedcba"
    for number, row in enumerate(whole["runs"]):
        row["function"] = f"mine:run {number % 2}"
    budget = draw(read_export(whole))[3]
    assert budget.table.rows[0] == ("Adam", "24", "18", "6", "0", "0", "2", f"{26 * 7.5 / 60:.1f} minutes")
    assert budget.table.rows[-1] == ("all", "96", "90", "6", "0", "0", "8", f"{104 * 7.5 / 60:.1f} minutes")
    assert "Workers of 2 different commit: 0123456789ab (99 runs), fedcba (5 runs)." in budget.caption
    assert "Workers of 2 different function: mine:run 0 (52 runs), mine:run 1 (52 runs)." in budget.caption
    assert "Workers trained 90% of their time" in budget.caption
    plain = draw(read_export(samples.sweep(name="mnist-5k", occupied=None)))[3].caption
    assert "different" not in plain
    assert "Workers" not in plain


def test_a_partial_sweep_says_so_and_decides_nothing(read_export):
    run = read_export(samples.sweep(samples.by(mvngrad="waiting")))
    for figure in draw(run):
        assert "A partial sweep: 72 of at least 96 runs are done" in figure.caption
    verdict = samples.judge_by_claim(run)["sweep-mnist-best"]
    assert (verdict.status, verdict.note) == (NOT_RUN, "The sweep mnist is not done: at least 24 runs are to come.")
    text = page(run)
    assert '<section class="group" id="group-mnist-a-sweep-of-ours">' in text
    assert "A partial sweep" not in page(read_export(samples.sweep(name="mnist-5k")))


def test_a_stage_that_is_not_queued_yet_is_missing(read_export):
    first = read_export(samples.sweep(name="cifar100-bs128", stages=1))
    assert first.left > 40, "four times sixteen, less what is in the first stage as well"
    assert "A partial sweep" in boxes(first).caption
    assert samples.judge_by_claim(first)["sweep-cifar-128"].status == NOT_RUN
    assert read_export(samples.sweep(name="cifar100-bs128", made="later")).left == 0


@pytest.mark.parametrize(("status", "value"), [("finished", -1e3), ("raised", None), ("lost", None), ("waiting", None)])
def test_what_is_not_of_the_grid_is_drawn_and_decides_nothing(read_export, status, value):
    whole = samples.sweep(samples.by(mvngrad=-0.5))
    beside = {"status": status, "value": value}
    extra = [row | {"key": f"{row['key']}-{i}", **beside} for i, row in enumerate(whole["runs"][:30])]
    run = read_export(whole | {"runs": whole["runs"] + extra})
    assert "30 runs are not of the grid as this version has it" in boxes(run).caption
    assert max(count_marks(boxes(run).panels[0]).values()) > 24 or status != "finished"
    verdict = samples.judge_by_claim(run)["sweep-mnist-best"]
    assert verdict.status != NOT_RUN
    assert verdict == samples.judge_by_claim(read_export(whole))["sweep-mnist-best"]


def test_other_optimizers_and_recipes_of_ones_own_are_drawn(read_export):
    whole = samples.sweep(sweep="mine:small")
    for row in whole["runs"]:
        row["optimizer"] = {"adam": "muon", "laprop": None, "adabelief": "$x$ <b>"}.get(
            row["optimizer"], row["optimizer"]
        )
    run = read_export(whole)
    assert [row[1] for row in boxes(run).table.rows[:4]] == ["MVN-Grad", "$x$ <b>", "mnist", "muon"]
    assert sorted(count_marks(boxes(run).panels[0]).values())[-2:] == [24, 72], "unknown ones share a mark"
    text = render_own(run, version="1", made="now")
    assert "$x$ &lt;b&gt;" in text
    assert "<b>:" not in text


def test_a_page_without_sweeps_has_none_and_one_with_a_sweep_no_script(read_export):
    without = render(judge([]), [], version="1", made="now")
    assert "group-sweep" not in without
    assert without.count("<figure") == 0
    text = page(read_export(GOOD))
    assert text.count("<figure") == 4
    assert "<script" not in text
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
