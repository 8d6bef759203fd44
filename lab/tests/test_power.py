"""The powers that rules and docs state are those that the command prints, and their tests are those of the judges."""

import dataclasses
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mvngrad_lab.discovery import import_all
from mvngrad_lab.experiments.floor.power import pooled_deviation
from mvngrad_lab.experiments.language.power import order_powers
from mvngrad_lab.report.claims import load_claims
from mvngrad_lab.report.power import narrower_power, outside_power, share_inside, signed_rank_power, welch_power
from mvngrad_lab.report.statistics import LEVEL, p_narrower, signed_rank
from mvngrad_lab.report.tables import judge_means
from mvngrad_lab.report.verdicts import NOT_REPRODUCED, REPRODUCED
from mvngrad_lab.tasks.cifar100.recipe import paper

RULES = {claim.id: claim.rule for claim in load_claims()}
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "reproduce.md"


@pytest.mark.parametrize("module", list(import_all("power")), ids=lambda module: module.__name__.split(".")[-2])
def test_rules_state_the_powers_of_the_command(module):
    for claim, sentence in module.make_sentences().items():
        assert sentence in RULES[claim], claim


def test_every_rule_with_a_test_states_its_power_or_names_a_rule_that_does():
    def says(claim, words):
        others = re.findall(r"\b[Aa]s(?: in)? ((?:[a-z0-9]+-)+[a-z0-9]+)", RULES[claim])
        return bool(re.search(words, RULES[claim])) or any(says(other, words) for other in others)

    tested = [claim for claim in RULES if says(claim, r"p < 0|alpha 0|bound of the")]
    assert len(tested) > 60
    assert [claim for claim in tested if not says(claim, r"\b[Pp]ower\b")] == []


def test_the_powers_in_the_docs_are_those_of_the_command():
    page = " ".join(PAGE.read_text().split())
    powers = [f"{welch_power(seeds, by):.0%}" for seeds, by in ((3, 3), (3, 6), (6, 2), (6, 3))]
    first, second = "a difference of 3 deviations in {} of experiments and one of 6 in {}", "find 2 in {} and 3 in {}."
    assert first.format(*powers[:2]) in page
    assert second.format(*powers[2:]) in page
    orders = (order_powers(text, seeds)[0] for text, seeds in (("wikitext", 4), ("openwebtext", 3)))
    assert "powers are {:.1%} and {:.1%}.".format(*orders) in page


def test_the_deviation_of_table_1_is_that_of_its_first_seeds(tmp_path):
    """Stored runs of seeds 3 to 5, and of other settings, change no power that was stated before them."""

    def write(*others):
        runs = [*(paper("adam", 1024, seed) for seed in (0, 1, 2)), *others]
        rows = [{"key": r.key, "name": r.name, "recipe": r.settings, "result": {"test_accuracy": r.seed}} for r in runs]
        (tmp_path / "runs.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
        return pooled_deviation(tmp_path / "runs.jsonl", 1024, ("adam",))

    assert write() == 1.0
    assert write(*(paper("adam", 1024, seed) for seed in (3, 4, 5))) == 1.0
    assert write(dataclasses.replace(paper("adam", 1024, 9), epochs=30)) == 1.0


def draw_many(power, count):
    """The share of `count` draws, and a bound on its distance from the true power."""
    return count, 4 * (max(power * (1 - power), 0.01) / count) ** 0.5


def test_shares_of_means_are_those_of_the_judge():
    deviations, margin, rng = [0.25, 0.3, 0.4, 0.5], 0.6, np.random.default_rng(1)
    for shifts, status, power in (
        ([0.0] * 4, REPRODUCED, share_inside(deviations, 3, margin)[0]),
        ([3.0] * 4, NOT_REPRODUCED, outside_power(deviations, 3, margin, 3.0, 4)),
    ):
        draws, bound = draw_many(power, 300)
        found = 0
        for _ in range(draws):
            rows = {str(i): rng.normal(shifts[i], deviations[i], 3).tolist() for i in range(4)}
            found += judge_means("", rows, dict.fromkeys(rows, 0.0), margin).status == status
        assert found / draws == pytest.approx(power, abs=bound)


def test_powers_of_pairs_are_those_of_the_judges_tests():
    draw = random.Random(1)
    power = signed_rank_power(16, 0.8, LEVEL)
    draws, bound = draw_many(power, 500)
    pairs = ([(0.0, draw.gauss(0.8, 1)) for _ in range(16)] for _ in range(draws))
    assert sum(signed_rank(each) < LEVEL for each in pairs) / draws == pytest.approx(power, abs=bound)
    power = narrower_power(9, 8)
    draws, bound = draw_many(power, 60)
    pairs = ([(draw.gauss(0, 1), draw.gauss(0, 8)) for _ in range(9)] for _ in range(draws))
    assert sum(p_narrower(each)[0] < LEVEL for each in pairs) / draws == pytest.approx(power, abs=bound)


def test_the_level_of_two_one_sided_tests_holds_at_the_margin():
    assert signed_rank_power(12, 1.0, 0.05, within=1.0) < 0.055
    assert signed_rank_power(12, 0.0, 0.05, within=3.0) == 1.0
    assert signed_rank_power(18, 0.0, 0.025, seeds=3, correlation=0.99) > 3 * signed_rank_power(18, 0.0, 0.025)
    assert stats.wilcoxon([1, 2, 3], alternative="greater").pvalue == signed_rank([(0, 1), (0, 2), (0, 3)])
