"""Table 1, the table of state formats and benchmarks in the report: from the runs there are, by the rules."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from samples import add_tables, get_table, get_verdicts

from mvngrad_lab import store
from mvngrad_lab.cli import main
from mvngrad_lab.experiments.cifar100.figure import describe_table
from mvngrad_lab.experiments.cifar100.records import table1
from mvngrad_lab.experiments.state_precision.records import state_precision
from mvngrad_lab.report import BenchmarkFile, keep_runs, load_records
from mvngrad_lab.report.page import draw
from mvngrad_lab.report.statistics import p_variance_above, welch, worse_by_at_most
from mvngrad_lab.report.tables import OPTIMIZERS, judge_deviations
from mvngrad_lab.report.verdicts import (
    CAVEAT,
    COMPARED,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    UNDECIDED,
    UNDERPOWERED,
    judge,
)
from mvngrad_lab.store import MetricsFile
from mvngrad_lab.tasks.cifar100.recipe import SELECTED
from mvngrad_lab.training import train as training

PAPER = {
    128: {"adam": 77.82, "laprop": 77.72, "adabelief": 79.93, "mvngrad": 79.94},
    1024: {"adam": 78.26, "laprop": 78.40, "adabelief": 79.34, "mvngrad": 79.63},
}
WAVES = (-0.02, 0.0, 0.02, 0.01, 0.0, -0.01)
BYTES = {"float32": 12, "bf16": 6, "int8": 3}
RESULTS = Path(__file__).parents[2] / "results"


def make_run(recipe, accuracy=79.6, status="finished"):
    metrics = {"test_accuracy": accuracy, "train_accuracy": 99.0} if status == "finished" else {}
    memory = {"parameters": 1000, "state_bytes": 1000 * BYTES[recipe.state_dtype]}
    result = {"status": status, **metrics, **memory, "seconds": 100.0, "data": "made up"}
    return store.FinishedRun(recipe.key, recipe.name, recipe.settings, {"device": "H200", "commit": "abc"}, result)


def beside(run):
    """As if another run had used the same GPU."""
    environment, result = {**run.environment, "beside": "another"}, {**run.result, "seconds": 900.0}
    return dataclasses.replace(run, environment=environment, result=result)


def diverged(run):
    return dataclasses.replace(run, result={"status": "diverged", "seconds": 100.0})


def make_runs(shift=lambda recipe: 0.0):
    """All 24 of Table 1, and three more seeds: the paper's number, a shift, and a little for the seed and the cell."""
    recipes = [*table1(), *(dataclasses.replace(r, seed=r.seed + 3) for r in table1())]
    cells = list(PAPER[128])
    return [
        make_run(r, PAPER[r.batch_size][r.optimizer] + WAVES[r.seed] * (1 + cells.index(r.optimizer)) + shift(r))
        for r in recipes
    ]


def test_table_1_has_24_runs_with_seeds_innermost():
    recipes = table1()
    assert len({recipe.key for recipe in recipes}) == 24
    assert [recipe.seed for recipe in recipes] == [0, 1, 2] * 8
    assert {recipe.epochs for recipe in recipes} == {200}
    assert {(recipe.optimizer, recipe.batch_size) for recipe in recipes} == SELECTED.keys()
    assert {recipe.optimizer for recipe in recipes} == set(OPTIMIZERS.values())


def shift_one(optimizer, batch, by):
    return lambda recipe: by * ((recipe.optimizer, recipe.batch_size) == (optimizer, batch))


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        (lambda r: 0.0, {"test-128": REPRODUCED, "test-1024": REPRODUCED, "order-128": REPRODUCED}),
        (shift_one("adam", 128, -1.0), {"test-128": CAVEAT, "test-1024": REPRODUCED}),
        (lambda r: 5.0, {"test-128": NOT_REPRODUCED, "test-1024": NOT_REPRODUCED}),
        (
            lambda r: 79.0 - PAPER[r.batch_size][r.optimizer],  # all are equal
            {"order-128": UNDECIDED, "order-1024": UNDECIDED},
        ),
        (lambda r: 0.0, {"order-1024": REPRODUCED}),
        (shift_one("mvngrad", 1024, -0.29), {"order-1024": CAVEAT}),
    ],
)
def test_accuracies_are_judged_by_their_band_and_order(shift, expected):
    verdicts = get_verdicts(make_runs(shift))
    assert {name: verdicts[f"cifar-{name}"].status for name in expected} == expected


def test_an_order_that_does_not_show_is_undecided_and_the_reverse_is_not_reproduced():
    """The same means as in the paper, and a deviation of points: not a failure to reproduce."""

    def spread(recipe):
        cell = list(PAPER[128]).index(recipe.optimizer)
        return 5.0 * (-1) ** ((recipe.seed + 1) // (cell + 1)) if recipe.batch_size == 1024 else 0.0

    verdicts = get_verdicts(make_runs(spread))
    assert verdicts["cifar-order-1024"].status == UNDECIDED
    assert verdicts["cifar-order-128"].status == REPRODUCED
    level = get_verdicts(make_runs(lambda r: -2.0 if r.optimizer in ("mvngrad", "adabelief") else 0.0))
    assert level["cifar-order-1024"].status == NOT_REPRODUCED


def test_notes_name_what_is_outside_and_how_far_the_lead_is():
    verdicts = get_verdicts(make_runs(shift_one("adam", 128, -1.0)))
    assert verdicts["cifar-test-128"].note == "Outside 0.6: Adam."
    verdicts = get_verdicts(make_runs(shift_one("mvngrad", 1024, -0.29)))
    assert verdicts["cifar-order-1024"].note == "MVN-Grad is not shown to be above AdaBelief."
    three = [run for run in make_runs() if run.recipe["seed"] < 3]
    assert get_verdicts(three)["cifar-order-128"].note == "There were too few seeds to decide: 3 of 6."
    *most, last = make_runs()
    assert get_verdicts([*most, diverged(last)])["cifar-order-1024"].note == (
        "Diverged: 1 of MVN-Grad; the rule compares 6 pairs."
    )


def equal(recipe):
    """The shift by which all four have the same mean."""
    return 79.0 - PAPER[recipe.batch_size][recipe.optimizer]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (make_runs(), "points relative to Adam and LaProp (n = 6), as the paper says."),
        (make_runs(equal), "points relative to Adam and LaProp (n = 6), undecided by the rule."),
        (
            make_runs(lambda r: equal(r) if r.batch_size == 1024 else 0.0),
            "(n = 6), at batch 128 as the paper says and at batch 1024 undecided by the rule.",
        ),
        (
            [*make_runs()[:-1], diverged(make_runs()[-1])],
            "(n = 5 or 6), at batch 128 as the paper says and at batch 1024 undecided because a run diverged.",
        ),
        (
            make_runs()[:-1],
            "(n = 5 or 6), at batch 128 as the paper says and at batch 1024 with too few seeds to decide.",
        ),
        (make_runs()[:24], "(n = 3), with too few seeds to decide."),
        (
            make_runs(lambda r: 0.5 * (r.optimizer == "adabelief")),
            "at batch 1024 as the paper says with a caveat (MVN-Grad is not shown to be above AdaBelief).",
        ),
    ],
)
def test_the_finding_of_table_1_says_what_the_rule_says_at_each_batch_size(runs, words):
    sentence = describe_table(get_table(runs, "table1").result, get_verdicts(runs))
    assert sentence.replace("\u00a0", " ").endswith(words)


def test_the_caption_of_table_1_counts_the_runs_that_it_does_not_show():
    captions = [draw(get_table(runs, "table1"))[0].caption for runs in (make_runs(), make_runs()[:24])]
    assert captions[0].startswith(
        "24 of 24 runs of 200 epochs are done; 24 with other seeds count for the order alone."
    )
    assert captions[1].startswith("24 of 24 runs of 200 epochs are done. ")


def test_means_are_undecided_where_two_are_outside_but_not_beyond_doubt():
    def shift(recipe):
        low = recipe.batch_size == 128 and recipe.optimizer in ("adam", "laprop")
        return (-0.9 + 0.5 * (recipe.seed % 3 - 1)) * low

    verdict = get_verdicts(make_runs(shift))["cifar-test-128"]
    assert (verdict.status, verdict.note) == (UNDECIDED, "Outside 0.6, but not beyond doubt: Adam, LaProp.")
    assert get_verdicts(make_runs(shift))["cifar-test-1024"].status == REPRODUCED


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.0, REPRODUCED), (5.0, UNDECIDED), (100.0, NOT_REPRODUCED), (0.01, NOT_REPRODUCED)]
)
def test_deviations_are_judged_by_their_ratio(factor, expected):
    values = {"Adam": [1 - 0.18 * factor, 1.0, 1 + 0.18 * factor], "LaProp": [0.8, 1.0, 1.2]}
    assert judge_deviations(values, {"Adam": 0.18, "LaProp": 0.20}, 3).status == expected


def test_seconds_are_compared_and_not_judged():
    runs = [dataclasses.replace(r, result={**r.result, "seconds": 50.0 + i}) for i, r in enumerate(make_runs())]
    verdict = get_verdicts(runs)["time-cifar"]
    assert verdict.status == COMPARED
    assert [(row.label, row.value, row.n) for row in verdict.strip.rows] == [
        ("batch 128", 55.5, 12),
        ("batch 1024", 67.5, 12),
    ]
    assert get_verdicts([beside(run) for run in runs])["time-cifar"].status == NOT_RUN


def test_missing_and_diverged_runs_are_named():
    runs = [r for r in make_runs() if not (r.recipe["optimizer"] == "laprop" and r.recipe["batch_size"] == 128)]
    verdicts = get_verdicts(runs)
    assert (verdicts["cifar-test-128"].status, verdicts["cifar-test-1024"].status) == (NOT_RUN, REPRODUCED)
    assert verdicts["cifar-test-128"].note == "Runs to come: 3 of LaProp."
    first, *others = make_runs()
    verdict = get_verdicts([diverged(first), *others])["cifar-test-128"]
    assert verdict.status == UNDECIDED
    assert "diverged: 1 of Adam" in verdict.measured


def test_a_table_names_the_code_of_every_part_of_its_runs():
    first, *others = make_runs()
    parts = [{"from_step": 0, "commit": "before"}, {"from_step": 3, "commit": "abc"}]
    resumed = dataclasses.replace(first, result={**first.result, "environments": parts})
    assert get_table([resumed, *others], "table1").environment["commit"] == "abc, before"


def test_a_run_with_another_setting_is_not_in_the_table():
    other = make_run(dataclasses.replace(table1()[0], weight_decay=1e-4), 77.0)
    assert add_tables([other]) == [other]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], ("3", "77.82 ± 0.02", "99.00 ± 0.00", "100")),
        ([beside], ("3", "77.82 ± 0.02", "99.00 ± 0.00", "100")),
        ([beside] * 3, ("3", "77.82 ± 0.02", "99.00 ± 0.00", "")),
        ([diverged], ("3, 1 diverged", "77.83 ± 0.01", "99.00 ± 0.00", "100")),
        ([diverged] * 3, ("3, 3 diverged", "diverged", "diverged", "")),
    ],
)
def test_rows_have_times_of_runs_alone_on_a_gpu_and_count_diverged_ones(changes, expected):
    runs = make_runs()
    runs[: len(changes)] = [change(run) for change, run in zip(changes, runs, strict=False)]
    (figure,) = draw(get_table(runs, "table1"))
    row = figure.table.rows[0]
    assert (row[1], *row[2:4], row[5], row[7]) == ("Adam", *expected)
    assert len(figure.table.rows) == 2 * len(OPTIMIZERS)
    assert figure.table.rows[-1][:5] == ("1024", "MVN-Grad", "3", "**79.63 ± 0.08**", "79.63")
    assert [panel.title for panel in figure.panels] == ["Batch 128", "Batch 1024"]
    assert "MVN-Grad 79.63 ± 0.08 (paper 79.63)" in figure.panels[1].svg


def test_stored_runs_have_the_keys_of_the_tables():
    """A changed recipe would orphan the results in the repository."""
    stored = {run.key for run in store.load_runs(RESULTS) if run.name == "cifar100"}
    assert len(stored & {recipe.key for recipe in (*table1(), *state_precision())}) == 30


# State in fewer bits


def make_state_runs(noise=0.05, **shift):
    return [make_run(r, 79.6 + noise * (r.seed - 1) + shift.get(r.state_dtype, 0.0)) for r in state_precision()]


def test_three_of_nine_runs_are_of_table_1():
    recipes = state_precision()
    assert len({recipe.key for recipe in recipes}) == 9
    assert {r.key for r in recipes} & {r.key for r in table1()} == {r.key for r in recipes[:3]}
    assert {(r.optimizer, r.batch_size, r.epochs) for r in recipes} == {("mvngrad", 1024, 200)}


@pytest.mark.parametrize(
    ("options", "expected", "note"),
    [
        ({}, REPRODUCED, ""),
        ({"int8": 1.0}, REPRODUCED, ""),
        ({"int8": -0.25}, CAVEAT, "Only bf16."),  # the mean is within the margin, the bound is not
        ({"int8": -0.25, "bf16": -0.5}, NOT_REPRODUCED, ""),
        ({"int8": -0.25, "bf16": -0.25}, UNDECIDED, ""),  # neither at most 0.3 points, nor more
        ({"noise": 0.4}, UNDECIDED, UNDERPOWERED),
    ],
)
def test_the_bound_decides_and_not_the_mean(options, expected, note):
    verdict = get_verdicts(make_state_runs(**options))["cifar-state-precision"]
    assert (verdict.status, verdict.note) == (expected, note)


def test_missing_and_diverged_state_runs_are_named():
    runs = make_state_runs()
    assert get_verdicts(runs[:-1])["cifar-state-precision"].note == "Runs to come: 1 with int8."
    assert get_verdicts(runs[:3])["cifar-state-precision"].status == NOT_RUN, "runs of Table 1 alone"
    verdict = get_verdicts([*runs[:-1], diverged(runs[-1])])["cifar-state-precision"]
    assert verdict.status == NOT_REPRODUCED
    assert "diverged: 1 with int8" in verdict.measured
    for others in ([], runs[-1:]):
        lost = [runs[0], *others]
        verdict = get_verdicts([diverged(run) if run in lost else run for run in runs])["cifar-state-precision"]
        assert verdict.status == UNDECIDED, "what they are compared with diverged"
        assert "1 with float32" in verdict.measured


def test_the_table_of_states_has_differences_and_bytes():
    table = get_table(make_state_runs(bf16=-0.1), "state-precision")
    rows = draw(table)[0].table.rows
    assert rows[0] == ("float32", "3", "79.60 ± 0.05", "", "", "", "12,000 (12.00)")
    p = 2 * welch([79.45, 79.5, 79.55], [79.55, 79.6, 79.65])
    assert rows[1][3:] == ("-0.10", f"{p:.2g}", "0.19", "6,000 (6.00)")
    assert table.recipe["batch_size"] == 1024
    assert "state_dtype" not in table.recipe
    part = get_table(make_state_runs()[3:5], "state-precision")
    assert [row[2] for row in draw(part)[0].table.rows] == ["to come", "79.57 ± 0.04", "to come"]
    runs = make_state_runs()
    lost = get_table([*runs[:6], *map(diverged, runs[6:])], "state-precision")
    assert draw(lost)[0].table.rows[2][:4] == ("int8", "3, 3 diverged", "diverged", "")


# Statistics


def test_welch():
    assert welch([1.0, 2.0, 3.0], [2.0, 3.0, 5.0]) == pytest.approx(0.14231358938071087, abs=1e-10)
    assert welch([2.0, 3.0, 5.0], [1.0, 2.0, 3.0]) == pytest.approx(1 - 0.14231358938071087, abs=1e-10)
    assert (welch([1.0, 1.0], [2.0, 2.0]), welch([1.0, 1.0], [1.0, 1.0])) == (0, 1)
    assert math.isnan(welch([1.0], [2.0, 3.0]))
    values, reference = [79.3, 79.5, 79.6], [79.5, 79.6, 79.9]
    bound = worse_by_at_most(values, reference)
    assert welch(reference, [value + bound for value in values]) == pytest.approx(0.05, abs=1e-9)
    assert worse_by_at_most([1.0, 1.0], [1.5, 1.5]) == pytest.approx(0.5)
    assert math.isnan(worse_by_at_most([1.0], [1.0, 2.0]))


def test_the_f_test_agrees_with_printed_tables():
    """Of F(2, 6) the upper 5% begin at 5.143, and the upper 1% at 10.925."""
    others = [[-1.0, 0.0, 1.0]] * 3
    for f, p in ((5.1433, 0.05), (10.9248, 0.01)):
        assert p_variance_above([-math.sqrt(f), 0.0, math.sqrt(f)], others) == pytest.approx(p, rel=1e-4)
    assert p_variance_above([0.0, 0.0, 1.0], [[2.0, 2.0, 2.0]]) == 0
    assert p_variance_above([1.0, 1.0, 1.0], [[2.0, 2.0, 2.0]]) == 0.5


# Runs that a repository keeps


def write_run(root, run):
    for part, content in (
        ("recipe", {"name": run.name, **run.recipe}), ("environment", run.environment), ("result", run.result),
    ):  # fmt: skip
        store.write_atomic(root / run.key / f"{part}.json", json.dumps(content))


def test_runs_of_tables_and_of_gpu_experiments_are_kept(tmp_path):
    recipes = [table1()[0], state_precision()[-1]]
    gap = store.FinishedRun("cifar-gap-0", "cifar-gap", {}, {}, {})
    expected = [make_run(recipes[0]), make_run(recipes[1], status="diverged")]
    trial = make_run(dataclasses.replace(recipes[0], train_limit=2048))
    for run in (*expected, trial, store.FinishedRun("spike-0", "spike", {}, {"quick": True}, {})):
        write_run(tmp_path / "runs", run)
    store.write_bundle(tmp_path / "results" / "runs.jsonl", [gap])
    assert keep_runs(tmp_path / "runs", tmp_path / "results" / "runs.jsonl") == 2
    assert {run.key for run in store.load_runs(tmp_path / "results")} == {"cifar-gap-0", *(run.key for run in expected)}
    write_run(tmp_path / "runs", gap)
    metrics = MetricsFile(tmp_path / "runs" / expected[0].key / "metrics.jsonl", 0)
    for epoch, accuracy in ((1, None), (10, 40.0), (200, 77.8)):
        metrics.add({"step": epoch, "epoch": epoch} | ({"test_accuracy": accuracy} if accuracy else {}))
    assert keep_runs(tmp_path / "runs", tmp_path / "new" / "runs.jsonl") == 3
    kept = {run.key: run.result for run in store.load_runs(tmp_path / "new")}
    assert kept[expected[0].key]["curve"] == [[10, 40.0], [200, 77.8]]
    assert "curve" not in kept[expected[1].key]
    _, curves = draw(get_table(list(store.load_runs(tmp_path / "new")), "table1"))
    assert "Adam 77.80 (n = 1)" in curves.panels[0].svg


def test_stored_runs_are_not_trained_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipes, trained, shares = state_precision()[:3], [], []
    write_run(tmp_path / "runs", make_run(recipes[0]))
    store.write_bundle(tmp_path / "results" / "runs.jsonl", [make_run(recipes[1])])
    monkeypatch.setattr(training, "train", lambda recipe, **options: trained.append(recipe))
    training.train_missing(recipes, tmp_path / "runs", None, shares.append, print)
    assert trained == [recipes[2]]
    assert shares == pytest.approx([1 / 3, 2 / 3, 1])


# Benchmarks


def load_benchmarks():
    records = load_records(RESULTS, warn=pytest.fail)
    return {record.name: record for record in records if isinstance(record, BenchmarkFile)}


def test_step_times_and_hours_are_compared_and_not_judged():
    record = load_benchmarks()["throughput-gpt2"]
    rows = record.result["overhead"]["124M"]["rows"]
    laprop = next(row for row in rows if row["name"] == "LaPropW float32")
    (ours,) = (row for row in record.result["throughput"]["30M"] if row["name"] == "ours")

    def compare(claim):
        return {each.id: verdict for each, verdict in judge([record])}[claim]

    steps = compare("time-openwebtext")
    assert steps.status == compare("time-wikitext").status == COMPARED
    ratios = {row.label: (row.value, row.reference) for row in steps.strip.rows}
    assert ratios["AdamW"] == (1.0, 1.0)
    assert "(the paper's 12.8 h)" in steps.measured
    adam = next(row for row in rows if row["name"] == "AdamW float32")
    assert ratios["LaPropW"] == (laprop["step_seconds"] / adam["step_seconds"], 47.4 / 46.2)
    (hours,) = compare("time-wikitext").strip.rows
    assert (hours.value, hours.reference) == (ours["projected_seconds"] / 3600, 4.0)
    rows.remove(laprop)
    del record.result["throughput"]["30M"]
    assert compare("time-openwebtext").status == compare("time-wikitext").status == NOT_RUN


def test_every_row_of_a_benchmark_is_in_a_table():
    records = load_benchmarks()
    del records["switch"]  # trained networks, with a table of their own
    for record in records.values():
        rows = record.result.get("rows") or [
            *(row for rows in record.result["throughput"].values() for row in rows),
            *(row for overhead in record.result["overhead"].values() for row in overhead["rows"]),
        ]
        assert len([row for figure in draw(record) for row in figure.table.rows]) == len(rows) > 4


def test_the_report_has_benchmarks_and_warns_of_damaged_files(tmp_path, monkeypatch, capsys):
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
    warnings = capsys.readouterr().err
    assert "runs/language-cuda.json is left out" in warnings
    assert "runs/engine.json is left out, because it is not what a benchmark writes: rows" in warnings
    rows = json.loads(Path("results/engine.json").read_text())
    del rows["rows"][0]["runs_per_second"]
    Path("runs/engine.json").write_text(json.dumps(rows))
    assert main(["report"]) == 0
    assert "engine is left out, because its result is not what this version writes" in capsys.readouterr().err
