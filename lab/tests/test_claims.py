"""Every claim has a rule and a way to be decided, and points into the paper."""

import re
from pathlib import Path

import pytest

from mvngrad_lab.discovery import find_experiments
from mvngrad_lab.report.claims import NUMBERS, load_claims
from mvngrad_lab.report.verdicts import NOT_RUN, STATUSES, UNDECIDED, find_judges, find_latest, judge
from mvngrad_lab.store import FinishedRun

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "mvn-grad.tex"
CLAIMS, EXPERIMENTS = load_claims(), find_experiments()


def test_every_claim_is_whole():
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.says and claim.value and claim.rule and claim.target, claim.id  # noqa: PT018
        assert claim.where or claim.says.startswith("Ours"), claim.id
        assert set(claim.where) <= NUMBERS.keys(), claim.id


def test_every_claim_has_a_judge_and_says_what_it_needs():
    assert find_judges().keys() == {claim.id for claim in CLAIMS}
    for claim in CLAIMS:
        decided = claim.target in EXPERIMENTS and claim.id != "floor-dial-language"  # a table of two trainings
        assert bool(claim.needs) != decided, claim.id
    for name in EXPERIMENTS:
        assert any(claim.target.startswith(name) for claim in CLAIMS), name


def test_readmes_of_experiments_name_files_that_exist():
    for readme in (Path(__file__).parents[1] / "src" / "mvngrad_lab" / "experiments").glob("*/README.md"):
        named = re.findall(r"`(\w+\.(?:py|toml))`", readme.read_text(encoding="utf-8"))
        assert [name for name in named if not (readme.parent / name).exists()] == [], readme


@pytest.mark.skipif(not PAPER.exists(), reason="the paper is not here")
def test_every_label_and_every_number_of_a_column_is_in_the_paper():
    text = PAPER.read_text().replace("k\\,s", "k")
    labels = set(re.findall(r"\\label\{([^}]*)\}", text))
    for claim in CLAIMS:
        assert all(label in labels or label.startswith("app: ") for label in claim.where), claim.id
        for name, number in claim.values.items():
            forms = [f"{number:.{digits}f}" for digits in range(5)] + [f"{number / 1000:.1f}k"]
            assert any(re.search(rf"(?<![\d.]){re.escape(form)}(?!\d)", text) for form in forms), (claim.id, name)


def test_without_results_nothing_is_claimed():
    verdicts = judge([])
    assert [claim for claim, _ in verdicts] == list(CLAIMS)
    assert {verdict.status for _, verdict in verdicts} == {NOT_RUN}
    assert all(verdict.note for _, verdict in verdicts)


def make_run(name="memory", quick=False, made="2026-01-01", state=3.0, **recipe):
    cells = {"AdamW": 2.0, "LaPropW": 2.0, "AdaBeliefW": 2.0, "MVN-GradW": state}
    return FinishedRun(f"{name}-{made}", name, recipe, {"quick": quick, "made": made}, {"state": cells, "smaller": {}})


def test_full_runs_come_before_quick_and_new_before_old_ones():
    old, new, quick = make_run(), make_run(made="2026-01-02"), make_run(quick=True, made="2026-01-03")
    assert find_latest([quick, new, old])["memory"] is new
    assert find_latest([quick])["memory"] is quick
    sample, whole = make_run(made="2026-01-05", data="mnist-5k"), make_run(data="mnist")
    assert find_latest([whole, sample])["memory"] is whole


def test_quick_results_are_marked():
    verdicts = {claim.id: verdict for claim, verdict in judge([make_run(quick=True)])}
    assert verdicts["memory-states"].status == "reproduced"
    assert "--quick" in verdicts["memory-states"].note
    for quick, expected in ((False, STATUSES[2]), (True, UNDECIDED)):
        verdicts = {claim.id: verdict for claim, verdict in judge([make_run(state=2.5, quick=quick)])}
        assert verdicts["memory-states"].status == expected
