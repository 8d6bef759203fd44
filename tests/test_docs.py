"""The documentation's examples run, and what it cites exists."""

import json
import re
import warnings
from importlib import import_module
from pathlib import Path

import pytest
from vision import torchvision

ROOT = Path(__file__).parents[1]
TESTS = [path for folder in ("tests", "lab/tests") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


@pytest.mark.parametrize(
    ("row", "device", "model"), [("H200", "cuda", "gpt2-124m"), ("2 CPU cores", "cpu", "gpt2-30m")]
)
def test_the_readmes_numbers_are_those_of_results(row, device, model):
    (line,) = (line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|") and row in line)
    claimed = [float(cell.strip(" *")) for cell in line.split("|")[2:-1]]
    rows = json.loads((ROOT / "results" / f"step-{device}.json").read_text())["models"][model]["decoupled"]
    measured = {entry["name"]: entry["ratio"] for entry in rows}
    assert claimed == [round(measured[f"MVNGradW {path}"], 2) for path in ("eager", "foreach", "fused")]


def test_the_readmes_numbers_of_smaller_state_are_those_of_results():
    lines = (ROOT / "README.md").read_text().splitlines()
    rows = json.loads((ROOT / "results" / "step-cuda.json").read_text())["models"]["gpt2-124m"]["decoupled"]
    measured = {entry["name"]: entry for entry in rows}
    names = [f"MVNGradW fused{form}" for form in ("", " bf16", " int8", " lean", " lean bf16", " lean int8")]
    for start, key, digits in (("| bytes of state", "state_bytes", 1), ("| time, of torch's", "ratio_to_fused", 2)):
        (line,) = (line for line in lines if line.startswith(start))
        claimed = [float(cell) for cell in line.split("|")[2:-1]]
        assert claimed == [round(measured[name][key], digits) for name in names]


@pytest.mark.parametrize("batch", [128, 1024])
def test_the_readmes_accuracies_are_those_of_results(batch):
    (line,) = (line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| batch {batch} |"))
    runs = [json.loads(row) for row in (ROOT / "results" / "runs.jsonl").read_text().splitlines()]
    accuracies = {}
    for run in runs:
        recipe = run["recipe"]
        if run["name"] == "cifar100" and recipe["batch_size"] == batch and recipe["state_dtype"] == "float32":
            accuracies.setdefault(recipe["optimizer"], []).append(run["result"]["test_accuracy"])
    for name, cell in zip(("adam", "laprop", "adabelief", "mvngrad"), line.split("|")[2:-1], strict=True):
        claimed, measured = cell.split("(")[0].replace("*", "").strip(), accuracies.get(name)
        mean = f"{sum(measured) / len(measured):.2f}, n={len(measured)}" if measured else "to come"
        assert claimed == mean


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_link_targets_exist(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
