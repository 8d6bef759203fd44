"""Numbers about weight decay and a floor in the log, README, index and settings page are those of the stored runs."""

import json
import re
from dataclasses import replace
from itertools import product
from statistics import fmean

from pages import ROOT, load_results, read
from scipy import stats

from mvngrad.diagnostics.floor import FLOOR_COUPLED, FLOOR_DECOUPLED, FLOOR_WITHOUT_DECAY
from mvngrad_lab.experiments.floor.arms import RATES as RATES_OF_GRID, select_arms
from mvngrad_lab.experiments.floor.records import read_accuracies
from mvngrad_lab.report.statistics import estimate_contrast, estimate_ratio
from mvngrad_lab.report.verdicts import find_judges


def read_grid(queue):
    """Test accuracy in a grid of weight decay, by optimizer, coefficient and rate."""
    rows = json.loads((ROOT / "results" / f"floor-{queue}-grid.json").read_text())["runs"]
    keys = ("optimizer", "weight_decay", "lr")
    return {tuple(row["settings"][key] for key in keys): row["metrics"]["test_accuracy"] for row in rows}


def make_grid_rows(queue, optimizers, coefficients):
    """The rows of the log's table of a grid, a coefficient each."""
    accuracies = read_grid(queue)
    for coefficient in coefficients:
        cells = (
            " / ".join(f"{accuracies[optimizer, coefficient, lr]:.2f}" for optimizer in optimizers)
            for lr in (1e-4, 1e-3, 4e-3, 1e-2)
        )
        title = f"{coefficient:.0e}".replace("e-0", "e-") if coefficient < 1e-2 else f"{coefficient:g}"
        yield f"| {title} | {' | '.join(cells)} |"


def read_decays(cell, floor):
    """Test accuracy at 30 epochs without decay and with coupled decay of 5e-4, by rate, at the betas of the arm."""
    accuracies = read_accuracies(ROOT / "results")
    arm = select_arms(accuracies)[f"{cell}-{floor}"]
    recipes = {lr: replace(arm, lr=lr) for lr in RATES_OF_GRID}
    return {
        lr: [accuracies[replace(recipe, weight_decay=decay).key] for decay in (0.0, 5e-4)]
        for lr, recipe in recipes.items()
    }


SIGNS = {"floor": 1.0, "none": -1.0}


def test_the_floor_runs_with_decoupled_decay_and_without_decay():
    """If this fails after new runs: the log's entry about weight decay, and what the settings page and README say."""
    records = load_results()
    result = next(each.result for each in records if each.name == "floor-decay")
    log, settings, readme = read("log.md"), read("how-to/settings.md"), (ROOT / "README.md").read_text()
    names = {"adam": "Adam", "mvngrad": "MVN-Grad"}
    titles = {"w-none": "{}W, no floor", "-none": "{}, coupled decay, no floor", "-floor": "{}, coupled decay, floor"}
    for (arm, title), (cell, name) in product(titles.items(), names.items()):
        values = list(result["arms"][f"{cell}{arm}"].values())[:3]
        row = " | ".join(f"{value:.2f}" for value in (*values, fmean(values)))
        assert f"| {title.format(name)} | {row} |" in log
    decoupled, coupled = (
        fmean(list(result["arms"][f"{cell}{arm}"].values())[i] for cell in names for i in range(3))
        for arm in ("w-none", "-none")
    )
    assert f"without a floor (AdamW, MVNGradW) added {decoupled - coupled:.1f} (three seeds)" in FLOOR_COUPLED
    verdict = find_judges()["floor-decay-decoupled"](result)
    share, low, high = re.findall(r"(\d+)%", verdict.note)[:1] + re.findall(r"(\d+)%", verdict.note)[-2:]
    for page in (log, settings, readme, read("index.md")):
        text = " ".join(page.split())
        assert f"closes {share}%" in text or f"gives [{share}% of this gain]" in text
        assert re.search(rf"[(\[]95%( interval)?: {low}%? to {high}%[;)\]]", text)
    (whole, whole_range), (left, left_range) = (
        (f"{row.value:.2f}", "{:.2f} to {:.2f}".format(*row.interval)) for row in verdict.strip.rows
    )
    assert f"gain {whole} points by the floor (95%: {whole_range}); {left} points ({left_range}) stay open" in log
    assert f"{left} points (95%: {left_range}) of {whole} do." in read("index.md")
    for cell, name in names.items():
        floor, none = (result["no_decay"][f"{cell}-{kind}"]["best"] for kind in ("floor", "none"))
        decayed = [result["with_decay"][f"{cell}-{kind}"]["best"] for kind in ("floor", "none")]
        row = f"{floor:.2f} | {none:.2f} | {floor - none:+.2f} | {decayed[0] - decayed[1]:+.2f}"
        assert f"| {name} | {row} |" in log
        assert f"{none - floor:.1f}" in settings
        assert re.search(rf"{none - floor:.1f} (points )?with {name}\b", FLOOR_WITHOUT_DECAY)
    for row in make_grid_rows("decoupled", ("adamw", "mvngradw"), (0.05, 0.2, 1.0, 5.0)):
        assert row in log.replace("**", "")
    for (cell, name), floor in product(names.items(), ("none", "floor")):
        rows = [read_decays(cell, floor)[lr] for lr in (1e-4, 1e-3, 4e-3, 1e-2)]
        added = " | ".join(f"{decayed - plain:+.2f}" for plain, decayed in rows)
        assert f"| {name}, {'floor' if floor == 'floor' else 'no floor'} | {added} |" in log


def test_the_floor_runs_with_a_tuned_coupled_coefficient():
    """If this fails after new runs: the log's fourth part about the floor, and what settings page and README say."""
    records = load_results()
    result = next(each.result for each in records if each.name == "floor-decay")
    log, settings = read("log.md"), read("how-to/settings.md")
    arms = {name: list(values.values())[:3] for name, values in result["arms"].items() if values}
    tuned, coupled, floor = ((f"adam-{kind}", f"mvngrad-{kind}") for kind in ("tuned", "none", "floor"))
    for name, cell in (("Adam", tuned[0]), ("MVN-Grad", tuned[1])):
        row = " | ".join(f"{value:.2f}" for value in (*arms[cell], fmean(arms[cell])))
        assert f"| {name}, tuned coupled decay, no floor | {row} |" in log
    assert "they reach {:.2f} and {:.2f} (three seeds)".format(*(fmean(arms[arm]) for arm in tuned)) in settings

    def compare(better, worse):
        values = {arm: arms[arm] for arm in (*better, *worse)}
        effect = estimate_contrast(values, dict(zip(values, (0.5, 0.5, -0.5, -0.5), strict=True)))
        return effect.estimate, "{:.2f} to {:.2f}".format(*effect.interval())

    (added, interval), (left, left_interval) = compare(tuned, coupled), compare(floor, tuned)
    share = f"{added / compare(floor, coupled)[0]:.0%}"
    assert f"adds {added:.2f} points (95%: {interval}), {share} of the gap" in log.replace("**", "")
    assert f"they are {left:.2f} points ({left_interval}) above tuned coupled decay" in log
    index = " ".join(read("index.md").split())
    low, high = estimate_ratio(
        {arm: arms[arm] for arm in (*tuned, *coupled, *floor)},
        {arm: 0.5 if arm in tuned else -0.5 for arm in (*tuned, *coupled)},
        {arm: 0.5 if arm in floor else -0.5 for arm in (*floor, *coupled)},
    )[1]
    assert re.search(rf"\b{share}\S* \({low:.0%} to {high:.0%}\)".replace("% to", " to"), index)
    assert f"closes {share} (95%: {low:.0%} to {high:.0%}) of the gap" in settings
    assert f"is {left:.2f} points (95%: {left_interval}) better than tuned coupled decay" in index
    by_cell = [fmean(arms[f"{cell}-floor"]) - fmean(arms[f"{cell}-tuned"]) for cell in ("adam", "mvngrad")]
    assert "{:.2f} for Adam, {:.2f} for MVN-Grad.".format(*by_cell) in index
    assert f"it adds [{min(by_cell):.1f}](" in " ".join((ROOT / "README.md").read_text().split())
    assert f"still better by {left:.2f} points ({left_interval})" in settings
    assert f"and {left:.2f} against a tuned decay without one" in settings
    verdict = find_judges()["floor-decay-strength"](result)
    (row,) = verdict.strip.rows
    p = re.search(r"p for any gain ([\d.]+)", verdict.measured)[1]
    interval = "{:.2f} to {:.2f}".format(*row.interval)
    assert f"better by {row.value:.2f} points ({interval}), p = {p}, `floor-decay-strength`: {verdict.status}" in (
        log.replace("**", "")
    )
    assert f"by {row.value:.2f} points (95%: {interval})" in settings
    four = {arm: arms[arm] for arm in ("adamw-none", "mvngradw-none", *tuned)}
    for name, cell in (("Adam", "adam"), ("MVN-Grad", "mvngrad")):
        effect = estimate_contrast(four, {f"{cell}w-none": 1, f"{cell}-tuned": -1})
        of_cell = f"{effect.estimate:.2f} for {name} ({effect.interval()[0]:.2f} to {effect.interval()[1]:.2f})"
        assert all(of_cell in page for page in (log, settings))
    for row in make_grid_rows("coupled", ("adam", "mvngrad"), (2e-5, 6e-5, 2e-4)):
        assert row in log.replace("**", "")


def test_decoupled_decay_with_a_floor_at_200_epochs():
    """If this fails after new runs: the log's sixth part about the floor, the settings page, index and README."""
    records = {each.name: each.result for each in load_results()}
    result, log, settings = records["floor-decay"], read("log.md").replace("**", ""), read("how-to/settings.md")
    arms = {
        f"{cell}-{kind}": list(result["arms"][f"{cell}-{kind}"].values())
        for cell, kind in product(("adamw", "mvngradw"), ("floor", "none"))
    }
    for (cell, name), (kind, title) in product(
        (("adamw", "AdamW"), ("mvngradw", "MVN-GradW")), (("floor", "floor"), ("none", "no floor"))
    ):
        values = arms[f"{cell}-{kind}"]
        row = " | ".join(f"{value:.2f}" for value in (*values, fmean(values)))
        assert f"| {name}, {title} | {row} |" in log
    means = fmean(arms["adamw-floor"]), fmean(arms["mvngradw-floor"])
    assert f"AdamW reaches {means[0]:.2f} and MVN-GradW {means[1]:.2f}," in settings

    verdict = find_judges()["floor-decay-floor"](result)
    (row,) = verdict.strip.rows
    gain, interval = f"{row.value:.2f} points", "{:.2f} to {:.2f}".format(*row.interval)
    p_pooled = re.search(r"p for any gain ([\d.]+)", verdict.measured)[1]
    assert f"adds {gain} (95%: {interval}; p = {p_pooled}; `floor-decay-floor`: {verdict.status})" in log
    assert f"on average {gain} more than without (95%: {interval};" in settings
    index = " ".join(read("index.md").split())
    effects = {
        name: estimate_contrast(arms, {f"{name.replace('-', '').lower()}-{kind}": sign for kind, sign in SIGNS.items()})
        for name in ("AdamW", "MVN-GradW")
    }
    for name, effect in effects.items():
        low, high = effect.interval()
        assert f"{effect.estimate:.2f} for {name} ({low:.2f} to {high:.2f})" in log
    adamw, mvngradw = (effect.estimate for effect in effects.values())
    assert f"{adamw:.2f} for AdamW, which is not significant, {mvngradw:.2f} for MVN-GradW" in settings
    assert f"added {mvngradw:.1f} points to MVNGradW, and {adamw:.1f} to AdamW, which three" in FLOOR_DECOUPLED
    gains = f"{adamw:.1f} for AdamW, which is not significant, and {mvngradw:.1f} for MVN-GradW"
    by_seed = [fmean(column[0::2]) - fmean(column[1::2]) for column in zip(*arms.values(), strict=True)]
    p = stats.ttest_1samp(by_seed, 0, alternative="greater").pvalue
    sentence = "By seed it is {:+.2f}, {:+.2f} and {:+.2f}; a t-test on these three alone has p = {:.3f}"
    assert sentence.format(*by_seed, p) in log
    tested = rf"\[{row.value:.1f} points\]\S+ \(p = {p_pooled}; {p:.3f} from the three differences by seed\)"
    assert re.search(rf"With decoupled decay a floor still adds {tested}: {gains}\.", index)
