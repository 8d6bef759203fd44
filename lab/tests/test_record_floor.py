"""Numbers about the floor in the docs that are written by hand are those of the stored runs."""

import json
import re
from itertools import product
from statistics import fmean

from pages import ROOT, load_results, read
from scipy import stats
from test_record_decay import make_grid_rows, read_grid

from mvngrad.diagnostics import diagnose, read_records
from mvngrad.diagnostics.floor import FLOOR_COUPLED, FLOOR_LANGUAGE
from mvngrad_lab.experiments.floor import arms as floor_arms
from mvngrad_lab.experiments.floor.effects import VARIANCE_AT_EPS, compute_effects, compute_mnist_effects
from mvngrad_lab.experiments.floor.findings import get_judged_arms
from mvngrad_lab.experiments.floor.mnist import MnistDial
from mvngrad_lab.experiments.floor.records import read_accuracies
from mvngrad_lab.experiments.floor.rules import MARGIN
from mvngrad_lab.experiments.spikes.recipes import QUEUES, make_queue as make_spikes
from mvngrad_lab.experiments.spikes.records import read_runs as read_spikes
from mvngrad_lab.recipe import COUPLED
from mvngrad_lab.report.statistics import mean_and_deviation
from mvngrad_lab.report.verdicts import find_judges, find_latest
from mvngrad_lab.store import load_runs


def test_the_start_of_a_training_with_a_floor():
    log, start = read("log.md"), json.loads((ROOT / "results" / "cifar100-start.json").read_text())
    losses = {name: [f"{row['loss']:.2f}" for row in start[name]["rows"]] for name in ("MVN-Grad", "SGD")}
    assert "are {} and {} with MVN-Grad, and {} and {} with SGD".format(*losses["MVN-Grad"][:2], *losses["SGD"]) in log
    records = read_records(ROOT / "results" / "cifar100-start-monitor.jsonl")
    assert [f"{record['groups'][0]['epsilon_floor']:.0%}" for record in records] == ["99%"] * 3
    assert [record["step"] for record in records] == [8, 16, 24]
    (group,) = diagnose(records).groups
    assert f'"{group.finding}"' in read("gallery/diagnosis.md")
    assert f'"{group.finding.partition(", because")[0]}"' in read("how-to/diagnostics.md")


def test_the_floor_runs_at_200_epochs():
    """If this fails after new runs: the log's table of them, and what the settings page says."""
    tables = {name: each.result for name, each in find_latest(load_results()).items()}
    arms, log, settings = get_judged_arms(tables["floor-table"]), read("log.md"), read("how-to/settings.md")
    rows = json.loads((ROOT / "results" / "floor-table.json").read_text())["runs"]
    assert f"At 200 epochs {len(rows)} of 27 runs are done" in log
    assert f"`results/floor-table.json`, {len(rows)} of 27 runs" in settings
    cells = ("adam", "laprop", "adabelief", "mvngrad")
    for seed, kind in product(sorted({seed for of in arms.values() for seed in of}), ("floor", "none")):
        names = [*(f"{cell}-{kind}" for cell in cells), *(["sgd"] if kind == "floor" else [])]
        values = [f"{arms[name][seed]:.2f}" if seed in arms[name] else "to come" for name in names]
        title = "floor of 1e-3" if kind == "floor" else "no floor"
        assert f"| {title}, seed {seed} | {' | '.join(values)} |" in log
    for kind, title in (("floor", "floor of 1e-3"), ("none", "no floor")):
        means = " | ".join(f"{fmean(arms[f'{cell}-{kind}'].values()):.2f}" for cell in cells)
        assert f"| {title} | {means} |" in settings
    assert f"three seeds: {fmean(arms['sgd'].values()):.2f}" in settings
    for name, effect in compute_effects(tables["floor-table"]).items():
        low, high = effect.interval()
        assert f"| {name} | {effect.estimate:+.2f} | {low:+.2f} to {high:+.2f} |" in log
    gains = [fmean(arms[f"{cell}-floor"].values()) - fmean(arms[f"{cell}-none"].values()) for cell in cells]
    readme, index = " ".join((ROOT / "README.md").read_text().split()), " ".join(read("index.md").split())
    without = {cell: fmean(arms[f"{cell}-none"].values()) for cell in cells}
    leads = [without[a] - without[b] for a, b in product(("adam", "mvngrad"), ("laprop", "adabelief"))]
    measured = find_judges()["floor-interactions"](tables["floor-table"]).measured
    p = re.search(r"floor x variance x order ([\d.]+)", measured)[1]
    above = f"Adam and MVN-Grad are {min(leads):.1f} to {max(leads):.1f} points above LaProp and AdaBelief"
    assert re.search(rf"{above} \(\[floor, variance and order interact\]\S+, p = {p}\)", index)
    for page in (settings, readme, index):
        assert f"{min(gains):.1f} to {max(gains):.1f} points" in page
    floor = compute_effects(tables["floor-table"])["floor"]
    assert f"such a floor added {floor.estimate:.0f} points with coupled weight decay" in FLOOR_COUPLED
    variance, order = (compute_effects(tables["floor-table"])[name] for name in ("variance", "momentum last"))
    texts = ["{:.2f} to {:.2f}".format(*effect.interval()) for effect in (variance, order)]
    assert f"changes accuracy by {variance.estimate:.2f} points (95%: {texts[0]})" in index
    assert f"applying momentum after the division by {order.estimate:.2f} ({texts[1]})" in index
    p_values = [f"{effect.p_within(MARGIN):.2g}" for effect in (variance, order)]
    assert f"finds both within {MARGIN} points (p = {' and '.join(p_values)})" in index
    effects = compute_effects(tables["floor-table"])
    with_floor, without = (
        [f"{effects[f'{name}, {kind} a floor'].p_within(MARGIN):.2g}" for name in ("variance", "momentum last")]
        for kind in ("with", "without")
    )
    assert (
        f"with a floor (p = {' and '.join(with_floor)}), but not among those without ({' and '.join(without)})" in index
    )
    reached = [f"{fmean(arms[f'{cell}-floor'].values()):.2f}" for cell in cells]
    sgd = f"{fmean(arms['sgd'].values()):.2f}"
    assert "Adam reaches {}, LaProp {}, AdaBelief {}, MVN-Grad {}; SGD with momentum {}".format(*reached, sgd) in index
    for metric, where in (("train_accuracy_mixed", "of the last epoch is"), ("train_accuracy", "on clean images")):
        found = [row["metrics"][metric] for row in rows]
        assert f"{where} {min(found):.1f}% to {max(found):.1f}%" in log
    seconds = sorted(round(row["metrics"]["seconds"]) for row in rows)
    assert f"{seconds[0]} to {seconds[-3]} s, two {seconds[-2]} and {seconds[-1]} s" in log
    dial = tables["floor-mnist"]["cells"]
    for floors, where in ((("0",), "without a floor"), (("0.01", "0.1"), "at floors of 1e-2 and 1e-1")):
        best = [dial[cell][floor]["best"] for cell, floor in product(cells, floors)]
        assert f"{min(best):.1f}% to {max(best):.1f}% {where}" in settings
    assert f"{dial['sgd']['1']['best']:.1f}% with SGD" in settings
    for floor, title in (("0", "none"), ("0.001", "1e-3"), ("0.01", "1e-2"), ("0.1", "1e-1")):
        values = " | ".join(f"{dial[cell][floor]['best']:.2f}" for cell in cells)
        assert f"| {title} | {values} |" in log
    verdict = find_judges()["floor-mnist"](tables["floor-mnist"])
    gains = [f"{row.value:.2f}" for row in verdict.strip.rows]
    assert f"adds {', '.join(gains[:3])} and {gains[3]} points" in log
    p = re.findall(r" (0\.\d+)", verdict.measured)[:4]
    assert f"(p = {', '.join(p[:3])} and {p[3]} after Holm's correction; `floor-mnist`: {verdict.status})" in log


def test_the_effects_with_the_papers_settings():
    """If this fails after new runs: the log's entry on them, the index, the settings page and the floor's rules."""
    result = next(each.result for each in load_results() if each.name == "floor-table")
    log, index, settings = (" ".join(read(page).split()) for page in ("log.md", "index.md", "how-to/settings.md"))
    selected, effects = compute_effects(result), compute_effects(result, published=True)
    names = ("floor", "floor, Adam", "floor, LaProp", *(name for name in effects if name.startswith("variance,")))
    for name in (*names, "variance", "momentum last"):
        assert f"| {name} | {selected[name]} | {effects[name]} | {effects[name].p_different():.2g} |" in log
    assert f"(p for more than 1: {effects['floor'].p_above(1):.1e})" in log
    gains = [effect.estimate for name, effect in effects.items() if name.startswith("floor, ")]
    assert f"worth {min(gains):.1f} to {max(gains):.1f} points" in log
    variance = effects["variance"]
    low, high = sorted(-end for end in variance.interval())
    assert f"[dividing by the standard deviation costs {-variance.estimate:.2f} points]" in index
    assert f"(95%: {low:.2f} to {high:.2f}; not planned)" in index
    rules = (FLOOR_README.parent / "claims.toml").read_text()
    assert f"(variance {variance.estimate:.2f}, momentum last {effects['momentum last'].estimate:.2f})" in rules
    means, p = {}, []
    for arm, by_seed in result["published"].items():
        assert list(by_seed) == [str(seed) for seed in range(6)]
        ours = [result["arms"][arm][seed] for seed in "123"]
        means[arm] = f"{fmean(by_seed.values()):.2f}"
        if arm.endswith("none"):
            p.append(stats.ttest_ind(ours, list(by_seed.values()), equal_var=False).pvalue)
            assert f"{fmean(by_seed.values()) - fmean(ours):.1f}" in ("0.5", "0.9")
    assert f"p = {p[0]:.3f} and {p[1]:.4f}, Welch" in log
    assert f"Welch, p = {p[0]:.3f} and {p[1]:.3f})" in index
    assert "reach {adam-none} and {laprop-none}. Against these the floor adds 1.5 and 2.0".format(**means) in settings
    gained = fmean(result["arms"]["laprop-floor"][seed] for seed in "123") - float(means["laprop-none"])
    assert f"to [{gained:.1f}](docs/index.md" in read("../README.md")
    assert "with one, reach {adabelief-floor} and {mvngrad-floor} there".format(**means) in settings


def test_the_dial_on_the_sample_of_mnist():
    recipe = MnistDial("mnist-5k", epochs=10)
    (result,) = (run.result for run in load_runs(ROOT / "results") if run.key == recipe.key)
    verdict = find_judges()["floor-mnist"](result)
    gains, p = [f"{row.value:.2f}" for row in verdict.strip.rows], re.findall(r" (0\.\d+)", verdict.measured)[:4]
    text = "{}, {}, {} and {} points (p = {}, {}, {} and {}; {}, for MVN-Grad alone"
    assert text.format(*gains, *p, verdict.status) in read("log.md")
    readme = " ".join(FLOOR_README.read_text().split())
    assert f"they gain {min(gains)} to {max(gains)}, which is shown for MVN-Grad alone" in readme


def test_the_eight_arms_on_the_sample_of_mnist():
    """If this fails after a new run: the log's entry on 100 seeds, README, index and settings page."""
    result = next(each.result for each in load_results() if each.name == "floor-mnist-table")
    log, index, settings, readme = map(read, ("log.md", "index.md", "how-to/settings.md", "../README.md"))
    values = {arm: [*by_seed.values()] for arm, by_seed in result["arms"].items()}
    means = {arm: mean_and_deviation(row) for arm, row in values.items()}
    for kind in ("none", "floor"):
        assert " | ".join(means[f"{cell}-{kind}"] for cell in COUPLED) in log
    assert "| {adabelief-eps} | {mvngrad-eps} |".format(**means) in log
    assert f"SGD reaches {means['sgd']}." in log
    effects = compute_mnist_effects(result)
    gains = {name.partition(", ")[2]: effect for name, effect in effects.items() if name.startswith("floor, ")}
    assert ", ".join(f"{name} {effect}" for name, effect in gains.items()) in log
    epsilon, order, place = (effects[name] for name in (VARIANCE_AT_EPS, "momentum last", "eps_s less eps"))
    assert f"{str(epsilon)[:-1]}; p = {epsilon.p_different():.2g} for a difference from 0) |" in log
    for effect in (order, effects["variance"], effects["variance, with a floor"], effects["SGD"]):
        assert f"{effect} |" in log
    assert f"({str(effects['floor x variance']).replace(' (', ', ').rstrip(')')})" in log
    for claim in ("gain", "order", "variance", "epsilon", "sgd"):
        status = find_judges()[f"floor-mnist-{claim}"](result).status
        assert re.search(rf"`floor-mnist-{claim}`[^|]*\|[^|]*\| {status}", log)
    low, high = (f"{end([effect.estimate for effect in gains.values()]):.1f}" for end in (min, max))
    for page in (index, settings):
        assert f"[{low} to {high} points](" in page
    centered = effects["variance, with a floor"]
    assert "by {:.2f} points (95%: {:.2f} to {:.2f}).".format(order.estimate, *order.interval()) in index
    assert "adds {:.2f} ({:.3f} to {:.3f}) if".format(epsilon.estimate, *epsilon.interval()) in index
    assert "and {:.2f} ({:.2f} to {:.2f}) if".format(centered.estimate, *centered.interval()) in index
    assert f"adds [{epsilon.estimate:.2f} points]" in readme
    assert "(95%: {:.3f} to {:.3f}) if the floor is `eps` in all four".format(*epsilon.interval()) in readme
    assert f"and a floor of 1e-2 adds {low} to {high}." in readme
    assert "{:.2f} ({:.2f} to {:.2f}) if it is `eps_s`".format(centered.estimate, *centered.interval()) in readme
    assert "adds {:.2f} points (95%: {:.2f} to {:.2f})".format(place.estimate, *place.interval()) in log
    assert f"gain another {place.estimate:.2f}." in settings


def format_rate(rate):
    return f"{rate:.0e}".replace("e-0", "e-") if rate < 1 else f"{rate:g}"


def test_the_dial_on_cifar100_and_decoupled_decay_with_a_floor():
    """If this fails after new runs: the log's fifth part about the floor, and what the settings page says."""
    records = {each.name: each.result for each in load_results()}
    part, log, settings = records["floor-dial"]["images"], read("log.md"), read("how-to/settings.md")
    cells = {
        name: {**part["cells"][name], **part["cells"]["sgd"]} for name in ("adam", "laprop", "adabelief", "mvngrad")
    }
    assert all(row["done"] == row["of"] for rows in cells.values() for row in rows.values())
    titles = {
        "0": "none", "1e-05": "1e-5", "0.0001": "1e-4", "0.001": "1e-3", "0.01": "1e-2", "1": "1, which is SGD",
    }  # fmt: skip
    for floor, title in titles.items():
        found = [cells[cell][floor] for cell in cells]
        values = " | ".join(f"{row['best']:.2f} ({format_rate(row['lr'])})" for row in found)
        assert f"| {title} | {values} |" in log
    by_floor = {floor: [cells[cell][floor]["best"] for cell in cells] for floor in titles}
    assert all(rows["0.001"]["best"] == max(row["best"] for row in rows.values()) for rows in cells.values())
    ranges = [f"{min(by_floor[floor]):.1f}% to {max(by_floor[floor]):.1f}%" for floor in ("0.001", "0")]
    sgd = part["cells"]["sgd"]["1"]["best"]
    assert "{}, against {} without a floor and {:.1f}% with SGD".format(*ranges, sgd) in settings
    assert f"{part['gradient_rms']:.1e}".replace("e-0", "e-") in log
    times = f"{1e-3 / part['gradient_rms']:.1f} times the root mean square of the gradient"
    assert times in log
    assert times in settings
    verdict = find_judges()["floor-dial-images"](records["floor-dial"])
    gains = ", ".join(f"{row.label} {row.value:.2f}" for row in verdict.strip.rows)
    assert f"(`floor-dial-images`: {verdict.status}): {gains}." in log.replace("**", "")
    gains = [f"{abs(round(rows['0.0001']['best'] - rows['0']['best'], 1)):.1f}" for rows in cells.values()]
    assert gains[0] == gains[1]
    gained = f"(`eps`) gain {gains[0]} points, AdaBelief and MVN-Grad (`eps_s`) {gains[2]} and {gains[3]}"
    assert gained in settings
    apart = [rows["0.001"]["best"] - rows["0.01"]["best"] for rows in cells.values()]
    assert f"differ by {min(apart):.2f} to {max(apart):.2f} points" in log

    for row in make_grid_rows("decoupled-floor", ("adamw", "mvngradw"), (0.05, 0.2, 0.5, 1.0)):
        assert row in log.replace("**", "")
    best = [
        max(accuracy for (name, *_), accuracy in read_grid(queue).items() if name == optimizer)
        for queue, optimizer in product(("decoupled-floor", "decoupled"), ("adamw", "mvngradw"))
    ]
    assert "Best {:.2f} and {:.2f}; without a floor {:.2f} and {:.2f}".format(*best) in log
    more = f"AdamW {best[0] - best[2]:+.2f} points, MVN-GradW {best[1] - best[3]:+.2f}"
    assert more in settings
    assert f"with 6e-5 Adam reaches {read_grid('coupled')['adam', 6e-5, 4e-3]:.2f} without one" in settings
    ours, adamw = (list(records["floor-decay"]["arms"][f"{cell}w-floor"].values()) for cell in ("mvngrad", "adam"))
    lead, p = fmean(ours) - fmean(adamw), stats.ttest_rel(ours, adamw).pvalue
    assert f"MVN-GradW is {lead:.2f} points above AdamW (three seeds, paired, p = {p:.2f})" in settings


def test_the_dial_of_a_language_model():
    """If this fails after new runs: the log's seventh part about the floor, the settings page, index and README."""
    dial = next(each.result for each in load_results() if each.name == "floor-dial")
    part, log, settings = dial["language"], read("log.md").replace("**", ""), read("how-to/settings.md")
    readme = " ".join((ROOT / "README.md").read_text().split())
    cells = {cell: part["cells"][cell] for cell in ("adam", "laprop", "adabelief", "mvngrad")}
    titles = {"0": "none", "1e-06": "1e-6", "1e-05": "1e-5", "0.0001": "1e-4", "0.001": "1e-3"}
    lost = {}
    for floor, title in titles.items():
        found = [rows[floor] for rows in cells.values()]
        assert all(row["done"] == row["of"] for row in found)
        values = " | ".join(f"{row['best']:.3f} ({format_rate(row['lr'])})" for row in found)
        assert f"| {title} | {values} |" in log
        lost[floor] = sorted(row["best"] - rows["0"]["best"] for row, rows in zip(found, cells.values(), strict=True))
    verdict = find_judges()["floor-dial-language"](dial)
    first, *middle, last = (f"{row.label} {row.value:.2f}" for row in verdict.strip.rows)
    costs = f"{first} nats, {', '.join(middle)} and {last} (`floor-dial-language`: {verdict.status};"
    assert f"A floor of 1e-3 costs {costs}" in log
    costs = {floor: f"{of[0]:.2f} to {of[-1]:.2f}" for floor, of in lost.items()}
    for page in (readme, settings, read("index.md")):
        assert f"{costs['0.001']} nats" in page
    assert f"1e-5 {costs['1e-05']} nats, 1e-4 {costs['0.0001']}, 1e-3 {costs['0.001']} (GPT-2 30M" in settings
    assert f"costs {costs['0.0001']} already" in log
    assert f"({lost['1e-06'][0]:.3f} to {lost['1e-06'][-1]:.3f}; 0.03 counts as seen)" in log
    assert max(lost["1e-06"]) < 0.03
    times = f"{1e-3 / part['gradient_rms']:.0f} times the root mean square of"
    assert times in " ".join(log.split())
    assert times in " ".join(settings.split())
    low, high = ("{:.2f} to {:.2f}".format(*sorted(r[f]["best"] for r in cells.values())[::3]) for f in ("0", "0.001"))
    assert f"ends at {low} nats without a floor and at {high} with one" in settings

    runs = json.loads((ROOT / "results" / "floor-language-dial.json").read_text())["runs"]
    losses = {run["key"]: run["metrics"]["validation_loss"] for run in runs}
    by_rate, recipes = {}, iter(floor_arms.language_dial())  # in the order floors, cells, rates
    for floor, rates in floor_arms.LANGUAGE_DIAL.items():
        for cell in cells if floor < 1 else ["sgd"]:
            by_rate[floor, cell] = [losses.get(next(recipes).key) for _ in rates]
    worse = [by_rate[floor, cell][0] - min(by_rate[floor, cell]) for floor in (1e-4, 1e-3) for cell in cells]
    sgd = by_rate[1.0, "sgd"]
    text = f"it is worse by {min(worse):.2f} to {max(worse):.2f}, for SGD by {sgd[0] - min(sgd):.2f}"
    assert text in " ".join(log.split())
    text = "With SGD, a floor of 1, the loss is {:.3f} at rate 3, {:.3f} at 10, {:.3f} at 30 and {:.3f} at 100."
    assert text.format(*sgd) in log


def test_the_table_of_settings_for_images():
    records = {each.name: each.result for each in load_results()}
    table, decay = records["floor-table"], records["floor-decay"]
    rows = re.findall(r"\| `(\w+)\(([^`]*)\)` \| ([\d.]+) \| (yes|no) \|", read("how-to/settings.md"))
    assert len(rows) == 7
    for name, text, accuracy, floor in rows:
        arm = f"{name.lower()}-{'floor' if floor == 'yes' else 'none'}"
        result = decay if name.endswith("W") else table
        arms = decay["arms"] if name.endswith("W") else get_judged_arms(table)
        options = dict(re.findall(r"(\w+)=(\([^)]*\)|[^,]+)", text))
        selected = result["selected"][arm]
        betas = tuple(map(float, options.pop("betas").strip("()").split(",")))
        assert betas == (selected["beta1"], selected["beta2"])
        assert {option: float(value) for option, value in options.items()}.items() <= selected.items()
        assert accuracy == f"{fmean(arms[arm].values()):.2f}"


def test_runs_to_come_are_those_that_are_missing():
    """If this fails after new runs: the table on the page about reproducing, and the floor's README."""
    page, done = read("how-to/reproduce.md"), read_accuracies(ROOT / "results")

    def count_left(*queues):
        return len({r.key for queue in queues for r in floor_arms.make_queue(queue, done)} - done.keys())

    rows = dict(re.findall(r"\| `((?:floor|spikes)\.run [^`]+)` \| (\d+)", page))
    assert rows == {command: str(count_left(*command.split()[1:])) for command in rows}
    spikes = read_spikes(ROOT / "results")
    left = {recipe.key for queue in QUEUES for recipe in make_spikes(queue, spikes)} - spikes.keys()
    assert not left, "those of spikes"
    named = {queue for command in rows for queue in command.split()[1:]}
    assert {queue for queue in floor_arms.QUEUES if count_left(queue)} == named


def test_a_floor_at_batch_128():
    """If this fails after new runs: the log's eighth part about the floor, the settings page and index."""
    records = {each.name: each.result for each in load_results()}
    result, log, settings = records["floor-batch-128"], read("log.md").replace("**", ""), read("how-to/settings.md")
    accuracies = read_accuracies(ROOT / "results")
    titles = {
        "adam-floor": ("Adam, floor", " (`eps=1e-3`)"), "adam-none": ("Adam, none", ""),
        "mvngrad-floor": ("MVN-Grad, floor", " (`eps_s=1e-8`, 1e-3)"), "mvngrad-none": ("MVN-Grad, none", ""),
    }  # fmt: skip
    means = {}
    for arm, (title, epsilon) in titles.items():
        recipes = sorted(floor_arms.batch_128_grid()[arm], key=lambda recipe: recipe.lr)
        assert f"| {title}{epsilon} | {' | '.join(f'{accuracies[r.key]:.2f}' for r in recipes)} |" in log
        values = list(result["arms"][arm].values())
        means[arm] = fmean(values)
        assert f"| {title} | {' | '.join(f'{value:.2f}' for value in (*values, means[arm]))} |" in log
    verdict = find_judges()["floor-batch-128"](result)
    (row,) = verdict.strip.rows
    gain, interval = f"{row.value:.2f} points", "(95%: {:.2f} to {:.2f}".format(*row.interval)
    assert (
        f"A floor adds {gain} {interval}; p for more than 1 point = 1e-5; `floor-batch-128`: {verdict.status})" in log
    )
    assert "p for more than 1 point 1e-05" in verdict.measured
    assert f"adds {gain} {interval}) to Adam and MVN-Grad: {means['adam-none']:.2f} and" in settings
    without, floor = (f"{means[f'adam-{kind}']:.2f} and {means[f'mvngrad-{kind}']:.2f}" for kind in ("none", "floor"))
    assert f"{without} without one at lr 5e-4, {floor} with one at 1e-3" in settings
    assert result["rates"] == {arm: 1e-3 if arm.endswith("floor") else 5e-4 for arm in titles}
    assert re.search(
        rf"\[{row.value:.1f}\]\(\S*#the-floor-eighth-part-at-batch-128-it-adds-24-points\) to Adam and",
        read("index.md"),
    )


FLOOR_README = ROOT / "lab" / "src" / "mvngrad_lab" / "experiments" / "floor" / "README.md"


def test_what_a_floor_costs_a_language_model_is_what_diagnose_says():
    records = {each.name: each.result for each in load_results()}
    part = records["floor-dial"]["language"]
    cells = {name: rows for name, rows in part["cells"].items() if name != "sgd"}
    assert all(row["done"] == row["of"] for rows in cells.values() for row in rows.values())
    sentences = ("a floor of {:.2g} times the root mean square of the gradient cost {}", "one of {:.2g} times {}")
    for floor, sentence in zip(("0.0001", "0.001"), sentences, strict=True):
        costs = [rows[floor]["best"] - rows["0"]["best"] for rows in cells.values()]
        span = f"{min(costs):.2f} to {max(costs):.2f}" + (" nats" if floor == "0.0001" else "")
        assert sentence.format(float(floor) / part["gradient_rms"], span) in FLOOR_LANGUAGE
    runs = json.loads((ROOT / "results" / "floor-language-dial.json").read_text())["runs"]
    assert {run["settings"]["weight_decay"] for run in runs} == {1e-6}


def test_beta_mean():
    records = {each.name: each.result for each in load_results()}
    pairs = [pair for kind, pair in records["floor-beta-mean"]["pairs"].items() if kind != "language"]
    best = [pair[which]["best"] for which in ("changed", "default") for pair in pairs]
    sentence = "{:.2f} with a floor and {:.2f} without, where the paper's faster mean has {:.2f} and {:.2f}"
    assert sentence.format(*best) in read("log.md")
    language = [best["best"] for best in records["floor-beta-mean"]["pairs"]["language"].values()]
    assert "best of three rates: {:.3f} and {:.3f}".format(*language) in read("log.md")
