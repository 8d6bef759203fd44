"""Numbers in the docs that are written by hand are those of the stored runs."""

import json
import re
from itertools import permutations
from statistics import fmean, stdev

import pytest
from pages import ROOT, load_results, read

from mvngrad_lab.experiments.language.records import RATES
from mvngrad_lab.report.claims import load_claims
from mvngrad_lab.report.statistics import adjust_by_holm, p_fewer, welch
from mvngrad_lab.report.verdicts import find_judges

RUNS = [json.loads(line) for line in (ROOT / "results" / "runs.jsonl").read_text().splitlines()]


def mean(values, digits):
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else "none yet"
    return f"{fmean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def test_the_numbers_of_mnist():
    ((recipe, curves),) = ((run["recipe"], run["result"]) for run in RUNS if run["name"] == "mnist-curves")
    spikes = {cell: row["spikes"] for cell, row in curves["panels"]["batch 128"]["cells"].items()}
    counted = ", ".join(f"{cell} {mean(spikes[cell], 1)}" for cell in ("Adam", "AdaBelief", "LaProp", "MVN-Grad"))
    log = read("log.md")
    assert counted in log
    final = {cell: row["final_loss"] for cell, row in curves["panels"]["batch 128"]["cells"].items()}
    assert min(final["Adam"]) >= 2e15
    low, high = (each([*final["LaProp"], *final["MVN-Grad"]]) for each in (min, max))
    assert (
        f"AdaBelief fails ({min(final['AdaBelief']):.2f} to {max(final['AdaBelief']):.2f}); LaProp and MVN-Grad" in log
    )
    assert f"reach {low:.2f} to {high:.2f}" in log
    assert counted in read("how-to/settings.md")
    p = p_fewer(spikes["MVN-Grad"], spikes["LaProp"])
    total = f"{sum(spikes['MVN-Grad'])} spike in total against {sum(spikes['LaProp'])} (p = {p:.2f}, exact"
    assert total in log
    final = {cell: f"{fmean(row['final_loss']):.3f}" for cell, row in curves["panels"]["batch 1024"]["cells"].items()}
    assert final["MVN-Grad"] == final["AdaBelief"]
    losses = (
        f"final training loss {final['MVN-Grad']} for both variance cells, {final['LaProp']} and {final['Adam']} for"
    )
    assert losses in log
    large, row = recipe["panels"][1], curves["panels"]["batch 1024"]["cells"]
    pairs = (("MVN-Grad", "LaProp"), ("AdaBelief", "Adam"))
    (p,) = {f"{p:.0e}" for p in adjust_by_holm([welch(*(row[cell]["final_loss"] for cell in pair)) for pair in pairs])}
    assert (large["lr"], large["batch"], len(recipe["seeds"]), p) == (1e-4, 1024, 5, "5e-07")
    faster = "the paper's lr 1e-4 at batch 1024, AdaBelief and MVN-Grad are faster (final training loss "
    faster += f"{final['MVN-Grad']} for both, LaProp {final['LaProp']}, Adam {final['Adam']}, five seeds, p = 5e-7,"
    assert faster in read("how-to/settings.md")

    (gap,) = (run["result"] for run in RUNS if run["name"] == "mnist-gap")
    assert len(gap["steps"]) == 12
    at_50 = gap["steps"].index(50)
    for measured in gap["trained_with"].values():
        means = [fmean(column) for column in zip(*measured["gap"], strict=True)]
        before = [fmean(column) for column in zip(*measured["before"], strict=True)]
        assert min(means) > 0
        assert max(means) == means[0] == pytest.approx(0.034, abs=5e-4)
        assert means[0] / means[at_50] == pytest.approx(90, abs=10)
        assert all(round(each, 4) in (0.0003, 0.0004, 0.0005) for each in means[at_50:])
        shares = [each / all_of_it for each, all_of_it in zip(means, before, strict=True)]
        assert {round(share, 2) for share in shares[at_50:]} <= {0.03, 0.04, 0.05, 0.06}


def test_what_the_language_runs_show():
    (table,) = (each.result for each in load_results() if each.name == "table2")
    page = read("results.md").partition("## What the language runs show")[2].partition("```{include}")[0]
    tried = {
        cell: {float(lr): row["validation_loss"][0] for lr, row in rows.items()}
        for cell, rows in table["rates"].items()
    }
    for lr in RATES:
        assert f"| {lr:g} | {' | '.join(f'{losses[lr]:.3f}' for losses in tried.values())} |" in page
    best = [min(losses.values()) for losses in tried.values()]
    lost = sorted(losses[1e-3] - min(losses.values()) for losses in tried.values())
    assert f"each optimizer loses {lost[0]:.2f} to {lost[-1]:.2f} nats" in page
    assert f"within {max(best) - min(best):.3f} of each other" in page
    for lr, ahead in ((3e-4, True), (1e-3, True), (3e-3, False)):
        variance, others = (
            [tried[cell][lr] for cell in cells] for cells in (("AdaBelief", "MVN-Grad"), ("Adam", "LaProp"))
        )
        assert max(variance) < min(others) if ahead else min(variance) > max(others)

    cells, tuned = ({cell: row["validation_loss"] for cell, row in table[name].items()} for name in ("cells", "tuned"))
    for lr, rows in (("0.001", cells), ("0.003", tuned)):
        runs = sum(map(len, rows.values()))
        assert f"| {lr} | {runs} | {' | '.join(mean(row, 4) for row in rows.values())} |" in page
    p = {pair: welch(cells[pair[0]], cells[pair[1]]) for pair in permutations(cells, 2)}
    largest = max(value for (low, _), value in p.items() if low == "MVN-Grad")
    assert f"the largest p for MVN-Grad below the others is {largest:.2f}" in page
    assert [pair for pair, value in p.items() if value < 0.01] == [("LaProp", "Adam")]
    difference = fmean(cells["Adam"]) - fmean(cells["LaProp"])
    assert f"a difference of {difference:.3f}" in page
    gains = [fmean(cells[cell]) - fmean(row) for cell, row in tuned.items() if row]
    assert min(gains) > 30 * difference
    large = ", ".join(f"{name} {row['validation_loss'][0]:.3f}" for name, row in table["large"].items())
    assert large in page

    stored = [run["result"] for run in RUNS if run["name"] in ("wikitext103", "openwebtext")]
    small = sum(run["name"] == "wikitext103" for run in RUNS)
    assert f"{len(stored)} runs of GPT-2" in page
    assert f"{small} of the 30M model, {len(stored) - small} of the 124M model" in page
    assert f"{sum(run['steps'] for run in stored):,} steps of the {len(stored)} runs" in page
    assert not any(run["loss_spikes"] or run["nonfinite_steps"] for run in stored)
    assert f"{sum(len(run['norm_spikes']) for run in stored)} gradient norms are spikes" in page
    assert not any(row["to_come"] for row in table["tuned"].values())


def test_smaller_state_on_cifar100_at_30_epochs():
    records = load_results()
    result = next(each.result for each in records if each.name == "state-precision-images")
    log, state = read("log.md"), read("concepts/state.md")
    means = {arm: f"{fmean(values.values()):.2f}" for arm, values in result["arms"].items()}
    assert all(len(values) == 12 for values in result["arms"].values())
    assert "{bf16}, {int8} and {lean} against {float32} in float32".format(**means) in state
    for arm in ("bf16", "int8", "lean"):
        verdict = find_judges()[f"images-{arm}"](result)
        (row,) = verdict.strip.rows
        p = re.search(r"p for less than 0.3 points ([\d.]+)", verdict.measured)[1]
        lost = f"{row.value:.2f} ({row.interval[0]:.2f} to {row.interval[1]:.2f})"
        assert f"| {arm} | {means[arm]} | {lost} | {p} |" in log
        assert f"`images-{arm}`: {verdict.status}." in log


def test_8_bit_adamw_on_a_language_model():
    records = load_results()
    result = next(each.result for each in records if each.name == "state-precision-adamw")
    log, state, settings = (read(name) for name in ("log.md", "concepts/state.md", "how-to/settings.md"))
    means = {arm: fmean(values.values()) for arm, values in result["arms"].items()}
    for arm, values in result["arms"].items():
        assert f"| {arm} | {' | '.join(f'{value:.4f}' for value in (*values.values(), means[arm]))} |" in log
    torch, _, ours, *peers = means.values()
    assert f"8-bit state ends at a validation loss of {ours:.4f}, torch's in float32 at {torch:.4f}" in state
    assert "ended at {:.4f} and {:.4f}".format(*peers) in state
    for claim in ("adamw-float32", "adamw-int8", "adamw-int8-peers"):
        verdict = find_judges()[claim](result)
        assert f"`{claim}`: {verdict.status}." in log
        assert re.search(r"p for less than 0.02 nats ([\d.]+)", verdict.measured)[1] in log
        for row in verdict.strip.rows:
            assert f"{row.value:.4f}" in log
            assert "{:.4f} to {:.4f}".format(*row.interval) in log
    assert f"{ours - torch:.4f} nats lost against torch's in float32" in settings


def test_the_order_of_table_1_with_six_seeds():
    """If this fails after new runs: the log's entry on the order of Table 1, and the README under its tables."""
    result = next(each.result for each in load_results() if each.name == "table1")
    log, readme = read("log.md"), " ".join((ROOT / "README.md").read_text().split())
    for batch, rows in result["order"].items():
        values = [dict(zip(row["seeds"], row["test_accuracy"], strict=True)) for row in rows.values()]
        for seed in range(6):
            assert f"| {seed} | {' | '.join(f'{each[seed]:.2f}' for each in values)} |" in log
        means = [f"{fmean(each.values()):.2f}" for each in values]
        assert f"| mean | {' | '.join(means)} |" in log
        row = re.escape(f"| CIFAR-100, batch {batch}, accuracy |") + "".join(
            rf" {mean} \([\d.]+\) \|" for mean in means
        )
        assert re.search(row, readme)
        verdict = find_judges()[f"cifar-order-{batch}"](result)
        p, last = re.search(r"p-values ([\d.e-]+)", verdict.measured)[1], verdict.strip.rows[-1]
        assert f"(the largest of four p is {p}; `cifar-order-{batch}`: {verdict.status})" in log
        interval = f"{last.value:.2f} points (95%: {last.interval[0]:.2f} to {last.interval[1]:.2f})"
        assert interval in log
        assert interval in readme


def test_train_accuracy_on_mixed_images():
    """If this fails after new runs: the log's entry on it, and the page on training."""
    records = {each.name: each.result for each in load_results()}
    log, batches = read("log.md"), records["floor-as-published"]["batches"]
    for batch, title in (("1024", "batch 1024"), ("128", "batch 128")):
        rows = (batches[batch][cell]["mixed"] for cell in ("adam", "laprop", "adabelief", "mvngrad"))
        values = " | ".join("to come" if value is None else f"{value:.2f}" for value in rows)
        claim = next(each for each in load_claims() if each.id == f"floor-train-mixed-{batch}")
        papers = " | ".join(f"{value:.2f}" for value in claim.values.values())
        assert f"| {title} | {values} | | the paper's | {papers} |" in log
    large, small = (find_judges()[f"floor-train-mixed-{batch}"](records["floor-as-published"]) for batch in (1024, 128))
    assert f"(`floor-train-mixed-1024`: {large.status};" in log
    low, high = re.search(r"less the paper's \+([\d.]+) to \+([\d.]+)", small.measured).groups()
    assert (
        f"At batch 128 ours are {low} to {high} points above the paper's (`floor-train-mixed-128`: {small.status})"
        in log
    )


def test_the_quality_of_smaller_state_on_mnist():
    """If this fails after a new run: the log's entry on 8 bits, and the page on state."""
    result = json.loads((ROOT / "results" / "quality-mnist.json").read_text())
    log, state = (" ".join(read(page).split()) for page in ("log.md", "concepts/state.md"))
    rows = {
        (row["setting"], row["cell"], row["state"], row["lean"], row["metric"]): row
        for part in ("state", "lean")
        for row in result["verdicts"][part]
    }
    setting = "paper, batch 128"
    for cell, name, dtype in (
        ("MVNGrad", "MVN-Grad", "bfloat16"),
        ("MVNGrad", "MVN-Grad", "int8"),
        ("LaProp",) * 2 + ("int8",),
    ):
        accuracy, loss = (rows[setting, cell, dtype, False, metric] for metric in ("test_accuracy", "train_loss"))
        cells = [
            f"{row['mean']:+.{digits}f} ({row['low']:+.{digits}f} to {row['high']:+.{digits}f})"
            for row, digits in ((accuracy, 2), (loss, 4))
        ]
        assert f"| {name}, {dtype} | {accuracy['seeds']} | {' | '.join(cells)} |" in log
        if dtype == "int8":
            assert f"loss of {loss['arm']['mean']:.3f} instead of {loss['reference']['mean']:.3f}" in state
    accuracy, loss = (rows[setting, "MVNGrad", "int8", False, metric] for metric in ("test_accuracy", "train_loss"))
    lost = f"{-accuracy['mean']:.2f} points less of test accuracy ({-accuracy['high']:.2f} to {-accuracy['low']:.2f})"
    assert lost in state
    assert f"(95%: {loss['low']:.3f} to {loss['high']:.3f} more, {loss['seeds']} seeds)" in state
    assert all(
        row["text"] == "within seed noise" for key, row in rows.items() if key[0] == "paper, batch 1024" and not key[3]
    )
    for betas, name in (("(0.999, 0.7), batch 128", setting), ("(0.99, 0.5), where Adam diverges", "stressed")):
        row = rows[name, "MVNGrad", "float32", True, "test_loss"]
        assert f"| {betas} | not inferior | **{row['text']}**, by {row['mean']:.3f} nats |" in state
        assert f"higher by {row['mean']:.4f}" in log
    decayed = [
        row["text"] for key, row in rows.items() if key[3] and key[0] in ("paper, batch 1024", "coupled weight decay")
    ]
    assert decayed == ["not inferior"] * 4
