"""Verdicts on sweeps: the paper's grids, claims transferred to smaller ones, and the statistics behind them."""

import dataclasses
import math
import random
import re
import statistics
from collections import Counter

import pytest
import samples

from mvngrad_lab.experiments.sweeps.judge import NOTES
from mvngrad_lab.experiments.sweeps.records import PREFIX
from mvngrad_lab.experiments.sweeps.sweeps import PAIRS, SWEEPS
from mvngrad_lab.report.claims import load_claims
from mvngrad_lab.report.page import render
from mvngrad_lab.report.statistics import interquartile, p_narrower, quantile, signed_rank
from mvngrad_lab.report.tables import OPTIMIZERS
from mvngrad_lab.report.verdicts import CAVEAT, JUDGES, NOT_REPRODUCED, NOT_RUN, REPRODUCED, UNDECIDED, judge

SCALED = "cifar100-bs1024-scaled"


# Verdicts on the paper's grids


def test_every_claim_about_a_sweep_waits_for_it():
    swept = [claim for claim in load_claims() if claim.target.startswith(PREFIX)]
    assert len(swept) == 18
    assert {verdict.status for claim, verdict in judge([]) if claim in swept} == {NOT_RUN}
    for claim in swept:
        name = claim.target.removeprefix(PREFIX)
        assert name in SWEEPS, claim.id
        assert f"mvngrad sweep export {name} results/sweep-{name}.json" in claim.needs


def spread(**factors):
    """Values of an optimizer farther from their middle."""
    return lambda optimizer, settings: factors.get(optimizer, 0.0) * PAIRS.index((settings["beta1"], settings["beta2"]))


ORDER = {"mvngrad": 0.3, "adabelief": 0.2}
LOWER = {"mvngradw": -0.1, "adabeliefw": -0.1}


@pytest.mark.parametrize(
    ("name", "claims", "change", "expected"),
    [
        *(
            ("cifar100-bs1024", ("sweep-cifar-1024-test", "sweep-cifar-1024-train"), samples.by(**changes), expected)
            for changes, expected in (
                (ORDER, REPRODUCED),
                (ORDER | {"laprop": 0.25}, NOT_REPRODUCED),
                (ORDER | {"adabelief": 0.4}, NOT_REPRODUCED),
                ({"adabelief": 0.2}, NOT_REPRODUCED),
                (ORDER | {"laprop": 0.2}, UNDECIDED),
            )
        ),
        *(
            ("cifar100-bs128", ("sweep-cifar-128",), change, expected)
            for change, expected in (
                (samples.by(mvngrad=0.01), REPRODUCED),
                (samples.by(mvngrad=2.0), NOT_REPRODUCED),
                (samples.by(mvngrad=-0.01), NOT_REPRODUCED),
                (samples.at_large_rates("diverged", "adabelief"), REPRODUCED),
                (samples.at_large_rates("diverged", "mvngrad"), UNDECIDED),
                (samples.by(mvngrad="diverged"), NOT_REPRODUCED),
                (
                    lambda optimizer, settings: 3.0 * (optimizer == "mvngrad") * (2 * (settings["beta2"] > 0.995) - 1),
                    UNDECIDED,
                ),
            )
        ),
        *(
            ("openwebtext", (f"openwebtext-{claim}",), change, expected)
            for claim, change, expected in (
                ("sweep", samples.by(**LOWER), REPRODUCED),
                ("sweep", samples.by(mvngradw=-0.1), UNDECIDED),
                ("sweep", samples.by(**LOWER, lapropw=-0.2), NOT_REPRODUCED),
                ("sweep-train", samples.by(**LOWER), REPRODUCED),
                ("quartiles", spread(adamw=3.0, adabeliefw=3.0), REPRODUCED),
                ("quartiles", spread(adamw=3.0), UNDECIDED),
                ("quartiles", spread(lapropw=3.0, adabeliefw=3.0), NOT_REPRODUCED),
            )
        ),
    ],
)
def test_the_papers_grids_are_judged_by_their_rules(read_export, name, claims, change, expected):
    by_claim = samples.judge_by_claim(read_export(samples.sweep(change, name=name)))
    for claim in claims:
        assert by_claim[claim].status == expected
        assert f" over {name}" in by_claim[claim].strip.what
    if len(claims) == 2:
        assert [
            f"median {kind} accuracy" in by_claim[c].strip.what
            for kind, c in zip(("test", "train"), claims, strict=True)
        ] == [1, 1]
    assert by_claim["sweep-scaled-best"].status == NOT_RUN


@pytest.mark.parametrize(
    ("name", "claim", "w"),
    [
        (SCALED, "sweep-scaled-selected", ""),
        ("cifar100-bs1024", "sweep-cifar-1024-selected", ""),
        ("wikitext103", "sweep-wikitext-selected", ""),
        ("openwebtext", "sweep-openwebtext-selected", "w"),
    ],
)
def test_selected_settings_are_compared_with_the_best(read_export, name, claim, w):
    selected = JUDGES[claim].keywords["selected"]
    by_optimizer = dict(zip([f"{each}{w}" for each in OPTIMIZERS.values()], selected.values(), strict=True))
    better = 2.0 if "cifar" in name else -0.2  # points of accuracy, or a loss

    def judge_with(*lost):
        def change(optimizer, settings):
            chosen = (
                tuple(settings.get(field) for field in ("lr", "beta1", "beta2", "eps_s")) == by_optimizer[optimizer]
            )
            return chosen * (-better if optimizer.removesuffix("w") in lost else better)

        return samples.judge_by_claim(read_export(samples.sweep(change, name=name)))[claim]

    assert judge_with().status == CAVEAT
    assert all(row.value == row.reference for row in judge_with().strip.rows)
    assert judge_with("adam").status == UNDECIDED
    assert judge_with("adam", "mvngrad").status == NOT_REPRODUCED
    assert judge_with("adam", "mvngrad").note.endswith(f"Adam{w.upper()}, MVN-Grad{w.upper()}.")


def test_selected_settings_outside_of_a_sweep_decide_nothing(read_export):
    """At batch 128 the second stage has the betas and floors that were best in the first."""
    floors = samples.sweep(lambda optimizer, settings: settings["beta2"] == 0.9, name="cifar100-bs128")
    verdict = samples.judge_by_claim(read_export(floors))["sweep-cifar-128-selected"]
    assert verdict.status == UNDECIDED
    assert "has no run of" in verdict.note
    lost = samples.sweep(lambda optimizer, settings: "diverged" if optimizer != "adamw" else 0.0, name="openwebtext")
    assert samples.judge_by_claim(read_export(lost))["sweep-openwebtext-selected"].status == NOT_REPRODUCED


def test_an_error_is_no_measurement(read_export):
    run = read_export(samples.sweep(samples.at_large_rates("raised", "adam")))
    verdict = samples.judge_by_claim(run)["sweep-mnist-variance"]
    assert verdict.status == NOT_RUN
    assert "6 runs of the sweep mnist raised an error: fix its cause, then `mvngrad sweep retry mnist`" in verdict.note


def test_a_sweep_without_one_of_the_four_decides_nothing(read_export):
    whole = samples.sweep(sweep="cifar100-bs1024-scaled", selected={})
    whole["runs"] = [row for row in whole["runs"] if row["optimizer"] != "laprop"]
    assert samples.judge_by_claim(read_export(whole))["sweep-scaled-quartiles"].status == NOT_RUN


# Transferred verdicts


def test_the_scaled_down_sweep_is_what_its_verdicts_say():
    ((scaled,), whole) = (SWEEPS[name]().stages for name in (SCALED, "cifar100-bs1024"))
    assert NOTES["scaled"].startswith("30 epochs for the paper's 200, 16 of its 36 configurations")
    assert {(recipe.epochs, recipe.batch_size) for recipe in scaled} == {(30, 1024)}
    assert set(Counter(recipe.optimizer for recipe in scaled).values()) == {16}
    paper = {recipe.key: recipe for stage in whole for recipe in stage}
    assert set(Counter(recipe.optimizer for recipe in paper.values()).values()) == {36}
    long = next(iter(paper.values()))
    assert {
        dataclasses.replace(recipe, epochs=long.epochs, warmup_epochs=long.warmup_epochs).key for recipe in scaled
    } <= paper.keys()


SHORT = [("mnist", "mnist", -1), (SCALED, "scaled", 1)]
"""A sweep, the name in its claims, and where better is."""


def noisy(change):
    """Changes, and noise that is different for each setting and optimizer."""

    def changed(optimizer, settings):
        shift = change(optimizer, settings)
        draw = random.Random(f"{optimizer} {settings['lr']} {settings['beta1']} {settings['beta2']}")
        return shift if isinstance(shift, str) else shift + draw.gauss(0, 0.02)

    return changed


def decide_transferred(read_export, name, short, change, *rules):
    """The verdicts of these rules alone: a permutation test takes its time."""
    judge([])  # registers the judges
    run = read_export(samples.sweep(noisy(change), name=name))
    results = [JUDGES[f"sweep-{short}-{rule}"](run) for rule in rules]
    return results if len(rules) > 1 else results[0]


@pytest.mark.parametrize(("name", "short", "good"), SHORT)
@pytest.mark.parametrize(
    ("changes", "best", "variance"),
    [
        ({"mvngrad": 0.2, "adabelief": 0.1}, CAVEAT, CAVEAT),
        ({"mvngrad": 0.1, "adabelief": 0.2}, NOT_REPRODUCED, CAVEAT),
        ({"mvngrad": 0.1}, CAVEAT, UNDECIDED),
        ({"mvngrad": 0.1, "adabelief": -0.1}, CAVEAT, NOT_REPRODUCED),
        ({"adam": 0.1, "laprop": 0.1}, NOT_REPRODUCED, NOT_REPRODUCED),
        ({}, UNDECIDED, UNDECIDED),
    ],
)
def test_medians_are_judged_by_pairs(read_export, name, short, good, changes, best, variance):
    change = samples.by(**{optimizer: good * size for optimizer, size in changes.items()})
    both = decide_transferred(read_export, name, short, change, "best", "variance")
    assert [verdict.status for verdict in both] == [best, variance]
    for verdict in both:
        assert "no number is the paper's" in verdict.note
        assert f"over {name}, and quartiles" in verdict.strip.what
        assert "largest p for the claim" in verdict.measured
    if name == SCALED:
        train = decide_transferred(read_export, name, short, change, "train")
        assert (train.status, "median train accuracy" in train.strip.what) == (variance, True)


def wider(*optimizers):
    """Five times as far from the middle: as much as the settings themselves make."""

    def change(optimizer, settings):
        base = abs(math.log10(settings["lr"] / 1e-3)) / 10
        return 5 * (base - 0.05) if optimizer in optimizers else 0.0

    return change


@pytest.mark.parametrize(("name", "short"), [each[:2] for each in SHORT])
@pytest.mark.parametrize(
    ("wide", "expected"),
    [
        (["adam", "adabelief"], CAVEAT),
        (["adam"], UNDECIDED),
        (["adam", "mvngrad"], NOT_REPRODUCED),
        (["laprop", "mvngrad"], NOT_REPRODUCED),
        ([], UNDECIDED),
    ],
)
def test_ranges_are_judged_by_swapping_pairs(read_export, name, short, wide, expected):
    verdict = decide_transferred(read_export, name, short, wider(*wide), "quartiles")
    assert verdict.status == expected
    assert "interquartile range of" in verdict.strip.what


@pytest.mark.parametrize(("name", "short", "good"), SHORT)
def test_a_diverged_run_is_worse_than_any_and_said(read_export, name, short, good):
    ahead = {"mvngrad": good * 0.1, "adabelief": good * 0.05}

    def change(optimizer, settings):
        lost = settings["lr"] == 1e-2 and settings["beta1"] < 0.95 and optimizer == "adam"
        return "diverged" if lost else ahead.get(optimizer, 0.0)

    best, variance = decide_transferred(read_export, name, short, change, "best", "variance")
    assert (best.status, variance.status) == (CAVEAT, CAVEAT)
    assert any(re.fullmatch(r"Adam, \d diverged", row.label) for row in best.strip.rows)
    for lost in ("adam", "mvngrad"):
        everywhere = decide_transferred(read_export, name, short, samples.at_large_rates("diverged", lost), "quartiles")
        assert everywhere.status == UNDECIDED
        assert "a quarter of the runs diverged" in everywhere.note
    best, variance = decide_transferred(read_export, name, short, samples.by(mvngrad="diverged"), "best", "variance")
    assert (best.status, variance.status) == (NOT_REPRODUCED, NOT_REPRODUCED)
    assert not math.isfinite(best.strip.rows[0].value)
    run = read_export(samples.sweep(samples.by(mvngrad="diverged"), name=name))
    text = render(judge([run]), [run], version="1", made="now")
    assert re.search(r'MVN-Grad, \d+ diverged</th>\s*<td class="track"[^>]*></td>\s*<td>failed</td>', text)


# Statistics


def test_quantiles_are_those_of_the_standard_library():
    draw = random.Random(1)
    for count in range(2, 30):
        values = [draw.random() for _ in range(count)]
        tenths = statistics.quantiles(values, n=20, method="inclusive")
        assert [quantile(values, i / 20) for i in range(1, 20)] == pytest.approx(tenths)
    for worst in (math.inf, -math.inf):
        assert quantile([1.0, 2.0, worst, worst], 0.5) == worst
        assert quantile([1.0, 2.0, 3.0, worst, 4.0], 0.5) == (3.0 if worst > 0 else 2.0)
    assert interquartile([1.0, 2.0, 3.0, math.inf]) == math.inf


@pytest.mark.parametrize(("count", "critical"), [(7, 0), (10, 5), (16, 23), (24, 69)])
def test_the_signed_rank_test_is_that_of_the_tables(count, critical):
    """The largest sum of ranks on the wrong side with p <= 0.01, one-sided, as printed in tables of Wilcoxon's test."""

    def p(wrong):
        signs = [1.0] * count
        for rank in range(count, 0, -1):
            if rank <= wrong:
                signs[rank - 1], wrong = -1.0, wrong - rank
        return signed_rank([(0.0, sign * rank) for rank, sign in enumerate(signs, start=1)])

    assert p(critical) <= 0.01 < p(critical + 1)


def test_the_signed_rank_test_of_ties_zeros_and_infinities():
    assert signed_rank([(0.0, 1.0), (0.0, 1.0), (0.0, -1.0)]) == 0.5  # one or no minus of eight, and three of one minus
    assert signed_rank([(1.0, 1.0)] * 5) == 1.0
    assert signed_rank([(0.0, math.inf), (math.inf, math.inf), (0.0, -1.0), (0.0, 2.0)]) == 0.25
    lows = (79.1, 79.9, 77.5, 78.2, 76.1, 79.4)
    rounded = [(low, round(low + 0.2, 1)) for low in lows] + [(70.1, 69.9)]
    assert len({abs(second - first) for first, second in rounded}) > 1, "equal up to rounding"
    assert signed_rank(rounded) == signed_rank([(0.0, 0.2)] * 6 + [(0.2, 0.0)]) == 8 / 2**7
    assert signed_rank([(0.2, high - low) for low, high in rounded[:6]]) == 1.0
    pairs = [(float(i % 7), float(i % 5)) for i in range(20)]
    sums = signed_rank(pairs) + signed_rank([pair[::-1] for pair in pairs])
    assert 1 < sums < 1.1, "what was seen is counted on both sides"


def test_the_permutation_test_holds_its_level_and_sees_a_wide_box():
    draw = random.Random(2)
    alike = [p_narrower([(draw.gauss(0, 1), draw.gauss(5, 1)) for _ in range(16)]) for _ in range(20)]
    assert all(sum(p < 0.05 for p in side) <= 4 for side in zip(*alike, strict=True))
    pairs = [(draw.gauss(0, 0.1), draw.gauss(5, 1)) for _ in range(24)]
    first, second = p_narrower(pairs)
    assert first < 0.01
    assert second > 0.9
    assert p_narrower([pair[::-1] for pair in pairs]) == (second, first)
