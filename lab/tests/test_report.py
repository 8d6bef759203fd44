"""The report and the diagnosis: what they say, that they need no torch, and that a real browser shows them well."""

import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest
import samples
from browser import Browser, Page, chromium

from mvngrad.diagnostics import diagnose
from mvngrad_lab import report
from mvngrad_lab.report import page
from mvngrad_lab.report.claims import KINDS, OURS, Claim, load_claims
from mvngrad_lab.report.figures import monitor, style
from mvngrad_lab.report.verdicts import STATUSES, Estimate, Strip, Verdict, name_status
from mvngrad_lab.store import BUNDLE, FinishedRun, write_bundle

RESULTS = Path(__file__).parents[2] / "results"
HOSTILE = "<script>document.title='taken'</script>\"'><img src=x onerror=\"document.title='taken'\">"
WIDTHS, THEMES = (390, 1024, 1440), ("light", "dark")
PAPER = {"light": "#fcfbf9", "dark": "#15171b"}


@pytest.fixture(scope="module")
def runs():
    return samples.runs()


@pytest.fixture(scope="module")
def records():
    return samples.records()


@pytest.fixture(scope="module")
def judged(runs):
    """All claims of the paper with verdicts in turn."""
    names, turn = {run.name for run in runs}, itertools.cycle(STATUSES[:5])
    rows = (Estimate("Adam", 77.9, (77.0, 79.0), 3, 78.26), Estimate("MVN-Grad", math.inf))
    strip = Strip("test accuracy, %", rows)
    return [
        (claim, Verdict(next(turn), "largest 1.2e+05, bound 1e5", "It holds elsewhere.", strip))
        if claim.target in names
        else (claim, Verdict("not run", "", "It needs a GPU."))
        for claim in load_claims()
    ]


def render(judged, runs):
    return page.render(judged, runs, version="1.2.3", made="2025-01-02")


@pytest.fixture(scope="module")
def pages(judged, runs, records, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    (folder / "report.html").write_text(render(judged, runs), encoding="utf-8")
    report.build(RESULTS, out=folder / "stored.html", warn=pytest.fail)
    diagnosed = page.render_diagnosis(records, diagnose(records), source="monitor.jsonl")
    (folder / "diagnosis.html").write_text(diagnosed, encoding="utf-8")
    return folder


# Figures


def test_every_record_is_drawn_with_a_description(runs):
    for run in runs:
        drawn = page.draw(run)
        assert drawn, run.name
        for panel in (panel for figure in drawn for panel in figure.panels):
            root = ElementTree.fromstring(panel.svg)
            tags = [child.tag.split("}")[1] for child in root[:2]]
            assert (root.get("role"), tags) == ("img", ["title", "desc"])
            assert len(root[1].text) > 10
            assert root.get("aria-labelledby") == f"{root[0].get('id')} {root[1].get('id')}"
            assert not re.search(r"(?<!,)#[0-9a-f]{6}", panel.svg), f"{panel.title}: a colour that no theme can change"
            assert not re.search(r"\bnan\b", root[1].text), root[1].text
            assert "font-family" not in panel.svg, "the page has its own"


def test_figures_depend_on_their_data_alone(runs):
    (run,) = (run for run in runs if run.name == "convergence")
    changed = json.loads(json.dumps(run.result))
    changed["rate"]["measured"][-1] *= 2
    first, again = page.draw(run), page.draw(run)
    other = page.draw(dataclasses.replace(run, result=changed))
    assert first == again
    assert first[0] != other[0]
    assert first[1] == other[1]


def test_a_record_without_figure_py_has_no_figures():
    assert page.draw(FinishedRun("new-0", "new", {}, {}, {"anything": 1})) == []


def words(html):
    return " ".join(unescape(re.sub(r"<(style|svg).*?</\1>|<[^>]*>", " ", html, flags=re.DOTALL)).split())


def test_every_claim_is_on_the_page_once_and_those_not_run_last(judged, runs, pages):
    html = (pages / "report.html").read_text(encoding="utf-8")
    for claim, verdict in judged:
        assert html.count(f'id="{claim.id}"') == 1
        item = html[html.index(f'id="{claim.id}"') :].split("</li>")[0]
        shown = re.search(r'<p class="verdict [^>]*>(?:<svg.*?</svg>)? *(.*?)</p>', item, re.DOTALL)[1]
        assert shown == name_status(claim, verdict.status)
        assert "reproduced" not in shown or claim.kind != OURS
    open_ones = html.index('<section id="not-run"')
    for claim, verdict in judged:
        assert (html.index(f'id="{claim.id}"') > open_ones) == (verdict.status == "not run")
    rows = re.findall(
        r'<input type="radio"[^>]*>(?:<svg.*?</svg> )?([a-z ]+?)(?: <small>.*?</small>)?</label></th>(.*?)</tr>', html
    )
    counted = {name: [int(n) if n != "·" else 0 for n in re.findall(r"<td>(.*?)</td>", cells)] for name, cells in rows}
    assert sum(counted.pop("all claims")) == len(judged)
    assert counted == {
        status: [sum((c.kind, v.status) == (kind, status) for c, v in judged) for kind in KINDS] for status in STATUSES
    }
    assert all(run.key in html for run in runs)


def test_empty_pages_and_records_without_claims(runs):
    assert "Not run" not in words(render([], []))
    odd = FinishedRun("table9-abc", "table9", {"depth": 7}, {"commit": "fedcba"}, {"rows": [1, 2]})
    html = render([], [odd, *(run for run in runs if run.name == "memory")])
    assert "table9-abc" in html[html.index('id="other-runs"') :]
    assert "State of an optimizer" in html, "a run that no claim asks for is drawn all the same"


def test_smaller_runs_are_drawn_and_judged_at_the_end(judged, runs):
    (full,) = (run for run in runs if run.name == "memory")
    quick = dataclasses.replace(full, key="memory-quick", environment={"quick": True})
    html = render(judged, [quick, full])
    first, last = html.split('id="other-runs"')
    assert [part.count("State of an optimizer") for part in (first, last)] == [1, 1]
    assert "memory-0123456789ab" in first
    assert "memory-quick" in last
    assert "Small sizes (--quick)." in last


def test_the_summary_names_own_runs_that_larger_ones_replace(tmp_path, runs):
    """Runs of the first folder are the user's."""
    (full,) = (run for run in runs if run.name == "memory")
    quick = dataclasses.replace(full, key="memory-quick", environment={"quick": True})
    own, stored, lines = tmp_path / "runs", tmp_path / "results", []
    for folder, run in ((own, quick), (stored, full)):
        write_bundle(folder / BUNDLE, [run])
    report.build(own, stored, out=tmp_path / "report.html", say=lines.append)
    assert lines[-1].startswith(f"memory: the claims are judged by the larger runs in {stored}; yours are at the end")
    report.build(stored, own, out=tmp_path / "report.html", say=lines.append)
    assert not lines[-1].startswith("memory: ")


def test_ids_are_unique(pages):
    for path in pages.glob("*.html"):
        ids = re.findall(r'\bid="([^"]*)"', path.read_text(encoding="utf-8"))
        assert len(ids) == len(set(ids))


def test_the_page_is_small(pages):
    assert (pages / "report.html").stat().st_size < 600_000


def hostile(runs):
    claim = Claim(HOSTILE, HOSTILE, (HOSTILE,), HOSTILE, HOSTILE, HOSTILE, "mnist-curves")
    (run,) = (run for run in runs if run.name == "mnist-curves")
    result = {**run.result, "data": HOSTILE, "spike_rule": HOSTILE}
    run = FinishedRun(HOSTILE, run.name, {HOSTILE: HOSTILE}, {HOSTILE: HOSTILE}, result)
    return [(claim, Verdict(STATUSES[1], HOSTILE, HOSTILE))], [run]


def test_data_are_escaped(runs, records):
    html = render(*hostile(runs))
    assert html.count("&lt;") > 10
    other = page.render_diagnosis(records, diagnose(records), source=HOSTILE)
    for text in (html, other):
        assert "<script" not in text
        assert "<img" not in text


def test_a_diagnosis_has_the_regime_the_pick_and_the_statements(records):
    for i, record in enumerate(records):
        record["logged"] = {"loss": 40 - i}
    records[0]["logged_not_finite"] = {"loss": 3}
    diagnosis = diagnose(records)
    html = page.render_diagnosis(records, diagnosis, source="monitor.jsonl")
    text = words(html)
    assert "theory would pick MVN-Grad" in text
    assert f"Values of loss that were not finite: 3, the first by step {records[0]['step']}." in text
    assert html.count(f"From 40 to {41 - len(records)}") == 1, "the loss is the training's, not a group's"
    assert "Signal-dominated" in text or "signal-dominated" in text
    for group in diagnosis.groups:
        assert group.finding in text
        assert all(said in text for said in (group.action, *group.measured))
        for statement in group.statements:
            assert statement.verdict in text
    assert "No record, no diagnosis" in words(page.render_diagnosis([], diagnose([]), source="empty.jsonl"))


def test_lean_mvn_grad_is_marked_as_mvn_grad(records):
    for record in records:
        for entry in record["groups"]:
            entry |= {"cell": "lean MVN-Grad", "m": "rebuilt"}
    html = page.render_diagnosis(records, diagnose(records), source="monitor.jsonl")
    assert "trained with it" in words(html)
    assert "MVN-Grad, median" in words(html)


def test_heat_maps_show_what_each_layer_does_over_steps(records):
    layers = [{"name": name, "sampled": 64, "epsilon_floor": 0.0, "update": 0.1, "snr": None} for name in "ab"]
    entries = [
        (step, {**records[0]["groups"][0], "layers": [{**layer, "update": step * layer["update"]} for layer in layers]})
        for step in (10, 20, 30)
    ]
    (figure,) = (each for each in monitor.draw("group", entries) if each.title == "Layers, over steps")
    assert [panel.title for panel in figure.panels] == ["|update| / lr, 1 to 3"], "no coordinate is at the floor"
    for layer in entries[-1][1]["layers"]:
        layer["epsilon_floor"] = 0.25
    (figure,) = (each for each in monitor.draw("group", entries) if each.title == "Layers, over steps")
    assert [panel.title for panel in figure.panels] == ["At epsilon's floor", "|update| / lr, 1 to 3"]
    assert len(re.findall(r"opacity[:=]\W*0?\.25", figure.panels[0].svg)) == 2


@pytest.mark.parametrize(("steps", "start"), [([20, 30], 10), ([10, 20], 0), ([5, 30], 0), ([20], 0)])
def test_heat_maps_start_with_the_monitor(records, monkeypatch, steps, start):
    layers = [{"name": name, "sampled": 64, "epsilon_floor": 0.0, "update": 0.1, "snr": None} for name in "ab"]
    axes = []
    monkeypatch.setattr(monitor, "make_axes", lambda *a, **k: axes.append(style.make_axes(*a, **k)) or axes[-1])
    list(monitor.draw("group", [(step, {**records[0]["groups"][0], "layers": layers}) for step in steps]))
    assert axes[-2].get_xlim() == (start, steps[-1])


def test_pages_are_drawn_without_torch(runs, records, tmp_path):
    (tmp_path / "runs.jsonl").write_text(
        "".join(json.dumps(vars(run)) + "\n" for run in runs if run.name in ("memory", "spike", "variance-gap"))
    )
    (tmp_path / "records.json").write_text(json.dumps(records))
    (tmp_path / "sweep-mnist.json").write_text(json.dumps(samples.sweep()))
    code = """
import importlib.abc, json, pathlib, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("torch", "tyro", "rich", "optuna", "sqlalchemy", "requests"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Refuse())
folder = pathlib.Path(sys.argv[1])
from mvngrad.diagnostics import diagnose
from mvngrad_lab import report
from mvngrad_lab.report import page
html = report.build(folder, out=folder / "report.html", warn=sys.exit).read_text(encoding="utf-8")
records = json.loads((folder / "records.json").read_text())
diagnosis = page.render_diagnosis(records, diagnose(records), source="records.json")
sweep = html[html.index('id="group-mnist-a-sweep-of-ours"'):].split("</section>")[0]
print(sweep.count("<figure"), html.count('class="verdict reproduced'), diagnosis.count("<figure"))
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    in_sweep, reproduced, in_diagnosis = map(int, done.stdout.split())
    assert in_sweep == 4
    assert reproduced > 0
    assert in_diagnosis > 0


def test_the_command_ends_with_counts_findings_and_the_path_and_opens_it(runs, tmp_path):
    memory = next(run for run in runs if run.name == "memory")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "runs.jsonl").write_text(json.dumps(vars(memory)) + "\n")
    (tmp_path / "results").symlink_to(RESULTS)
    browser = tmp_path / "browser"
    browser.write_text('#!/bin/sh\necho "$1" > opened\n')
    browser.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "mvngrad_lab", "report", "--open"],
        cwd=tmp_path,
        env={**os.environ, "BROWSER": str(browser)},
        capture_output=True,
        text=True,
        check=True,
    )
    writing, *counts, last = (line for line in done.stdout.splitlines() if not line.startswith("- "))
    assert writing == "writing the report"
    path = last.removeprefix("report: ")
    assert [line.split(":")[0].split(", ")[1] for line in counts] == list(KINDS)
    assert sum(int(line.split()[0]) for line in counts) == len(load_claims())
    assert any(line.startswith("- On CIFAR-100, at the paper's settings") for line in done.stdout.splitlines())
    assert "**" not in done.stdout
    assert path == str(tmp_path / "runs" / "report.html")
    assert (tmp_path / "opened").read_text().strip() == Path(path).as_uri()


def test_theorems_come_after_trainings_and_figures_before_claims(judged, runs):
    html = render(judged, runs)
    sections = re.findall(r'<section class="group" id="group-([^"]+)"', html)
    assert sections.index("cifar-100-table-1") < sections.index("spikes")
    assert sections.index("language-models-on-the-stand-in") < sections.index("spikes")
    for section in html.split("<section")[1 : 1 + len(sections)]:
        assert section.index("<figure") < section.index('<ul class="claims">')
    labels = re.findall(r'id="figure-(\d+)">\s*<h3 class="title"><span>(?:Figure|Table) (\d+)</span>', html)
    assert [int(number) for number, _ in labels] == list(range(1, len(labels) + 1))
    assert all(anchor == shown for anchor, shown in labels)
    item = html[html.index('id="spike-mvngrad"') :].split("</li>")[0]
    assert '<a href="https://arxiv.org/abs/2602.10204">Theorem 3.3</a>' in item
    assert re.search(r'href="#figure-\d+">Figure \d+</a>', item)


def test_numbers_in_a_column_are_aligned_on_the_point():
    assert page.align_column(["1.25", "**10**", "to come"]) == ["1.25", "**10**\u2008\u2007\u2007", "to come"]
    assert page.align_column(["Adam", "3", "LaProp"]) is None


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


def test_browser_tests_are_skipped_without_a_browser_but_fail_in_ci(monkeypatch):
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no Chromium"):
        chromium()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no Chromium"):
        chromium()


LOW_CONTRAST = """(() => {
  const parse = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const straight = c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(c => straight(c / 255))
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const low = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement, box = node.getBoundingClientRect();
    if (!walker.currentNode.data.trim() || !box.width || node.closest("title, desc, style, legend")) continue;
    const style = getComputedStyle(node), text = parse(node instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(text), light(behind(node))].sort((x, y) => x - y);
    if ((b + .05) / (a + .05) < 4.5) low.push([walker.currentNode.data.trim(), (b + .05) / (a + .05)]);
  }
  return low;
})()"""

OUTSIDE = """[...document.querySelectorAll(".panel svg")].map(svg => svg.getBoundingClientRect())
  .filter(box => !(box.width > 200 && box.height > 100 && box.left >= 0 && box.right <= innerWidth + .5)).length"""


CLIPPED = """[...document.querySelectorAll("table, pre, .track")].map(e => e.getBoundingClientRect())
  .filter(box => box.left < -.5 || box.right > innerWidth + .5).length"""


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["report", "stored", "diagnosis"])
def test_pages_in_a_browser(browser, pages, name, width, theme):
    shown = Page(browser, pages / f"{name}.html", width, theme)
    assert shown.complaints == []
    assert shown.requests == [shown.url]
    assert shown.evaluate("document.querySelectorAll('.panel svg').length") > 4
    assert shown.evaluate(OUTSIDE) == 0
    assert shown.evaluate(CLIPPED) == 0
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.evaluate(LOW_CONTRAST) == []
    background = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    expected = [int(PAPER[theme][i : i + 2], 16) for i in (1, 3, 5)]
    assert [int(part) for part in re.findall(r"\d+", background)] == expected
    levels = shown.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_clicking_a_count_filters_claims(browser, pages, judged):
    shown = Page(browser, pages / "report.html")
    visible = "[...document.querySelectorAll('.claim')].filter(claim => claim.checkVisibility()).map(claim => claim.id)"
    assert len(shown.evaluate(visible)) == len(judged)
    for status in STATUSES:
        shown.evaluate(f"document.querySelector('#show-{status.replace(' ', '-')}').click()")
        assert shown.evaluate(visible) == [claim.id for claim, verdict in judged if verdict.status == status]


def test_print_is_light_and_complete(browser, pages):
    shown = Page(browser, pages / "report.html", theme="dark")
    shown.evaluate("document.querySelector('#show-reproduced-with-a-caveat').click()")
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    shown.call("Emulation.setEmulatedMedia", media="print", features=dark)
    assert shown.evaluate("getComputedStyle(document.body).color") == "rgb(28, 30, 33)"
    assert shown.evaluate("[...document.querySelectorAll('.claim')].every(claim => claim.checkVisibility())")
    assert shown.evaluate("document.querySelector('details dl').checkVisibility({contentVisibilityAuto: true})")
    pdf = shown.pdf()
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") > 3


def test_hostile_data_do_nothing_in_a_browser(browser, runs, tmp_path):
    path = tmp_path / "hostile.html"
    path.write_text(render(*hostile(runs)), encoding="utf-8")
    shown = Page(browser, path)
    assert shown.evaluate("document.title") == "What we found about MVN-Grad"
    assert shown.complaints == []
    assert shown.requests == [shown.url]
    assert shown.evaluate("document.querySelectorAll('script, img').length") == 0


def test_first_screen_says_what_it_is_and_how_to_use_it():
    top = words(render([], []).split('<div class="overview">')[0])
    assert "MVN-Grad divides each gradient" in top
    assert "pip install" in top
    assert "MVNGradW(model.parameters(), lr=1e-3)" in top
    assert "docs/index.md" in top
    linked = page.render([], [], version="1", made="now", docs="index.html")
    assert '<a href="index.html">Documentation</a>' in linked


def test_numbers_that_are_printed_alike_share_a_place_on_their_strip():
    strip = Strip.of_numbers("v", [("a", 1.00002, 1), ("b", 1.0001, 1)], digits=3)
    assert {strip.position(row.value) for row in strip.rows} == {50.0}
    assert dataclasses.replace(strip, digits=None).position(1.0001) == 100.0
