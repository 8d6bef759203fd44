"""What we found, on the first screen and in the README: the sentences and the figure are those of the stored runs."""

import dataclasses
import re
import shutil
from xml.etree import ElementTree

import pytest
from test_report import RESULTS, render, words

from mvngrad_lab.report import load_records
from mvngrad_lab.report.figures import style
from mvngrad_lab.report.findings import draw_lead, summarize
from mvngrad_lab.report.page import draw
from mvngrad_lab.report.verdicts import find_latest, judge


def test_findings_are_sentences_about_verdicts_and_link_to_their_sections():
    """From the runs in results/, whatever they say: each number of a sentence is that of its verdict or record."""
    records = load_records(RESULTS, warn=pytest.fail)
    judged = judge(records)
    html = render(judged, records)
    found = re.findall(r'<li>(.*?) <a href="#([^"]+)"', html.split('<ol class="found">')[1].split("</ol>")[0])
    assert len(found) == 4
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert all(anchor in ids for _, anchor in found)
    by_claim = {claim.id: verdict for claim, verdict in judged}
    floor, decay, language, unclipped = (words(text) for text, _ in found)
    assert floor.startswith("An epsilon floor")
    gain = by_claim["floor-decay-floor"].strip.rows[0].value
    assert f"A floor adds {gain:.1f} points to decoupled decay, with caveats." in decay
    assert "The cause is undecided" in decay
    note = by_claim["floor-decay-decoupled"].note
    assert f"(Adam and MVN-Grad, 3 seeds). {note} Tuned coupled decay: " in decay
    assert re.fullmatch(r"Decoupled decay closes \d+% \(95%: \d+% to \d+%\) of the gap.", note)
    assert "settings where it has some (not planned, 3 seeds): variance" in floor
    assert "costs GPT-2 30M 0.76 to 0.93 nats" in language  # as in the README
    medians = {
        row.label: f"{row.value:.2f} with {row.label}" for row in by_claim["spikes-text-unclipped-loss"].strip.rows
    }
    pairs = (f"{medians[last]} and {medians[first]}" for last, first in (("LaProp", "Adam"), ("MVN-Grad", "AdaBelief")))
    assert f"GPT-2 30M at {', '.join(pairs)}; with the norm clipped at 1 all four end at 5.82 to 5.85" in unclipped
    summary = "\n".join(summarize(judged, find_latest(records)))
    # As in the README.
    assert "0.85 with Adam, 0.59 with AdaBelief, 0.08 with MVN-Grad, 0.05 with LaProp (3 seeds)" in summary
    clipped, free = (row.value for row in by_claim["spikes-text-clipping"].strip.rows[:2])
    costs = f"bad batches cost {free:.2f} nats there without clipping, {clipped:.2f} with the norm clipped"
    assert f"At (0.95, 0.99) momentum last does not help; {costs}" in summary
    table = next(line for line in summary.splitlines() if line.startswith("- On CIFAR-100, at the paper's settings"))
    for batch in ("128", "1024"):
        value = next(row.value for row in by_claim[f"cifar-test-{batch}"].strip.rows if row.label == "MVN-Grad")
        assert f"{value:.2f}% at batch {batch}" in table
    statuses = {by_claim[f"cifar-order-{batch}"].status for batch in ("128", "1024")}
    assert ("too few seeds to decide" in table) == ("undecided" in statuses)
    assert "no optimizer is shown to be ahead" in summary
    for claim, status, said in (
        ("stand-in-order", "reproduced", "MVN-Grad is ahead"),
        ("spikes-text-short-damage", "not reproduced", "momentum last does not lose less"),
        ("spikes-text-damage", "reproduced with a caveat", "At (0.95, 0.99) momentum last helps, too;"),
        ("spikes-text-damage", "undecided", "At (0.95, 0.99) that is undecided;"),
        ("spikes-mnist-short-recovery", "undecided", "on MNIST it is undecided whether"),
        ("spikes-text-unclipped-gain", "undecided", None),
    ):
        other = dataclasses.replace(by_claim[claim], status=status)
        changed = [(each, other if each.id == claim else verdict) for each, verdict in judged]
        text = "\n".join(summarize(changed, find_latest(records)))
        if said is None:
            assert "Without gradient clipping" in summary
            assert "Without gradient clipping" not in text
        else:
            assert said in text
            assert said not in summary
    assert re.match(r"\d+ claims, the paper's: ", summary)


def test_claims_and_findings_of_an_experiment_are_those_of_all_its_records(tmp_path):
    """`spikes` makes the records of text and images; spikes-mnist is another."""
    for name in ("spikes-text-short.json", "spikes-text-short-rates.json"):
        shutil.copy(RESULTS / name, tmp_path)
    records = load_records(tmp_path, warn=pytest.fail)
    judged = judge(records)
    theirs = {"spikes-text", "spikes-text-short", "spikes-text-unclipped", "spikes-images"}
    count = sum(claim.target in theirs for claim, _ in judged)
    first, finding, others = summarize(judged, find_latest(records), ["spikes"])
    assert first.startswith(f"{count} claims of spikes: ")
    assert finding.startswith("- At betas (0.9, 0.7), ")
    assert others.startswith(f"{len(judged) - count} other claims: ")
    mine, *_ = summarize(judged, find_latest(records), ["spikes-mnist"])
    assert mine.startswith(f"{sum(claim.target == 'spikes-mnist' for claim, _ in judged)} claims of spikes-mnist: ")


def test_the_pictures_and_the_readmes_sentence_are_those_of_results():
    """If this fails after new runs: `make pictures`, and what the README says they found."""
    records = find_latest(load_records(RESULTS, warn=pytest.fail))
    lead, (dial,) = draw_lead(records), draw(records["floor-dial"])
    readme = " ".join((RESULTS.parent / "README.md").read_text().split())
    (runs,) = re.findall(r"CIFAR-100, (batch.*?)\. Filled", lead.caption)
    assert runs in readme
    for theme, colors in (("light", style.LIGHT), ("dark", style.DARK)):
        for name, panel in zip(("floor", "dial-images", "dial-language"), (*lead.panels, *dial.panels), strict=True):
            stored = (RESULTS.parent / "docs" / "img" / f"{name}-{theme}.svg").read_text()
            assert len(stored) < 20_000
            assert colors["mvngrad"] in stored
            assert words_of(stored) == words_of(panel.svg)
    for name in ("report.png", "diagnosis.png"):
        assert 0 < (RESULTS.parent / "docs" / "img" / name).stat().st_size < 150_000


def words_of(svg):
    return [text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
