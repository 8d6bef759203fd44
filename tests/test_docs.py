"""The documentation's examples run, and what it cites exists."""

import ast
import inspect
import json
import re
import statistics
import warnings
from importlib import import_module
from pathlib import Path
from statistics import fmean

import pytest
from vision import torchvision

import mvngrad

ROOT = Path(__file__).parents[1]
TESTS = [path for folder in ("tests", "lab/tests") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CLAIMS = ROOT / "lab" / "src" / "mvngrad_lab" / "experiments" / "cifar100" / "claims.toml"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_blocks_of_a_page_run_in_order(page):
    if page.stem == "frameworks":
        torchvision()  # timm imports it
        warnings.simplefilter("ignore")  # warnings from the frameworks' own code
    namespace = {"__name__": "__main__"}
    for block in BLOCK.finditer(page.read_text()):
        exec(compile(block.group(1), str(page), "exec"), namespace)


@pytest.mark.parametrize("name", ["Adam", "AdaBelief", "LaProp", "MVNGrad"])
def test_the_signature_on_its_page_has_every_option(name):
    cell = getattr(mvngrad, name)
    (block,) = re.findall(rf"^{name}\((.*?)^\)", (ROOT / f"docs/optimizers/{name.lower()}.md").read_text(), re.M | re.S)
    arguments = ast.parse(f"def {name}({block}): ...").body[0].args
    shown = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    only = {"eps_s": cell.rule.centered, "beta_mean": name == "MVNGrad", "lean": name == "MVNGrad"}
    only |= {"decouple_lr": False, "z_clip": "z_clip" in cell.rule.options}
    options = inspect.signature(cell).parameters
    assert sorted(shown) == sorted(option for option in options if only.get(option, True))


def test_every_test_that_the_docs_name_exists():
    tests = "\n".join(path.read_text() for path in TESTS)
    prose = [BLOCK.sub("", page.read_text()) for page in PAGES]
    cited = {name for text in prose for name in re.findall(r"\btest_\w+\b(?!\.py)", text)}
    modules = {path.stem for path in TESTS}
    assert cited - modules
    missing = {name for name in cited - modules if f"def {name}(" not in tests}
    assert not missing


def resolve(name):
    """The object with a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise AttributeError(name)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_the_names_and_files_in_a_page_exist(page):
    prose = BLOCK.sub("", page.read_text())
    for name in re.findall(r"`(mvngrad(?:_lab)?(?:\.\w+)+)`", prose):
        resolve(name)
    for path in re.findall(r"`((?:src|lab|tests|results|benchmarks|docs)/[\w./-]*)`", prose):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


README = (ROOT / "README.md").read_text()


TABLE_SEEDS = (0, 1, 2)
"""Of Table 2 and of the seconds of Table 1; its accuracies have six (`test_the_order_of_table_1_with_six_seeds`)."""


def read_table(start):
    """The cells of the README's table whose head starts with this, without marks; empty cells repeat those above."""
    lines = README[README.index(f"\n| {start}") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip(" *`") for cell in line.split("|")[1:-1]] for line in (lines[0], *lines[2:])]


def read_steps(device, model):
    rows = json.loads((ROOT / "results" / f"step-{device}.json").read_text())["models"][model]["decoupled"]
    return {entry["name"]: entry for entry in rows}


def test_the_readmes_records_are_those_of_results():
    runs = [json.loads(row) for row in (ROOT / "results" / "runs.jsonl").read_text().splitlines()]
    columns = re.findall(r'id = "cifar-test-(\d+)".*?values = \{ (.*?) \}', CLAIMS.read_text(), flags=re.DOTALL)
    paper = {batch: dict(re.findall(r"([\w-]+) = ([\d.]+)", column)) for batch, column in columns}
    head, *rows = read_table("ours")
    assert head == ["ours (the paper's)", "Adam", "LaProp", "AdaBelief", "MVN-Grad", "command"]
    assert len(rows) == 3
    reproduce = (ROOT / "docs" / "how-to" / "reproduce.md").read_text()
    for task, *cells, _ in rows:
        (batch,) = re.findall(r"batch (\d+)", task) or [""]
        name, metric = ("cifar100", "test_accuracy") if batch else ("wikitext103", "validation_loss")
        alone = []
        for optimizer, cell in zip(head[1:5], cells, strict=True):
            settings = {"optimizer": optimizer.lower().replace("-", ""), "state_dtype": "float32"}
            settings |= {"batch_size": int(batch), "epochs": 200} if batch else {"steps": 3000, "lr": 0.001}
            found = [r for r in runs if r["name"] == name and settings.items() <= r["recipe"].items()]
            found = [r for r in found if r["recipe"]["seed"] in TABLE_SEEDS]
            assert len(found) == 3
            alone += [run["result"]["seconds"] for run in found if "beside" not in run["environment"]]
            mean = f"{statistics.fmean(run['result'][metric] for run in found):.2f}"
            assert cell.endswith(f" ({paper[batch][optimizer]})") if batch else cell == mean
        assert f"{min(alone):.0f} to {max(alone):.0f} s each" in reproduce


def test_the_readmes_steps_are_those_of_results():
    head, times, device_times, sizes = read_table("step of GPT-2")
    names = ["torch AdamW fused", "AdamW fused", "AdamW fused int8", "MVNGradW fused", "MVNGradW fused bf16"]
    names += ["MVNGradW fused int8", "MVNGradW fused lean int8"]
    assert len(head) == 1 + len(names)
    measured = read_steps("cuda", "gpt2-124m")
    assert times[1:] == [f"{measured[name]['ratio_to_fused']:.2f}" for name in names]
    replayed = [measured[name]["graph_milliseconds"] for name in names]
    assert device_times[1:] == [f"{each / replayed[0]:.2f}" for each in replayed]
    assert sizes[1:] == [f"{measured[name]['state_bytes']:.1f}" for name in names]
    words = " ".join(README.split())
    assert f"takes {times[2]} of the time of torch's, or {times[3]} with int8 state in a quarter of the memory" in words
    assert f"`MVNGradW` takes {times[4]}, but {device_times[4]} on the GPU alone" in words
    assert round(measured["torch AdamW fused"]["state_bytes"] / measured["AdamW fused int8"]["state_bytes"], 1) == 3.9
    ratio = read_steps("cpu", "gpt2-30m")["MVNGradW fused"]["ratio"]
    fused = f"`MVNGradW` with `fused=True` takes {ratio:.2f} times as long as torch's fused AdamW (GPT-2 30M)"
    assert f"On 2 CPU cores {fused}" in words


def test_the_first_step_is_that_of_results():
    log = " ".join((ROOT / "docs" / "log.md").read_text().split())
    seconds = json.loads((ROOT / "results" / "first-step-cpu.json").read_text())["seconds"]["with compilation"]
    assert f"The first step with compilation takes {statistics.median(seconds):.2f} s" in log


def test_the_times_and_bytes_against_other_implementations_are_those_of_results():
    page = (ROOT / "docs" / "how-to" / "memory.md").read_text()
    results = json.loads((ROOT / "results" / "memory-cuda.json").read_text())
    for row in results["steps"]:
        device = "" if row["graph_milliseconds"] is None else f"{row['graph_milliseconds']:.3f} "
        assert f"| {row['name']} | {row['bytes']:.2f} | {row['of_torch']:.2f} | {device}|" in page
    for row in results["training"]:
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {row['name']} |"))
        assert line.endswith(f"| {row['peak_bytes'] / 1e6:,.0f} | {row['of_torch']:.2f} |")
    device = {row["name"]: row["graph_milliseconds"] for row in results["steps"]}
    trainings = {row["name"]: row for row in results["training"]}
    names = ["AdamW int8, 24-bit masters", "FlashAdamW, 24-bit masters", "torch AdamW fused, bf16"]
    names += ["bitsandbytes AdamW8bit, bf16", "torchao AdamW8bit, bf16"]
    readme = " ".join(README.split())
    of = [f"{trainings[name]['of_torch']:.2f}" for name in names]
    assert f"is {of[0]} with our int8 `AdamW` and {of[1]} with FlashAdamW, both with 24-bit master weights" in readme
    rest = "{} with torch's AdamW, {} with bitsandbytes' `AdamW8bit` and {} with torchao's"
    assert f"Without masters it is {rest.format(*of[2:])} (" in readme
    ratio = device["MVNGradW int8, 24-bit masters"] / device["FlashAdamW, 24-bit masters"]
    assert f"and 24-bit masters takes {ratio:.2f} of the time of FlashAdamW" in " ".join(page.split())
    without, release = results["training"][-2:]
    assert f"with release takes {release['of_unreleased']:.3f} of the time of one without" in page
    saved = (without["peak_bytes"] - release["peak_bytes"]) / 1e6
    words = " ".join(page.split())
    assert f"lowers the peak by {saved:.0f} of the 249 MB" in words
    largest = json.loads((ROOT / "results" / "largest-cuda.json").read_text())["largest"]
    sizes = [f"{row['layers']} layers, {row['parameters'] / 1e9:.1f} billion" for row in largest]
    sentence = "float32 {} parameters; with lean `MVNGradW`, int8 and 24-bit masters {}; with release as well {} ("
    assert sentence.format(*sizes) in words


def test_the_accuracies_of_smaller_state_at_200_epochs_are_those_of_results():
    runs = [json.loads(row) for row in (ROOT / "results" / "runs.jsonl").read_text().splitlines()]
    means = []
    for state in ("bf16", "int8", "float32"):
        of = {"optimizer": "mvngrad", "batch_size": 1024, "state_dtype": state}
        found = [
            r["result"]["test_accuracy"]
            for r in runs
            if r["name"] == "cifar100" and of.items() <= r["recipe"].items() and r["recipe"]["seed"] in TABLE_SEEDS
        ]
        assert len(found) == 3
        means.append(f"{statistics.fmean(found):.2f} ± {statistics.stdev(found):.2f}")
    page = " ".join((ROOT / "docs" / "concepts" / "state.md").read_text().split())
    assert "ended at {2} in float32, {0} in bfloat16 and {1} in 8 bits".format(*means) in page


def test_readme_is_at_most_two_screens_long_and_has_the_two_commands():
    assert len(README.splitlines()) < 90
    assert {"make reproduce", "make test"} <= {line.split("#")[0].strip() for line in README.splitlines()}
    assert "(docs/how-to/settings.md)" in README.partition("<picture>")[0], "on the first screen"


def test_the_logs_second_measurement_of_a_step_is_that_of_results():
    def read_ratios(name):
        steps = json.loads((ROOT / "results" / f"step-cuda{name}.json").read_text())["models"]["gpt2-124m"]["decoupled"]
        memory = json.loads((ROOT / "results" / f"memory-cuda{name}.json").read_text())["steps"]
        pairs = {row["name"]: (row["ratio_to_fused"], row["graph_milliseconds"]) for row in steps}
        pairs |= {row["name"]: (row["of_torch"], row["graph_milliseconds"]) for row in memory}
        return pairs

    log, before, after = (ROOT / "docs" / "log.md").read_text(), read_ratios(""), read_ratios("-again")
    for name in ("AdamW", "AdamW int8", "MVNGradW", "MVNGradW bf16", "MVNGradW int8", "MVNGradW lean int8"):
        cls, _, options = name.partition(" ")
        check = f"{cls} fused {options}".strip(), "torch AdamW fused", f"{cls}, {options}".rstrip(", ")
        assert format_step_row(*check, before, after) in log
    for name in ("AdamW int8", "MVNGradW int8", "FlashAdamW"):
        masters = f"{name}, 24-bit masters"
        assert format_step_row(masters, "torch AdamW fused, float32", masters, before, after) in log


def format_step_row(name, reference, title, *runs):
    """A row of the log: each run's ratio to torch's step, then each run's ratio on the GPU alone."""
    ratios = [run[name][0] for run in runs] + [run[name][1] / run[reference][1] for run in runs]
    return f"| {title} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |"


def test_the_settings_pages_accuracies_by_betas_are_those_of_results():
    best_of_betas = {}
    for name in ("floor-grid", "floor-double-rate", "sweep-cifar100-bs1024-scaled"):
        for run in json.loads((ROOT / "results" / f"{name}.json").read_text())["runs"]:
            settings, accuracy = run["settings"], run["metrics"].get("test_accuracy", 0.0)
            floor = {1e-8: "floor", 1e-16: "no floor", None: "floor" if settings["eps"] == 1e-3 else "no floor"}
            key = settings["optimizer"], floor.get(settings["eps_s"], "sgd"), settings["beta1"], settings["beta2"]
            best_of_betas[key] = max(best_of_betas.get(key, 0.0), accuracy)
    page = (ROOT / "docs" / "how-to" / "settings.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    betas = [(0.7, 0.99), (0.8, 0.999), (0.9, 0.99), (0.95, 0.999)]
    by_betas = next(index for index, row in enumerate(rows) if row[0] == "`betas`")
    for line, floor in enumerate(("floor", "no floor"), start=2):
        measured = [best_of_betas[("mvngrad", floor, *pair)] for pair in betas]
        assert rows[by_betas + line][1:] == [f"{value:.2f}" for value in measured]


def test_the_switch_pages_losses_are_those_of_results():
    page = (ROOT / "docs" / "how-to" / "from-adamw.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    seeds = json.loads((ROOT / "results" / "switch-gpt2.json").read_text())["seeds"]
    for row, arm in zip(rows[2:6], ("AdamW", "converted", "fresh", "MVN-GradW"), strict=True):
        jump, end = (fmean(seed[key].get(arm, 0.0) for seed in seeds) for key in ("bump", "validation_loss"))
        assert row[1:] == [f"{jump:.3f}" if jump else "", f"{end:.4f}"]
    ends = [seed["validation_loss"] for seed in seeds]
    assert {round(end["converted"] - end["AdamW"], 3) for end in ends} == {-0.002}
    assert {round(end["fresh"] - end["AdamW"], 3) for end in ends} == {0.011, 0.012}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_link_targets_exist(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target and not target.startswith("../../actions/"):  # badges
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
